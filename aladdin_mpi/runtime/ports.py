"""The ports that algorithms call, over whatever links there are; they measure what they are asked
to do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from aladdin_mpi.core.dgc import GradientMemory
from aladdin_mpi.core.encoding import Dgc
from aladdin_mpi.core.flat import FlatBuffers
from aladdin_mpi.core.port import Incoming
from aladdin_mpi.core.wire import Frame
from aladdin_mpi.messages import Notice, Phase, Push, Reply, SendTimes
from aladdin_mpi.record.schema import EventKind
from aladdin_mpi.runtime.clock import StepClock
from aladdin_mpi.runtime.links import Recording, WorkerEnd, WorkerLinkLike

__all__ = ["TimedPort", "WorkerPort"]


class TimedPort:
    """What the ports have in common: the times of a step, and what is logged alike."""

    def __init__(
        self,
        index: int,
        link: WorkerLinkLike,
        clock: StepClock,
        recorder: Recording,
        on_lost: Callable[[str], None],
    ) -> None:
        self._index, self._link, self._clock, self._recorder = index, link, clock, recorder
        self._on_lost = on_lost
        self.worker = link.worker
        self.times = {"blocked_s": 0.0, "mix_s": 0.0}
        self.sent_iterations = 0
        self.coalesced = False
        self.iteration_mean_s = 0.0
        self.cut = 0  # the checkpoint that this worker made its part of last

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`; before the first push."""

    def close(self) -> None:
        """Everybody has finished."""

    def start_step(self) -> None:
        """Forget the last step's times."""
        for column in self.times:
            self.times[column] = 0.0
        self.sent_iterations = 0
        self.coalesced = False

    @contextmanager
    def span(self, column: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.times[column] += time.monotonic() - start

    @contextmanager
    def _blocked(self) -> Iterator[None]:
        start = time.monotonic()
        self._clock.phase(Phase.WAIT)
        yield
        self._clock.phase(Phase.STEP)
        self.times["blocked_s"] += time.monotonic() - start

    def lost(self, kind: str) -> int:
        now = time.monotonic()
        number = int(EventKind[kind.upper()])
        self._recorder.add("events", (now, number, self.worker, self._clock.iteration, b""))
        self._on_lost(kind)
        return 0


class WorkerPort(TimedPort):
    """The port of one optimizer, or of a range of its vector, towards its server.

    Parameters
    ----------
    leads : bool
        Its pushes carry the samples and the loss of a step: one port's do.
    momentum : float
        Of the server's steps, for the memory of deep gradient compression.

    Attributes
    ----------
    others : callable
        Called before a reply is waited for: pushes what else is pushed in this step.
    may_push : callable
        Whether it is this range's turn, where several share a link.
    """

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
        leads: bool = True,
        momentum: float = 0.0,
    ) -> None:
        super().__init__(end.index, link, clock, recorder, on_lost)
        self.num_workers, self.slots, self._leads = num_workers, end.slots, leads
        self.beyond = end.beyond
        self.others: Callable[[], None] = lambda: None
        self.may_push: Callable[[], bool] = lambda: True
        self._end, self._buffers, self._rates = end, buffers, rates
        self._active = num_workers  # when the steps that are not pushed yet were begun
        self._version = 0  # of the copy fetched last
        self._meta: dict[int, tuple[int, int, bool, int]] = {}
        self._frame: Frame | None = None  # whose payload is to be made
        encoding = end.next_frame().encoding
        self._memory = (
            GradientMemory(encoding, end.layout.size, momentum)
            if isinstance(encoding, Dgc) else None
        )  # fmt: skip
        end.on_sent = self._sent

    def try_push(
        self, write: Callable[[np.ndarray], bool], iterations: int, *, limit: int, **header: object
    ) -> int:
        sequence = 0
        if self._end.in_flight() < min(limit, self.slots):
            sequence = self._write(write, iterations, header)
        self.coalesced = sequence == 0
        return sequence

    def _write(
        self, write: Callable[[np.ndarray], bool], iterations: int, header: dict[str, object]
    ) -> int:
        self._frame = frame = self._end.next_frame()
        frame.nonfinite = 0  # unless who makes the payload from params finds another number
        if not write(frame.params):
            return -1
        if self._memory is not None:
            if iterations:
                self._link.post(self._memory.encode, frame, self._clock.iteration)
            else:  # the server does not merge it
                self._link.post(self._memory.send_nothing, frame)
        elif self._frame is not None and frame.params is not frame.payload:
            self._link.post(frame.encode)
        self._buffers.write(frame.floats, frame.counts, self._link.post)
        clock, sequence = self._clock, self._end.next_sequence
        header.setdefault("version", self._version)
        samples, loss = (clock.samples, clock.loss) if self._leads else (0, math.nan)
        push = Push(
            self._link.worker, sequence, iterations, samples, rates=self._rates(),
            iteration_s=self.iteration_mean_s, loss=loss, active=self._active,
            made=clock.iteration + 1, cut=self.cut, **header,  # type: ignore[arg-type]
        )  # fmt: skip
        self._active = self._link.notice.active
        self._meta[sequence] = (iterations, samples, push.wants_reply, push.version)
        clock.samples -= samples
        self.sent_iterations = iterations
        self._end.submit(push)
        return sequence

    def early_frame(self) -> np.ndarray | None:
        frame = self._end.next_frame()
        return None if self._end.in_flight() or frame.params is not frame.payload else frame.params

    def send_range(self, start: int, stop: int) -> None:
        self._end.send_range(start, stop)

    def abandon(self) -> None:
        self._end.abandon()

    def post(self, call: Callable[..., bool | None], *args: object) -> None:
        self._link.post(call, *args)

    def wait_posted(self) -> None:
        self._link.wait_posted()

    def subtract(self, staging: np.ndarray, r: np.ndarray) -> None:
        frame, self._frame = self._frame, None
        assert frame is not None and frame.params is staging
        self._link.post(frame.take_difference, r)

    def wait_push(self, limit: int) -> None:
        if self._end.in_flight() < min(limit, self.slots):
            return
        with self._blocked():
            while self._end.in_flight() >= min(limit, self.slots):
                self._end.wait_change(1.0)

    def settle(self) -> None:
        """Wait until everything that was pushed has been merged."""
        self.wait_push(1)

    def take_reply(self) -> Incoming | None:
        return self._end.take_reply()

    def wait_reply(self) -> Incoming:
        self.others()
        with self._blocked():
            while (reply := self._end.take_reply()) is None:
                self._end.wait_change(1.0)
        return reply

    def fetch(self) -> np.ndarray:
        with self._blocked():
            frame = self._end.fetch()
        self._version = frame.read_reply().version
        return frame.params

    def push_limit(self, in_flight: str) -> int:
        if in_flight != "auto":
            return int(in_flight)
        if not self.may_push():
            return 0
        return 1 if self._end.send_time_s > 0.5 * self.iteration_mean_s else self.slots

    def mixed(self, reply: Reply, lag_iterations: int, *, discarded: bool) -> None:
        row = (time.monotonic(), self._index, reply.number, reply.version, reply.alpha)
        self._recorder.add("mixes", (*row, lag_iterations, discarded, -1))

    def _sent(self, times: SendTimes, notice: Notice) -> None:
        """Log an acknowledged push (communication thread)."""
        iterations, samples, wants, version = self._meta.pop(notice.sequence)
        self._recorder.add(
            "sends",
            (notice.sequence, self._index, times.queued_at, times.queue_s, times.put_s,
             times.ack_s, times.nbytes, iterations, samples, wants, notice.staleness, version, -1),
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """What is kept of gradients that were pushed in part, as of the last push; waits for the
        communication thread to have made that.
        """
        if self._memory is None:
            return {}
        self.wait_posted()
        return self._memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._memory is not None and state:
            self._memory.load_state_dict(state)

    @property
    def in_flight(self) -> int:
        """Pushes on their way."""
        return self._end.in_flight()

    @property
    def pushes(self) -> int:
        """Pushes that the server has merged."""
        return self._end.acknowledged

    @property
    def staleness(self) -> int:
        """Staleness of the push acknowledged last, −1 before the first."""
        notice = self._end.last_notice
        return notice.staleness if notice else -1
