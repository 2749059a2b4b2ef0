"""Sharding: which server holds which elements of the vector, and such a range as a vector.

Memory-wise, the vector is cut into equal ranges wherever their borders fall (Ko et al., ALADDIN,
sec. 3.3), so that no server holds more than another even where one layer has most of the
parameters.  Layer-wise, a layer stays whole; that is there to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.vector import ELEMENTS, FlatVector, Segment

__all__ = ["Range", "Shard", "by_layer", "by_memory", "spread_over"]


class Range(NamedTuple):
    """Elements ``start:stop`` of the vector, on server number ``server``."""

    start: int
    stop: int
    server: int


def by_memory(size: int, servers: int, max_bytes: int = 0) -> list[Range]:
    """Cut ``size`` elements into equal ranges, as many on each server.

    Parameters
    ----------
    size : int
        A multiple of 16 (64 bytes of float32), as the ranges' borders are.
    servers : int
    max_bytes : int
        [bytes] that a range has at most; 0: no limit, one range per server.

    Returns
    -------
    list of Range
        In the vector's order.  Fewer than ``servers`` where the vector has fewer than that many
        times 64 bytes.
    """
    units = size // ELEMENTS
    most = max(1, max_bytes // (4 * ELEMENTS)) if max_bytes else units
    each = -(-units // (servers * most))  # ranges of a server
    count = min(servers * each, units)
    borders = [ELEMENTS * (units * i // count) for i in range(count + 1)]
    holders = min(servers, count)
    return [Range(a, b, i * holders // count) for i, (a, b) in enumerate(pairwise(borders))]


def by_layer(layers: Sequence[int], servers: int) -> list[Range]:
    """Give neighbouring layers, whole, to each server so that the largest share is the smallest.

    ``layers`` are their sizes in elements, in the vector's order.  As many ranges as servers, or as
    layers where those are fewer.
    """
    ends = np.cumsum(layers).tolist()
    low, high = max(layers), ends[-1]
    while low < high:  # the smallest limit with which the layers fit
        middle = (low + high) // 2
        if len(_filled(ends, middle)) - 1 <= servers:
            high = middle
        else:
            low = middle + 1
    borders = _filled(ends, low)
    while len(borders) <= min(servers, len(layers)):  # no server stays without one
        parts = [[end for end in ends if a < end < b] for a, b in pairwise(borders)]
        pairs = zip(pairwise(borders), parts, strict=True)
        widths = [b - a if inside else 0 for (a, b), inside in pairs]
        largest = widths.index(max(widths))
        middle = (borders[largest] + borders[largest + 1]) / 2
        borders.insert(largest + 1, min(parts[largest], key=lambda end: abs(end - middle)))
    return [Range(a, b, i) for i, (a, b) in enumerate(pairwise(borders))]


def _filled(ends: Sequence[int], limit: int) -> list[int]:
    """Borders where every range takes layers until the next would exceed ``limit``."""
    borders, last = [0], 0
    for end in ends:
        if end - borders[-1] > limit:
            borders.append(last)
        last = end
    return [*borders, last]


def spread_over(nodes: Sequence[Sequence[int]], servers: int) -> tuple[int, ...]:
    """Which ranks serve, in order: the first one of each of some nodes, at equal distances, the
    first node among them; several of a node where there are more servers than nodes.

    ``nodes`` are their ranks.
    """
    left = [list(ranks) for ranks in nodes]
    chosen: list[int] = []
    while len(chosen) < servers:
        there = [ranks for ranks in left if ranks]
        wanted = min(servers - len(chosen), len(there))
        chosen += [there[i * len(there) // wanted].pop(0) for i in range(wanted)]
    return tuple(sorted(chosen))


class Shard(FlatVector):
    """Elements ``start:stop`` of a model's vector as a vector of their own: the same memory.

    Attributes
    ----------
    streams : bool
        Gradients are looked at only when the backward pass has ended.
    """

    streams = False

    def __init__(self, whole: FlatParams, start: int, stop: int) -> None:
        segments = []
        for segment in whole.segments:
            a, b = max(segment.start, start), min(segment.stop, stop)
            if a < b:
                flat = segment.flat[a - segment.start : b - segment.start]
                segments.append(Segment(flat, a - start, b - start))
        super().__init__(segments, whole.x[start:stop])
        if self.staging is not None and whole.staging is not None:
            self.staging.losses = whole.staging.losses
        self._ranges = [
            (max(a, start) - start, min(b, stop) - start, group)
            for a, b, group in whole.group_ranges() if a < stop and b > start
        ]  # fmt: skip
        self._parts = []  # parameter, its elements, where they begin here
        for e, p in zip(whole.entries, whole.parameters, strict=True):
            first, last = max(start - e.start, 0), min(stop - e.start, e.size)
            if first < last:
                self._parts.append((p, slice(first, last), e.start + first - start))

    def group_ranges(self) -> list[tuple[int, int, int]]:
        """``(start, stop, group)`` of the stretches with one learning rate."""
        return self._ranges

    def add_gradients(self, total: np.ndarray) -> None:
        """``total ← total + g``; a parameter without a gradient adds nothing."""
        into, gradients = [], []
        out = torch.from_numpy(total)
        for p, elements, at in self._parts:
            if p.grad is not None:
                flat = _in_memory_order(p.grad, p)[elements]
                into.append(out[at : at + flat.numel()])
                gradients.append(flat.to("cpu", torch.float32))
        if into:
            torch._foreach_add_(into, gradients)


def _in_memory_order(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements of a gradient as those of its parameter lie in the vector, shape (numel,)."""
    if gradient.stride() != like.stride():
        gradient = torch.empty_like(like, dtype=gradient.dtype).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))
