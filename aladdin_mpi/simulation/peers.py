"""What algorithms without servers call, in virtual time: sums over all workers, messages of two.

From when the last worker has called, a sum takes what a ring takes
(:func:`~aladdin_mpi.simulation.rounds.allreduce_s`).  A worker's link carries one message at a
time in each direction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from aladdin_mpi.core import kernels
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import PeerIncoming
from aladdin_mpi.messages import PeerHeader
from aladdin_mpi.simulation.events import Events
from aladdin_mpi.simulation.outcome import Tally
from aladdin_mpi.simulation.rounds import after_computing_s, allreduce_s
from aladdin_mpi.simulation.setting import FRAMING_BYTES, Setting
from aladdin_mpi.simulation.turns import NeverWaits, Process

__all__ = ["PeerWorld", "VirtualPeerPort"]

BUFFERS = 2
"""Messages of a worker that may be on their way."""


class _Message:
    """A message that has arrived."""

    def __init__(self, header: PeerHeader, vector: np.ndarray) -> None:
        self.header, self.vector = header, vector
        self.finite = not kernels.count_nonfinite(vector)

    def release(self) -> None:
        """The vector is the reader's own."""


class PeerWorld:
    """The workers' ports and the links between them."""

    def __init__(self, setting: Setting, tally: Tally) -> None:
        self.setting, self.events, self.tally = setting, Events(), tally
        self.ports: list[VirtualPeerPort] = []
        self._given: dict[int, Any] = {}
        self._sent_bytes = 0.0

    @property
    def carried_bytes(self) -> tuple[float, float]:
        """[B] that a worker's link has carried, in and out, on average."""
        mean = self._sent_bytes / self.setting.num_workers
        return mean, mean

    def together(
        self,
        worker: int,
        mine: Any,
        combine: Callable[[list[Any]], Any],
        took_s: float,
        nbytes: float,
    ) -> Any:
        """Call ``combine`` with what all workers give, by index, once the last one has called; its
        result comes ``took_s`` later to all.  ``nbytes`` are what a worker sends.
        """
        done: list[Any] = []
        self._given[worker] = (mine, done)
        if len(self._given) == self.setting.num_workers:
            given = [self._given[index] for index in range(self.setting.num_workers)]
            self._given = {}
            self._sent_bytes += nbytes * len(given)
            result = combine([value for value, _ in given])

            def end() -> None:
                for (_, theirs), port in zip(given, self.ports, strict=True):
                    theirs.append(result)
                    port.process.wake()

            self.events.at(self.events.now + took_s, end)
        self.ports[worker].process.wait_until(lambda: bool(done))
        return done[0]

    def send(self, port: VirtualPeerPort, to: int, message: _Message) -> None:
        """Send a message when both links are free."""
        other, setting = self.ports[to], self.setting
        nbytes = setting.payload_bytes + FRAMING_BYTES
        self._sent_bytes += nbytes
        begin_s = max(self.events.now, port.out_free_s, other.in_free_s)
        left_s = begin_s + nbytes / setting.worker_bytes_per_s
        port.out_free_s = other.in_free_s = left_s
        self.events.at(left_s, port.has_left, to)
        arrival_s = left_s + setting.latency_s + setting.overhead_s
        self.events.at(arrival_s, other.receive, message)


class VirtualPeerPort:
    """A worker's :class:`~aladdin_mpi.core.port.PeerPort`.

    Attributes
    ----------
    process : Process
    computed_s : float
        [s] that the iteration at hand was computed.
    """

    process: Process | NeverWaits

    def __init__(self, world: PeerWorld, worker: int, params: FlatParams, seed: int) -> None:
        self.worker, self.num_workers = worker, world.setting.num_workers
        self.rng = np.random.default_rng([seed, worker])
        self.computed_s = self.out_free_s = self.in_free_s = 0.0
        self.lost_count = 0
        self._world, self._params = world, params
        self._gradient = params.new_vector()
        self._busy: set[int] = set()
        self._sent = [0] * self.num_workers
        self._received = [0] * self.num_workers
        self._ready: deque[_Message] = deque()
        self._held: deque[_Message] = deque()
        self._handle: Callable[[PeerIncoming], bool] | None = None
        self._ended: dict[int, tuple[int, int]] = {}  # iterations made, messages sent to this one
        self._changed = False
        world.ports.append(self)

    # -- what the training does -------------------------------------------------------------------

    def computed(self, took_s: float, samples: int, iteration: int) -> None:
        """The gradients of an iteration are there."""
        self.computed_s = took_s
        self.retry()

    def stepped(self, took_s: float) -> None:
        """A step has ended."""

    # -- what the others do -----------------------------------------------------------------------

    def has_left(self, to: int) -> None:
        """A message is on its way no longer."""
        self._busy.discard(to)
        self._change()

    def receive(self, message: _Message) -> None:
        """A message has come."""
        (self._ready if self._handle is None else self._held).append(message)
        self.retry()
        self._change()

    def hear_of_end(self, worker: int, iterations: int, sent: int) -> None:
        """Another worker has ended."""
        self._ended[worker] = (iterations, sent)
        self._change()

    def _change(self) -> None:
        self._changed = True
        self.process.wake()

    def retry(self) -> None:
        """Give what was not handled yet to the handler again."""
        while self._held and self._handle is not None and self._handle(self._held[0]):
            message = self._held.popleft()
            self._received[message.header.worker] += 1
            self._changed = True

    # -- what the algorithm calls -----------------------------------------------------------------

    def sum(self, vector: np.ndarray, *weights: float) -> list[float]:
        def combine(given: list[tuple[np.ndarray, tuple[float, ...]]]) -> tuple[Any, list[float]]:
            total = given[0][0].copy()
            for other, _ in given[1:]:
                total += other
            return total, [sum(column) for column in zip(*(w for _, w in given), strict=True)]

        setting = self._world.setting
        took_s = allreduce_s(setting, setting.payload_bytes)
        total, weighed = self._together((vector, weights), combine, took_s, self._ring_bytes)
        np.copyto(vector, total)
        return list(weighed)

    def largest(self, value: float) -> float:
        took_s = allreduce_s(self._world.setting, 8.0)
        return float(self._together(value, max, took_s, 0.0))

    def mean_gradients(self, contribute: bool = True) -> int:
        mine = None
        if contribute:
            mine = self._gradient
            mine.fill(0.0)
            self._params.add_gradients(mine)

        def combine(given: list[tuple[np.ndarray | None, float]]) -> tuple[Any, int]:
            gradients = [gradient for gradient, _ in given if gradient is not None]
            if not gradients:
                return None, 0
            total = gradients[0].copy()
            for other in gradients[1:]:
                total += other
            total /= len(gradients)
            return total, len(gradients)

        setting = self._world.setting
        took_s = after_computing_s(setting, self.computed_s)
        mean, count = self._together((mine, self.computed_s), combine, took_s, self._ring_bytes)
        if contribute:
            np.copyto(self._gradient, mean)
            self._params.set_gradients(self._gradient)
        return int(count)

    @property
    def _ring_bytes(self) -> float:
        n = self.num_workers
        return 2 * (n - 1) / n * self._world.setting.payload_bytes

    def _together(
        self, mine: Any, combine: Callable[[list[Any]], Any], took_s: float, nbytes: float
    ) -> Any:
        return self._world.together(self.worker, mine, combine, took_s, nbytes)

    def try_send(self, to: int, write: Callable[[np.ndarray], None], header: PeerHeader) -> bool:
        if to in self._busy or len(self._busy) >= BUFFERS:
            return False
        vector = self._params.new_vector()
        write(vector)
        self._sent[to] += 1
        self._busy.add(to)
        message = _Message(header._replace(sequence=self._sent[to]), vector)
        self._world.send(self, to, message)
        return True

    def take(self) -> PeerIncoming | None:
        if not self._ready:
            return None
        message = self._ready.popleft()
        self._received[message.header.worker] += 1
        return message

    def wait(self) -> None:
        self._changed = False
        self.process.wait_until(lambda: self._changed)

    def on_message(self, handle: Callable[[PeerIncoming], bool]) -> None:
        self._handle = handle

    def post(self, call: Callable[[], None]) -> None:
        call()
        self.retry()

    def ended(self, worker: int) -> int | None:
        return self._ended[worker][0] if worker in self._ended else None

    def leave(self, iterations: int) -> None:
        events, latency_s = self._world.events, self._world.setting.latency_s
        for port in self._world.ports:
            if port is not self:
                sent = self._sent[port.worker]
                events.at(events.now + latency_s, port.hear_of_end, self.worker, iterations, sent)

    def all_ended(self) -> bool:
        self.retry()
        return len(self._ended) == self.num_workers - 1 and all(
            self._received[worker] >= sent for worker, (_, sent) in self._ended.items()
        )

    def settle(self) -> None:
        """The algorithm has ended together with the others already."""

    def span(self, column: str) -> AbstractContextManager[None]:
        return nullcontext()

    def lost(self, kind: str) -> int:
        self.lost_count += 1
        return 0

    def absorbed(self, header: PeerHeader, weight: float, lag: int, *, discarded: bool) -> None:
        self._world.tally.mix(lag)
