"""The links of ``peers`` within one process, for tests: every worker is a thread.

There is no communication thread: what it would do is done by whoever calls, under one lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from threading import Barrier
from typing import Any

import numpy as np

from aladdin_mpi.core import kernels
from aladdin_mpi.core.wire import Frame, FrameLayout
from aladdin_mpi.messages import ChannelSpec, Notice, PeerHeader, Phase, RequestKind

__all__ = ["InProcessPeers"]


class InProcessPeers:
    """A world of ``num_workers`` workers without a server.

    ``arrives(to) -> bool`` decides whether the message at the head of a worker's queue has arrived.
    """

    def __init__(self, num_workers: int, arrives: Callable[[int], bool] = lambda to: True) -> None:
        self.num_workers, self.arrives = num_workers, arrives
        self.lock = threading.RLock()
        self.barrier = Barrier(num_workers)
        self.workers = [_Link(self, index) for index in range(num_workers)]
        self.first: dict[int, Frame] = {}


class _Message:
    def __init__(self, header: PeerHeader, vector: np.ndarray) -> None:
        self.header, self.vector = header, vector
        self.finite = not kernels.count_nonfinite(vector)

    def release(self) -> None:
        """The vector was a copy of its own."""


class _Sum:
    """A sum that is made when somebody waits for it, after those started before it."""

    def __init__(self, channel: _Channel, array: np.ndarray) -> None:
        self.channel, self.array = channel, array

    def wait(self) -> None:
        sums = self.channel.sums
        while self in sums:
            self.channel.together(
                sums[0].array, lambda arrays: np.sum(arrays, axis=0, dtype=arrays[0].dtype)
            )
            sums.popleft()


class _Channel:
    def __init__(self, link: _Link, index: int, size: int) -> None:
        self.index, self.layout = index, FrameLayout(size)
        self.ended: dict[int, int] = {}
        self.sent = dict.fromkeys(range(link.world.num_workers), 0)
        self._on_message: Callable[[Any], bool] | None = None
        self.on_sent: Callable[..., None] | None = None
        self.queue: deque[_Message] = deque()
        self.array: np.ndarray | None = None
        self.sums: deque[_Sum] = deque()
        self._link = link

    @property
    def on_message(self) -> Callable[[Any], bool] | None:
        return self._on_message

    @on_message.setter
    def on_message(self, handle: Callable[[Any], bool] | None) -> None:
        self._on_message = handle
        self.deliver()

    def _peer(self, worker: int) -> _Channel:
        return self._link.world.workers[worker].channels[self.index]

    def use_messages(self) -> None:
        """Copies need no buffers."""

    def try_send(self, to: int, write: Callable[[np.ndarray], None], header: PeerHeader) -> bool:
        world = self._link.world
        with world.lock:
            peer = self._peer(to)
            if len(peer.queue) >= 2 * world.num_workers:
                return False
            vector = np.zeros(self.layout.size, np.float32)
            write(vector)
            self.sent[to] += 1
            peer.queue.append(_Message(header._replace(sequence=self.sent[to]), vector))
        return True

    def deliver(self) -> None:
        """Do the communication thread's part: hand messages to ``on_message``."""
        with self._link.world.lock:
            while self.on_message is not None and self.queue:
                if not self.on_message(self.queue[0]):
                    return
                self.queue.popleft()

    def take(self) -> _Message | None:
        world = self._link.world
        with world.lock:
            if self.queue and world.arrives(self._link.worker):
                return self.queue.popleft()
        return None

    def wait_change(self, timeout_s: float) -> None:
        self.deliver()
        time.sleep(1e-4)

    def together(self, array: np.ndarray, combine: Callable[..., Any]) -> None:
        """``array ← combine(everybody's)``; waits for all."""
        world = self._link.world
        self.array = array
        world.barrier.wait()
        result = combine([self._peer(w).array for w in range(world.num_workers)])
        world.barrier.wait()
        array[...] = result

    def start_sum(self, array: np.ndarray) -> _Sum:
        self.sums.append(_Sum(self, array))
        return self.sums[-1]

    def largest(self, array: np.ndarray) -> None:
        self.together(array, lambda arrays: np.max(arrays, axis=0))

    def leave(self, iterations: int) -> None:
        with self._link.world.lock:
            for worker in range(self._link.world.num_workers):
                if worker != self._link.worker:
                    self._peer(worker).ended[self._link.worker] = iterations

    def all_ended(self) -> bool:
        self.deliver()
        with self._link.world.lock:
            return len(self.ended) == self._link.world.num_workers - 1 and not self.queue


class _Link:
    def __init__(self, world: InProcessPeers, worker: int) -> None:
        self.world, self.worker = world, worker
        self.notice = Notice(0, 0, 0, 0, 0, 0, world.num_workers, 0)
        self.phase_since = time.monotonic()
        self.phase, self.steps, self.own_samples = Phase.START, 0, 0
        self.channels: list[_Channel] = []

    def post(self, call: Callable[..., Any], *args: Any) -> None:
        with self.world.lock:
            call(*args)
            for link in 2 * self.world.workers:  # an answer may go to one that had its turn
                for channel in link.channels:
                    channel.deliver()

    def exchange(self, mine: bytes) -> list[bytes]:
        raise NotImplementedError("threads in one process have nothing to agree on")

    def tell(self, kind: RequestKind, values: tuple[float, ...] = ()) -> None:
        """Nobody listens."""

    def open_channel(
        self, spec: ChannelSpec, initial: Callable[[Frame], None]
    ) -> tuple[_Channel, Frame]:
        channel = _Channel(self, len(self.channels), spec.size)
        self.channels.append(channel)
        frame = FrameLayout(spec.size, spec.floats, spec.counts).new_frame()
        initial(frame)
        if self.worker == 0:
            self.world.first[channel.index] = frame
        self.world.barrier.wait()
        return channel, self.world.first[channel.index]

    def close(self, at_end: Callable[[], None]) -> list[Frame]:
        self.world.barrier.wait()
        return []
