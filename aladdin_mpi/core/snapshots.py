"""Copies of the local parameters at the moment of a push, kept until a reply names one of them."""

from __future__ import annotations

import numpy as np

from aladdin_mpi.core.flat import FlatParams

__all__ = ["Snapshots"]


class Snapshots:
    """At most ``count`` vectors, made when they are needed; when all are in use, the oldest but
    one gives way: the oldest is the one most likely to be named, then the newest.
    """

    def __init__(self, params: FlatParams, count: int) -> None:
        self._params, self._more = params, count
        self._free: list[np.ndarray] = []
        self._kept: dict[int, tuple[np.ndarray, int]] = {}

    def lend(self) -> np.ndarray:
        """The vector that the next :meth:`keep` binds, to be filled by the caller."""
        if not self._free and self._more:
            self._more -= 1
            self._free.append(self._params.new_vector())
        if not self._free:
            self._free.append(self._kept.pop(sorted(self._kept)[:2][-1])[0])
        return self._free[-1]

    def keep(self, sequence: int, iteration: int) -> None:
        """The vector lent last holds the parameters of push ``sequence``, made at ``iteration``."""
        self._kept[sequence] = (self._free.pop(), iteration)

    def take(self, sequence: int) -> tuple[np.ndarray, int] | None:
        """The snapshot of push ``sequence``, None if it was not kept; older ones are given up.

        The vector stays valid until the next :meth:`lend`.
        """
        found = self._kept.get(sequence)
        for old in [number for number in self._kept if number <= sequence]:
            self._free.append(self._kept.pop(old)[0])
        return found

    def clear(self) -> None:
        """Give all snapshots up."""
        self._free += [vector for vector, _ in self._kept.values()]
        self._kept.clear()
