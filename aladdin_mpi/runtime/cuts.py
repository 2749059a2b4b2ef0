"""When checkpoints are made, and what a worker puts into one.

A checkpoint is *called* by the server, or by worker 0 where there is none.  Every worker makes its
part at the end of the step at hand, or, where all make as many steps (the trait ``lockstep``), all
after the same one.  It copies its state and goes on; a thread of its own writes the copy.  Nobody
waits for anybody.

A worker's pushes say which part it made last.  The server's part then holds exactly the pushes that
were made before: it copies its model when the first push comes that is later, and goes on merging
earlier ones of the others into the copy as well (:mod:`aladdin_mpi.runtime.servercuts`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from aladdin_mpi.algorithms.base import Algorithm, Topology
from aladdin_mpi.messages import RequestKind, Stop
from aladdin_mpi.runtime import checkpoint
from aladdin_mpi.runtime.state import clone, rng_state, to_plain

__all__ = ["PREEMPTED", "Due", "PeerCuts", "Plan", "WorkerCuts", "ask_to_stop", "signals"]

PREEMPTED = 75
"""Exit code of a run that was stopped to be started again (sysexits: try again later)."""

LEAD = 3
"""Steps from the latest one that the server knows of to the one after which all make their part: a
worker has at most two pushes on their way, and hears of the call with the acknowledgement of one.
"""


@dataclass(frozen=True)
class Plan:
    """When to make checkpoints; 0: not for that reason.

    Attributes
    ----------
    epochs : float
    iterations : int
        Per worker.
    minutes : float
    keep : int
        Complete ones that are kept.
    time_limit : float
        [min] after which the run makes a checkpoint and stops, to be started again.
    """

    epochs: float = 0.0
    iterations: int = 0
    minutes: float = 0.0
    keep: int = 2
    time_limit: float = 0.0

    @property
    def active(self) -> bool:
        """Checkpoints are made, whatever happens."""
        return bool(self.epochs or self.iterations or self.minutes or self.time_limit)


class Due:
    """Whether a checkpoint is due; times count from the start of this process's part of the run."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._start = self._last = time.monotonic()
        self._epochs = self._iterations = 0.0

    def begin(self, epochs: float, iterations: float) -> None:
        """Where the run goes on from."""
        self._epochs, self._iterations = epochs, iterations

    def now(self, epochs: float, iterations: float) -> bool:
        """By epochs of all workers together, iterations of a worker, or time."""
        plan, now = self._plan, time.monotonic()
        due = bool(
            (plan.epochs and epochs - self._epochs >= plan.epochs)
            or (plan.iterations and iterations - self._iterations >= plan.iterations)
            or (plan.minutes and now - self._last >= 60 * plan.minutes)
        )
        if due:
            self._epochs, self._iterations, self._last = epochs, iterations, now
        return due

    def out_of_time(self) -> bool:
        """The run's time limit has passed."""
        limit = self._plan.time_limit
        return bool(limit) and time.monotonic() - self._start >= 60 * limit


class Signals:
    """SIGUSR1 and SIGTERM ask this rank to stop with a checkpoint, unless the user handles them."""

    def __init__(self) -> None:
        self._came = False
        self._then: Callable[[], None] | None = None

    def watch(self) -> None:
        """From now on nothing is killed by them."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._handle)

    def call(self, then: Callable[[], None]) -> None:
        """What to do about one, also about one that came before."""
        self._then = then
        if self._came:
            then()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if self._then is not None:
            self._then()


signals = Signals()


class WorkerCuts:
    """A worker's parts.

    Parameters
    ----------
    session : object
        With ``algorithm``, ``settings``, ``link``, ``clock``, ``drivers``, ``loaders``.
    writer : checkpoint.Writer
    plan : Plan
    """

    def __init__(self, session: Any, writer: checkpoint.Writer, plan: Plan) -> None:
        self._session, self._writer, self._plan = session, writer, plan
        self.done = 0  # number of the last part
        self.ended = False

    def after_step(self, iteration: int) -> None:
        """At the end of a step: make what was called."""
        notice = self._session.link.notice
        if notice.cut > self.done and iteration + 1 >= notice.cut_at:
            self.make(notice.cut)

    def make(self, number: int) -> None:
        """Copy this worker's state, and have it written."""
        self.done = number
        self._writer.write(number, self.state())
        for driver in self._session.drivers:
            driver.port.cut = number

    def finish(self) -> None:
        """This worker makes no step any more: what it is now stands for it in later ones."""
        self.ended = True
        if self._plan.active and self._session.link.notice.stop != Stop.PREEMPTED:
            self._writer.write_ended(self.state())

    def wait(self) -> None:
        """Until all is on the disk."""
        self._writer.wait()

    def state(self) -> checkpoint.State:
        """All that this worker goes on from."""
        session = self._session
        clock, drivers = session.clock, session.drivers
        found = {
            "role": "worker",
            "worker": session.link.worker,
            "algorithm": session.algorithm.name,
            "options": session.settings.description,
            "iteration": clock.iteration,
            "epoch": clock.epoch,
            "own_samples": clock.own_samples,
            "unpushed_samples": clock.samples,
            "names": [[entry.name for entry in driver.params.entries] for driver in drivers],
            "optimizers": [clone(driver.optimizer.state_dict()) for driver in drivers],
            "algorithms": [to_plain(driver.algorithm.state_dict()) for driver in drivers],
            "ports": [to_plain(driver.port.state_dict()) for driver in drivers],
            "loaders": [loader.state_dict() for loader in session.loaders],
            "rng": rng_state(),
        }
        if session.algorithm.topology is not Topology.SERVER:
            for driver in drivers:
                driver.buffers.gather()
            found["parameters"] = [to_plain(driver.params.gathered()) for driver in drivers]
            found["floats"] = [to_plain(driver.buffers.floats) for driver in drivers]
            found["counts"] = [to_plain(driver.buffers.counts) for driver in drivers]
        return found


class PeerCuts:
    """Calls among workers without a server.

    Worker 0 sends a call by a broadcast whose receives were posted before; all then add up what
    became of it, also without waiting.  Where a worker in lockstep hears of a call after the step
    that it names, the checkpoint does not count, and worker 0 calls for the next one earlier.
    """

    MADE, LEFT, MISSED = 1.0, 2.0, 3.0

    def __init__(
        self, cuts: WorkerCuts, link: Any, clock: Any, plan: Plan, algorithm: Algorithm, first: int,
        writer: checkpoint.Writer,
    ) -> None:  # fmt: skip
        self._cuts, self._link, self._clock, self._writer = cuts, link, clock, writer
        self._plan, self._due = plan, Due(plan)
        self._lockstep = "lockstep" in algorithm.traits
        self._calls = link.worker == 0
        self._number = first
        self._lead = 8
        self._idle = self._calls
        self._stop_wanted = self._stop_called = False
        self._call = np.zeros(
            3, np.int64
        )  # number (−1: no more), after which step, whether to stop
        self._answers = np.zeros(link.num_workers)
        self._armed = False
        self.length = 0  # of the data set
        if not self._calls:
            link.broadcast_later("cuts", self._call, self._heard)

    # -- training thread --------------------------------------------------------------------------

    def begin(self) -> None:
        """Training begins, or goes on."""
        self._due.begin(self._epochs(), self._clock.iteration)

    def after_step(self, iteration: int) -> None:
        """Call, or make this worker's part of what was called."""
        if self._calls and self._idle:
            stop = self._link.preempt or self._due.out_of_time()
            if not self._stop_called and (
                stop or self._due.now(self._epochs(), self._clock.iteration)
            ):
                self._idle = False
                self._number += 1
                at = self._clock.iteration + self._lead if self._lockstep else 0
                self._call[:] = self._number, at, stop
                self._link.broadcast_later("cuts", self._call, self._heard)
        if self._armed:
            number, at, _ = self._call.tolist()
            made = iteration + 1
            if made == at or (not at and made):
                self._armed = False
                self._cuts.make(number)
                self._link.post(self._answer, self.MADE)
            elif at and made > at:
                self._armed = False
                self._link.post(self._answer, self.MISSED)

    def finish(self) -> None:
        """This worker makes no step any more."""
        self._cuts.finish()
        self._link.post(self._end)

    def _epochs(self) -> float:
        return self._clock.seen_samples() / self.length if self.length else 0.0

    # -- communication thread ---------------------------------------------------------------------

    def _heard(self) -> None:
        if self._call[0] < 0:
            return
        if self._cuts.ended:
            self._answer(self.LEFT)
        else:
            self._armed = True

    def _end(self) -> None:
        if self._armed:
            self._armed = False
            self._answer(self.LEFT)
        if self._calls and self._idle:
            self._over()

    def _over(self) -> None:
        self._idle = False
        self._call[0] = -1
        self._link.broadcast_later("cuts", self._call, lambda: None)

    def _answer(self, what: float) -> None:
        self._answers[:] = 0.0
        self._answers[self._link.worker] = what
        self._link.sum_later("cuts", self._answers, self._judge)

    def _judge(self) -> None:
        number, _, stop = self._call.tolist()
        good = not (self._answers == self.MISSED).any()
        if good and stop:
            self._link.notice = self._link.notice._replace(stop=int(Stop.PREEMPTED))
        if not self._calls:
            self._link.broadcast_later("cuts", self._call, self._heard)
            return
        if good:
            self._stop_called = bool(stop)
            left = np.flatnonzero(self._answers == self.LEFT).tolist()
            self._writer.write_head(number, left)
        else:
            self._lead *= 2
        if self._cuts.ended:
            self._over()
        else:
            self._idle = True


def ask_to_stop(link: Any) -> None:
    """This rank was told to stop: so are all."""
    link.preempt = True
    link.tell(RequestKind.PREEMPT)
