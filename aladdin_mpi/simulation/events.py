"""Virtual time: calls that are made one after the other, each at its moment."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count
from typing import Any

__all__ = ["Events"]


class Events:
    """A clock that jumps from one event to the next; O(log n) each.

    Attributes
    ----------
    now : float
        [s] virtual time.
    stopped : bool
        :meth:`stop` was called.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, time_s: float, call: Callable[..., object], *args: Any) -> None:
        """Make a call at a moment not before now; calls of one moment keep their order."""
        heapq.heappush(self._heap, (time_s, next(self._numbers), call, args))

    def run(self, until_s: float = math.inf) -> None:
        """Go on until nothing is left to do, ``until_s`` is reached, or :meth:`stop` is called."""
        heap, pop = self._heap, heapq.heappop
        while heap and not self.stopped and heap[0][0] <= until_s:
            self.now, _, call, args = pop(heap)
            call(*args)

    def stop(self) -> None:
        """Make no further call."""
        self.stopped = True
