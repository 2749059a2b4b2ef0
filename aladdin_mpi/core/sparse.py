"""The encodings that send the largest elements only, each with its place.

Which are the largest is estimated by a sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aladdin_mpi.core import kernels, narrow

__all__ = ["Dgc", "Sparse", "TopK", "first_of", "sampled", "threshold", "up"]

_ALIGN = 64
_SAMPLE = 1 << 14
"""Elements by which the threshold of the largest ones is estimated."""


def up(nbytes: int) -> int:
    """[bytes] rounded up to the next border of 64."""
    return -(-nbytes // _ALIGN) * _ALIGN


def sampled(size: int, turn: int) -> slice:
    """Which elements are the sample; ``turn`` makes it another one each time."""
    stride = max(1, size // _SAMPLE) | 1  # odd: rows have even lengths
    return slice(turn * 5 % stride, None, stride)


def threshold(sample: np.ndarray, fraction: float) -> float:
    """What ``fraction`` of a sample of absolute values reach; above 0, so that no 0 is sent."""
    rank = max(0, sample.size - max(1, round(fraction * sample.size)))
    return max(float(np.partition(sample, rank)[rank]), 1e-38)


def first_of(size: int, turn: int) -> int:
    """The place that is looked at first."""
    return (turn * 7919 * 64) % size


@dataclass(frozen=True)
class Sparse:
    """A payload of :class:`TopK` and :class:`Dgc`: how many elements, which ones, their values."""

    count: np.ndarray
    index: np.ndarray
    value: np.ndarray

    def nonfinite(self) -> int:
        """How many of the values are NaN or infinite."""
        return kernels.count_nonfinite(self.value, 0, int(self.count[0]))


class Largest:
    """The largest elements, each with its place, in the room for ``room`` of all."""

    @property
    def room(self) -> float:
        raise NotImplementedError

    def items(self, size: int) -> int:
        return max(1, math.ceil(self.room * size))

    def nbytes(self, size: int) -> int:
        return _ALIGN + 2 * up(4 * self.items(size))

    def view(self, raw: np.ndarray, size: int) -> Sparse:
        k, half = self.items(size), up(4 * self.items(size))
        index = raw[_ALIGN:][: 4 * k].view(np.uint32)
        value = raw[_ALIGN + half :][: 4 * k].view(np.float32)
        return Sparse(raw[:8].view(np.int64), index, value)

    def used(self, payload: Sparse) -> tuple[tuple[int, int], ...]:
        count, second = 4 * int(payload.count[0]), _ALIGN + up(payload.index.nbytes)
        return (0, _ALIGN + count), (second, second + count)

    def encode(self, p: np.ndarray, payload: Sparse) -> int:
        raise NotImplementedError("what is not sent would be lost")

    def merge(
        self, target: np.ndarray, payloads: Sequence[Any], weights: Sequence[float], a: int, b: int
    ) -> None:
        for payload, weight in zip(payloads, weights, strict=True):
            stop = min(b, int(payload.count[0]))
            narrow.merge_sparse(target, payload.index, payload.value, float(weight), a, stop)


@dataclass(frozen=True)
class TopK(Largest):
    """The largest elements, each with its place: 8 bytes for ``fraction`` of them.

    Which are the largest is estimated by a sample, so that their number differs a little from push
    to push; where it exceeds the room, another place comes first every time.
    """

    fraction: float

    @property
    def room(self) -> float:
        return self.fraction

    def take(self, p: np.ndarray, r: np.ndarray, payload: Sparse, turn: int) -> int:
        narrow.subtract(p, r)
        least = threshold(np.abs(p[sampled(p.size, turn)]), self.fraction)
        first = first_of(p.size, turn)
        payload.count[0] = narrow.take_sparse(p, r, least, first, payload.index, payload.value)
        return payload.nonfinite()


@dataclass(frozen=True)
class Dgc(Largest):
    """The largest elements of gradients, by the memory of :mod:`aladdin_mpi.core.dgc`.

    During the first ``warmup`` iterations more are sent: a quarter of all, a sixteenth, and so on
    while that is more than ``fraction``, each for as long.  The payload has room for the most, and
    what is used of it travels.
    """

    fraction: float
    warmup: int = 0

    @property
    def stages(self) -> tuple[float, ...]:
        """The fractions of the warm-up."""
        found: list[float] = []
        while self.warmup and 0.25 ** (len(found) + 1) > self.fraction:
            found.append(0.25 ** (len(found) + 1))
        return tuple(found)

    @property
    def room(self) -> float:
        return max((self.fraction, *self.stages))

    def fraction_at(self, iteration: int) -> float:
        """Of the elements, in an iteration of the worker, from 0."""
        stages = self.stages
        if iteration >= self.warmup or not stages:
            return self.fraction
        return stages[iteration * len(stages) // self.warmup]

    def take(self, p: np.ndarray, r: np.ndarray, payload: Sparse, turn: int) -> int:
        raise NotImplementedError("its memory is not a reference")
