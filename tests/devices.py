"""A stand-in for a GPU on the CPU, whose copies are late and show what was read too early."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from aladdin_mpi.core import staging

PATIENCE = 100
"""Looks after which a copy is made whatever the chance."""


class SlowStream:
    """Copies are made when somebody asks for them and is lucky, in their order, and read then.

    Until then, what they go to holds NaN, or the largest integer.
    """

    def __init__(self, rng: np.random.Generator, chance: float, lock: threading.Lock) -> None:
        self._rng, self._chance, self._lock = rng, chance, lock
        self._begun: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._looks = 0

    def follow(self) -> None:
        """The CPU has done all that it was given."""

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).max)
        self._begun.append((out, source))

    def done(self) -> bool:
        with self._lock:  # the generator is everybody's
            lucky = self._rng.random() < self._chance
        self._looks += 1
        if self._begun and (lucky or self._looks >= PATIENCE):
            for out, source in self._begun:
                out.copy_(source)
            self._begun.clear()
            self._looks = 0
        return not self._begun


def stand_in(patch: pytest.MonkeyPatch, chance: float = 1.0, seed: int = 0) -> None:
    """From now on, copies from and to the CPU's own memory are late, as a GPU's are."""
    rng, lock = np.random.default_rng(seed), threading.Lock()
    patch.setitem(staging.STREAMS, "cpu", lambda device: SlowStream(rng, chance, lock))
