"""A worker's step: runs the algorithm around the user's optimizer, and times all of it.

Times are taken at the borders that the package owns: the loader and the optimizer's step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from aladdin_mpi.algorithms.base import Worker
from aladdin_mpi.core.flat import FlatBuffers, FlatParams
from aladdin_mpi.core.port import Incoming
from aladdin_mpi.errors import NonFiniteError
from aladdin_mpi.messages import MAX_GROUPS, Notice, Phase, Push, Reply, SendTimes
from aladdin_mpi.record.schema import EventKind
from aladdin_mpi.runtime.links import Recording, WorkerEnd, WorkerLinkLike

__all__ = ["Driver", "StepClock", "WorkerPort"]


class StepClock:
    """Where the time of the current step goes; one per worker, shared by its optimizers.

    Attributes
    ----------
    end_s : float
        [s] monotonic time when the last step ended.
    data_s, compute_s : float
        [s] waited for batches, and computed on all but the last of them, since then.
    ready_s : float
        [s] monotonic time from which computing counts.
    samples, epoch, iteration : int
        Samples since the last push; where training is.
    """

    def __init__(self, link: WorkerLinkLike) -> None:
        self._link = link
        self.end_s = self.ready_s = time.monotonic()
        self.data_s = self.compute_s = 0.0
        self._asked = self.end_s
        self.samples = 0  # not pushed yet
        self.batch = 0  # of the current step
        self.own_samples = 0
        self.epoch = 0
        self.iteration = 0
        self.loss = math.nan
        self.forward_s = self.backward_s = math.nan
        self.emulated = False

    def phase(self, phase: Phase) -> None:
        """Tell the others, by the next heartbeat, what this worker is doing."""
        self._link.phase, self._link.phase_since = phase, time.monotonic()

    def fetching(self) -> None:
        """The loop asks the loader for a batch."""
        self.phase(Phase.DATA)
        self._asked = time.monotonic()
        if self.batch:  # another batch of the same step: gradients are accumulated
            self.compute_s += self._asked - self.ready_s

    def fetched(self, samples: int) -> None:
        """A batch is there."""
        self.ready_s = time.monotonic()
        self.data_s += self.ready_s - self._asked
        self.batch += samples
        self.samples += samples
        self.own_samples += samples
        self.phase(Phase.COMPUTE)

    def seen_samples(self) -> int:
        """Samples that all workers have consumed, as far as this one knows."""
        notice = self._link.notice
        return notice.samples - notice.own_samples + self.own_samples

    @contextmanager
    def outside(self, phase: Phase) -> Iterator[None]:
        """What happens inside counts to no step."""
        start = time.monotonic()
        self.phase(phase)
        yield
        took = time.monotonic() - start
        self.end_s += took
        self.ready_s += took
        self.phase(Phase.COMPUTE)


class WorkerPort:
    """The port of one optimizer, over whatever link there is; measures what it is asked to do."""

    def __init__(
        self,
        end: WorkerEnd,
        link: WorkerLinkLike,
        clock: StepClock,
        recorder: Recording,
        buffers: FlatBuffers,
        rates: Callable[[], tuple[float, ...]],
        on_lost: Callable[[str], None],
        num_workers: int,
    ) -> None:
        self.num_workers, self.slots = num_workers, end.slots
        self._end, self._link, self._clock, self._recorder = end, link, clock, recorder
        self._buffers, self._rates, self._on_lost = buffers, rates, on_lost
        self.times = {"push_s": 0.0, "blocked_s": 0.0, "mix_s": 0.0}
        self.sent_iterations = 0
        self.coalesced = False
        self.iteration_mean_s = 0.0
        self._active = num_workers  # when the steps that are not pushed yet were begun
        self._meta: dict[int, tuple[int, int, bool, int]] = {}
        end.on_sent = self._sent

    def try_push(
        self, write: Callable[[np.ndarray], bool], iterations: int, *, limit: int, **header: object
    ) -> int:
        start = time.monotonic()
        sequence = 0
        if self._end.in_flight() < min(limit, self.slots):
            sequence = self._write(write, iterations, header)
        self.coalesced = sequence == 0
        self.times["push_s"] += time.monotonic() - start
        return sequence

    def _write(
        self, write: Callable[[np.ndarray], bool], iterations: int, header: dict[str, object]
    ) -> int:
        frame = self._end.next_frame()
        if not write(frame.params):
            return -1
        self._buffers.gather()
        np.copyto(frame.floats, self._buffers.floats)
        np.copyto(frame.counts, self._buffers.counts)
        clock, sequence = self._clock, self._end.next_sequence
        push = Push(
            self._link.worker, sequence, iterations, clock.samples, rates=self._rates(),
            iteration_s=self.iteration_mean_s, loss=clock.loss, active=self._active, **header,  # type: ignore[arg-type]
        )  # fmt: skip
        self._active = self._link.notice.active
        self._meta[sequence] = (iterations, clock.samples, push.wants_reply, push.version)
        clock.samples = 0
        self.sent_iterations = iterations
        self._end.submit(push)
        return sequence

    def wait_push(self, limit: int) -> None:
        start = time.monotonic()
        if self._end.in_flight() < min(limit, self.slots):
            return
        self._clock.phase(Phase.WAIT)
        while self._end.in_flight() >= min(limit, self.slots):
            self._end.wait_change(1.0)
        self._clock.phase(Phase.STEP)
        self.times["blocked_s"] += time.monotonic() - start

    def take_reply(self) -> Incoming | None:
        return self._end.take_reply()

    def wait_reply(self) -> Incoming:
        start = time.monotonic()
        self._clock.phase(Phase.WAIT)
        while (reply := self._end.take_reply()) is None:
            self._end.wait_change(1.0)
        self._clock.phase(Phase.STEP)
        self.times["blocked_s"] += time.monotonic() - start
        return reply

    def push_limit(self, in_flight: str) -> int:
        if in_flight != "auto":
            return int(in_flight)
        return 1 if self._end.send_time_s > 0.5 * self.iteration_mean_s else self.slots

    @contextmanager
    def span(self, column: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.times[column] += time.monotonic() - start

    def lost(self, kind: str) -> int:
        now = time.monotonic()
        number = int(EventKind[kind.upper()])
        self._recorder.add("events", (now, number, self._link.worker, self._clock.iteration, b""))
        self._on_lost(kind)
        return 0

    def mixed(self, reply: Reply, lag_iterations: int, *, discarded: bool) -> None:
        row = (time.monotonic(), self._end.index, reply.number, reply.version, reply.alpha)
        self._recorder.add("mixes", (*row, lag_iterations, discarded))

    def _sent(self, times: SendTimes, notice: Notice) -> None:
        """Log an acknowledged push (communication thread)."""
        iterations, samples, wants, version = self._meta.pop(notice.sequence)
        self._recorder.add(
            "sends",
            (notice.sequence, self._end.index, times.queued_at, times.queue_s, times.put_s,
             times.ack_s, times.nbytes, iterations, samples, wants, notice.staleness, version),
        )  # fmt: skip

    def start_step(self) -> None:
        """Forget the last step's times."""
        for column in self.times:
            self.times[column] = 0.0
        self.sent_iterations = 0
        self.coalesced = False

    @property
    def staleness(self) -> int:
        """Staleness of the push acknowledged last, −1 before the first."""
        notice = self._end.last_notice
        return notice.staleness if notice else -1


class Driver:
    """What happens in ``optimizer.step()`` of one optimizer.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        For the learning rates that are logged and pushed, and for the state to clear after a NaN.
    on_nonfinite : {'skip', 'stop'}
    say : callable
        Shows a line to the user.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: FlatParams,
        buffers: FlatBuffers,
        algorithm: Worker,
        end: WorkerEnd,
        link: WorkerLinkLike,
        clock: StepClock,
        recorder: Recording,
        num_workers: int,
        on_nonfinite: str,
        say: Callable[[str], None],
    ) -> None:
        self.params, self.buffers, self.algorithm, self.end = params, buffers, algorithm, end
        self._optimizer, self._link, self._clock = optimizer, link, clock
        self._recorder, self._on_nonfinite, self._say = recorder, on_nonfinite, say
        groups = len(optimizer.param_groups)
        self._rates_fit = groups <= MAX_GROUPS
        self.port = WorkerPort(
            end, link, clock, recorder, buffers, self._rates, self._lost, num_workers
        )
        self._optimizer_s = 0.0
        self._first = True
        self._lost_count = 0

    def step(self, local_update: Callable[[], None]) -> None:
        """One step: the local update and what the algorithm makes of it."""
        clock, port = self._clock, self.port
        start = time.monotonic()
        clock.phase(Phase.STEP)
        if self._first:
            self.params.check_all()
            self.params.check_sparse()
            self._first = False
        else:
            self.params.check_next()
        port.start_step()
        self._optimizer_s = 0.0
        lr = self._optimizer.param_groups[0]["lr"]

        def timed_update() -> None:
            began = time.monotonic()
            local_update()
            self._optimizer_s += time.monotonic() - began

        self.algorithm.step(self.params, timed_update, port, clock.iteration)
        self.algorithm.before_forward(self.params)
        self._log(start, float(lr))

    def _log(self, start: float, lr: float) -> None:
        clock, port, times = self._clock, self.port, self.port.times
        now = time.monotonic()
        step_s = now - clock.end_s
        compute_s = clock.compute_s + start - clock.ready_s
        port.iteration_mean_s += (step_s - port.iteration_mean_s) * (
            0.1 if port.iteration_mean_s else 1.0
        )
        self._recorder.add(
            "steps",
            (clock.iteration, self.end.index, clock.epoch, clock.end_s, step_s, clock.data_s,
             compute_s, self._optimizer_s, times["push_s"], times["blocked_s"], times["mix_s"],
             clock.forward_s, clock.backward_s, clock.loss, lr, clock.batch, port.coalesced,
             port.sent_iterations, port.staleness, clock.emulated),
        )  # fmt: skip
        clock.iteration += 1
        self._link.steps = clock.iteration
        clock.batch, clock.data_s, clock.compute_s = 0, 0.0, 0.0
        clock.end_s = clock.ready_s = now
        clock.phase(Phase.COMPUTE)

    def finish(self) -> None:
        """Push the rest and wait until it is merged."""
        self.params.check_all()
        self.algorithm.finish(self.params, self.port)
        self.port.wait_push(1)

    def _rates(self) -> tuple[float, ...]:
        if not self._rates_fit:
            return ()
        return tuple(float(group["lr"]) for group in self._optimizer.param_groups)

    def _lost(self, kind: str) -> None:
        """A NaN or an infinity: stop, or go on from the last good parameters."""
        what = {
            "nonfinite_push": "the step made a NaN or an infinity",
            "nonfinite_reply": "a reply held a NaN or an infinity",
        }[kind]
        where = f"iteration {self._clock.iteration}: {what}"
        if self._on_nonfinite == "stop":
            raise NonFiniteError(
                f"{where}: training has diverged; lower --lr, or throw such steps away with "
                "--on-nonfinite skip"
            )
        self._lost_count += 1
        if self._lost_count in (1, 10, 100, 1000):
            self._say(f"{where}: thrown away ({self._lost_count} so far; --on-nonfinite skip)")
        for state in self._optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value) and value.is_floating_point():
                    torch.nan_to_num_(value, nan=0.0, posinf=0.0, neginf=0.0)
