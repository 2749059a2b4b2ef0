"""Whose turn it is, among ranges of a vector that share a link.

Where a link is full, a push that is on its way for many steps is old when it arrives.  Ranges that
are pushed all at once are as old as the whole vector would be; one after the other, each with its
difference taken when its turn comes, they are on their way for a step or so, and the link carries
as much.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Turns"]


class Turns:
    """Lets so many ranges be on their way that the link has just become free when a step begins.

    How many that are is found by looking: if nothing is on its way any more, one more may be; if
    something has been for more than a step, one less.  The range that has waited longest goes
    first.  On a link that is never full all ranges may be pushed in every step.
    """

    def __init__(self, count: int) -> None:
        self._allowed = [True] * count
        self._since = [0] * count  # the step in which a range had its turn last
        self._most, self._step = count, 0

    def begin(self, under_way: Sequence[bool]) -> None:
        """A step begins, with these ranges on their way."""
        flying = [k for k, busy in enumerate(under_way) if busy]
        if not flying:
            self._most = min(self._most + 1, len(under_way))
        elif any(self._since[k] < self._step for k in flying):
            self._most = max(self._most - 1, 1)
        self._step += 1
        waiting = [k for k, busy in enumerate(under_way) if not busy]
        waiting.sort(key=self._since.__getitem__)
        self._allowed = [False] * len(under_way)
        for k in waiting[: max(self._most - len(flying), 0)]:
            self._allowed[k] = True
            self._since[k] = self._step

    def has(self, k: int) -> bool:
        """Range ``k`` may be pushed in this step."""
        return self._allowed[k]
