"""For whom a relay holds a message back: workers that are about to push, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from aladdin_mpi.messages import Push

__all__ = ["Answered", "Expecting", "GoingOn"]

_MARGIN = 1.25
"""How much later than expected a worker may be that waits for answers."""


class Expecting(Protocol):
    """When workers push again; all times are [s] on one clock."""

    def pushed(self, worker: int, now: float) -> None:
        """A push has come."""

    def sent(self, workers: Sequence[int], now: float) -> None:
        """A message with pushes of these has been begun."""

    def merged(self, pushes: Sequence[Push], now: float, message_s: float) -> None:
        """A message has been merged at the server, ``message_s`` after it was begun."""

    def answered(self, worker: int, now: float) -> None:
        """The answer to a push has come, and was handed on."""

    def soon(self, worker: int, now: float) -> bool:
        """The next push of a worker that has none here is worth waiting for."""


class GoingOn:
    """Workers that go on at once: their next push comes an iteration after the last one was merged,
    and is waited for no longer than a message takes.
    """

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._until = 0.0

    def pushed(self, worker: int, now: float) -> None: ...

    def sent(self, workers: Sequence[int], now: float) -> None: ...

    def answered(self, worker: int, now: float) -> None: ...

    def merged(self, pushes: Sequence[Push], now: float, message_s: float) -> None:
        self._until = now + message_s
        self._due.update({push.worker: now + push.iteration_s for push in pushes})

    def soon(self, worker: int, now: float) -> bool:
        return now < self._due.get(worker, 0.0) <= self._until


class Answered:
    """Workers that wait for the answer to every push: their next one comes as long after it as the
    last one did after the answer before.  It is waited for where that is shorter than a message and
    its answer take, also while the answer is still on its way.
    """

    def __init__(self) -> None:
        self._computing: dict[int, float] = {}  # from an answer to the next push
        self._sent: dict[int, float] = {}  # of those whose answer is on its way
        self._answered: dict[int, float] = {}  # of those that compute
        self._trip_s = 0.0  # of the last message and its answer

    def pushed(self, worker: int, now: float) -> None:
        if worker in self._answered:
            self._computing[worker] = now - self._answered.pop(worker)

    def sent(self, workers: Sequence[int], now: float) -> None:
        self._sent.update(dict.fromkeys(workers, now))

    def merged(self, pushes: Sequence[Push], now: float, message_s: float) -> None: ...

    def answered(self, worker: int, now: float) -> None:
        if worker in self._sent:
            self._trip_s = now - self._sent.pop(worker)
        self._answered[worker] = now

    def soon(self, worker: int, now: float) -> bool:
        computing_s = _MARGIN * self._computing.get(worker, math.inf)
        if computing_s > self._trip_s:
            return False
        back = self._answered.get(worker)
        if back is None:
            back = self._sent.get(worker, -math.inf) + _MARGIN * self._trip_s
        return now < back + computing_s
