"""The port of algorithms without a server, over the links between workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from aladdin_mpi.core.flat import FlatBuffers
from aladdin_mpi.core.port import PeerIncoming
from aladdin_mpi.messages import PeerHeader
from aladdin_mpi.runtime.clock import StepClock
from aladdin_mpi.runtime.links import PeerEnd, Recording, WorkerLinkLike
from aladdin_mpi.runtime.ports import TimedPort

__all__ = ["PeerPort"]


class PeerPort(TimedPort):
    """One optimizer's sums and messages, measured.

    Attributes
    ----------
    reducer : GradientReducer or None
        What averages gradients.
    staleness : int
        Unknown without a server: −1.
    """

    staleness = -1

    def __init__(
        self,
        end: PeerEnd,
        link: WorkerLinkLike,
        clock: StepClock,
        recorder: Recording,
        buffers: FlatBuffers,
        rates: Callable[[], tuple[float, ...]],
        on_lost: Callable[[str], None],
        num_workers: int,
        seed: int = 0,
    ) -> None:
        super().__init__(end.index, link, clock, recorder, on_lost)
        self.num_workers = num_workers
        self.reducer: Any = None
        self.rng = np.random.default_rng([seed, link.worker])
        self._end, self._buffers = end, buffers
        end.on_sent = self._sent

    def sum(self, vector: np.ndarray, *weights: float) -> list[float]:
        sums = np.array(weights)
        with self._blocked():
            under_way = self._end.start_sum(vector)
            self._end.start_sum(sums).wait()
            under_way.wait()
        self.sent_iterations = 1
        return sums.tolist()

    def largest(self, value: float) -> float:
        found = np.array([value], np.float64)
        with self._blocked():
            self._end.largest(found)
        return float(found[0])

    def mean_gradients(self, contribute: bool = True) -> int:
        self.sent_iterations = 1
        return int(self.reducer.mean(contribute, self))

    def waits(self) -> Any:
        """A context whose time is logged as blocked."""
        return self._blocked()

    def try_send(self, to: int, write: Callable[[np.ndarray], None], header: PeerHeader) -> bool:
        self._end.use_messages()
        sent = self._end.try_send(to, write, header)
        self.coalesced = not sent
        self.sent_iterations = int(sent)
        return sent

    def take(self) -> PeerIncoming | None:
        self._end.use_messages()
        return self._end.take()

    def wait(self) -> None:
        with self._blocked():
            self._end.wait_change(1.0)

    def on_message(self, handle: Callable[[PeerIncoming], bool]) -> None:
        self._end.on_message = handle
        self._end.use_messages()

    def post(self, call: Callable[[], None]) -> None:
        self._link.post(call)

    def ended(self, worker: int) -> int | None:
        return self._end.ended.get(worker)

    @property
    def pushes(self) -> int:
        """Messages sent to other workers."""
        return sum(self._end.sent.values())

    def leave(self, iterations: int) -> None:
        self._end.leave(iterations)

    def all_ended(self) -> bool:
        return self._end.all_ended()

    def absorbed(self, header: PeerHeader, weight: float, lag: int, *, discarded: bool) -> None:
        row = (time.monotonic(), self._index, header.sequence, -1, weight, lag, discarded)
        self._recorder.add("mixes", (*row, header.worker))

    def settle(self) -> None:
        """Average the buffers of all workers; of counters, take the largest.  Collective."""
        self._buffers.gather()
        floats, counts = self._buffers.floats, self._buffers.counts
        if floats.size:
            self._end.start_sum(floats).wait()
            floats /= self.num_workers
        if counts.size:
            self._end.largest(counts)
        self._buffers.assign(floats.copy(), counts.copy())

    def close(self) -> None:
        """Everybody has finished."""
        if self.reducer is not None:
            self.reducer.close()

    def _sent(self, header: PeerHeader, to: int, started: float, took: float, nbytes: int) -> None:
        """Log a message that has left (communication thread)."""
        self._recorder.add(
            "sends",
            (header.sequence, self._index, started, 0.0, took, math.nan, nbytes, 1, 0,
             not header.answer, -1, -1, to),
        )  # fmt: skip
