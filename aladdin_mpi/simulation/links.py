"""Links that transfers share, and what a server is made of: a link each way and a core."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from aladdin_mpi.simulation.events import Events
from aladdin_mpi.simulation.setting import Setting

__all__ = ["ServerLanes", "SharedLink", "WorkerLane"]

Call = Callable[[], object]


class SharedLink:
    """One direction of a link, shared equally by the transfers under way (processor sharing).

    Parameters
    ----------
    events : Events
    bytes_per_s : float
        [B/s] of all transfers together, C.
    each_bytes_per_s : float
        [B/s] of one transfer at most, c: the other end's link.

    Attributes
    ----------
    carried_bytes : float
        [B] of the transfers that have ended.

    Notes
    -----
    With k transfers under way each moves at min(C/k, c).  V(t), what a transfer under way since 0
    has moved, has that slope, and one of b bytes that begins at t ends when V reaches V(t) + b: the
    order in which transfers end is known when they begin, and a heap holds it.

    References
    ----------
    L. Kleinrock, Queueing Systems, vol. 2, 1976, sec. 4.4 (processor sharing); the virtual time is
    that of A. Demers, S. Keshav, S. Shenker, Analysis and Simulation of a Fair Queueing Algorithm,
    SIGCOMM 1989.
    """

    def __init__(self, events: Events, bytes_per_s: float, each_bytes_per_s: float) -> None:
        self._events, self._rate, self._each = events, bytes_per_s, each_bytes_per_s
        self._heap: list[tuple[float, int, float, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = count()
        self._moved = self._since = 0.0  # V, and when it was that
        self._turn = 0  # of the event that ends the next transfer
        self._later = False  # others have begun since that was scheduled
        self.carried_bytes = 0.0

    @property
    def under_way(self) -> int:
        """Transfers under way."""
        return len(self._heap)

    def _speed(self) -> float:
        return min(self._rate / len(self._heap), self._each)

    def _advance(self) -> None:
        now = self._events.now
        if self._heap:
            self._moved += (now - self._since) * self._speed()
        else:
            self._moved = 0.0
        self._since = now

    def start(self, nbytes: float, call: Callable[..., object], *args: Any) -> None:
        """Begin a transfer; ``call(*args)`` when its last byte has left."""
        self._advance()
        end = self._moved + nbytes
        first = not self._heap or end < self._heap[0][0]
        heapq.heappush(self._heap, (end, next(self._numbers), nbytes, call, args))
        self._later = True
        if first:
            self._schedule()

    def _schedule(self) -> None:
        self._turn += 1
        self._later = False
        wait_s = max(self._heap[0][0] - self._moved, 0.0) / self._speed()
        self._events.at(self._events.now + wait_s, self._end, self._turn)

    def _end(self, turn: int) -> None:
        """The next transfer ends, unless others that have begun meanwhile have slowed it down."""
        if turn != self._turn:
            return
        self._advance()
        heap = self._heap
        if self._later:
            left_s = (heap[0][0] - self._moved) / self._speed()
            if self._events.now + left_s > self._events.now:
                self._schedule()
                return
        self._moved = max(self._moved, heap[0][0])
        done = []
        while heap and heap[0][0] <= self._moved:
            done.append(heapq.heappop(heap))
        if heap:
            self._schedule()
        for _, _, nbytes, call, args in done:
            self.carried_bytes += nbytes
            call(*args)


class ServerLanes:
    """A server's link in, its core, and its link out; pushes are merged as they come.

    Every server has a part of the parameters, and a push goes to all of them at once.  The parts
    are equally long, so that the servers do the same at the same time: one stands for all.
    """

    def __init__(self, events: Events, setting: Setting) -> None:
        self.events = events
        rate, each = setting.bytes_per_s, setting.worker_bytes_per_s / setting.servers
        self.inward = SharedLink(events, rate, each)
        self.outward = SharedLink(events, rate, each)
        self._push_bytes, self._reply_bytes = setting.push_bytes, setting.reply_bytes
        self._merge_s = setting.merge_s
        self._to_s = setting.latency_s + setting.overhead_s / 2
        self._back_s = setting.reply_latency_s
        self._free_at = 0.0

    def push(self, passes: float, published: Call, found: Call) -> None:
        """Send a part's push: ``published()`` when it has left, ``found()`` when the server has
        found it and made so many passes over its part.
        """
        self.inward.start(self._push_bytes, self._published, passes, published, found)

    def _published(self, passes: float, published: Call, found: Call) -> None:
        self._free_at = max(self.events.now + self._to_s, self._free_at) + passes * self._merge_s
        self.events.at(self._free_at, found)
        published()

    def work(self, passes: float, done: Call) -> None:
        """``done()`` when the core has made so many passes over the server's part."""
        self._free_at = max(self.events.now, self._free_at) + passes * self._merge_s
        self.events.at(self._free_at, done)

    def reply(self, arrived: Callable[..., object], *args: Any) -> None:
        """Send a part's parameters; ``arrived(*args)`` when they are there."""
        if self._back_s:
            self.outward.start(self._reply_bytes, self._left, arrived, args)
        else:
            self.outward.start(self._reply_bytes, arrived, *args)

    def _left(self, arrived: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.events.at(self.events.now + self._back_s, arrived, *args)


class WorkerLane:
    """A worker's way to the servers: its pushes travel one after the other."""

    __slots__ = ("_busy", "_lanes", "_waiting")

    def __init__(self, lanes: ServerLanes) -> None:
        self._lanes = lanes
        self._waiting: deque[tuple[float, Call]] = deque()
        self._busy = False

    def push(self, passes: float, found: Call) -> None:
        """Send a push as :meth:`ServerLanes.push` does, when those before it have left."""
        if self._busy:
            self._waiting.append((passes, found))
        else:
            self._busy = True
            self._lanes.push(passes, self._next, found)

    def _next(self) -> None:
        if self._waiting:
            passes, found = self._waiting.popleft()
            self._lanes.push(passes, self._next, found)
        else:
            self._busy = False
