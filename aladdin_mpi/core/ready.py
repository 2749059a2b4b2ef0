"""Ranges of the gradient vector that are complete while the backward pass still runs.

A backward pass fills gradients from the last layers to the first.  The flat vector is cut into
ranges of a few megabytes, in that order; hooks count the gradients of each, and a range whose
gradients are all there, and all ranges before it, is announced: it can travel while earlier layers
still compute (wait-free backpropagation; Zhang et al., Poseidon, USENIX ATC 2017).

What is announced is final only if nothing changes the gradients before the step.  Clipping, or a
further backward pass that accumulates, does: :attr:`ReadyRanges.changed` tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from aladdin_mpi.core.flat import FlatParams

__all__ = ["RANGE_BYTES", "Range", "ReadyRanges"]

RANGE_BYTES = 4 << 20
"""[bytes] a range has at least, but for the last."""


@dataclass(frozen=True)
class Range:
    """Elements ``start:stop`` of the vector, which hold parameters ``first:last`` in its order."""

    start: int
    stop: int
    first: int
    last: int


class ReadyRanges:
    """Announces the ranges of one step after the other.

    Parameters
    ----------
    params : FlatParams
    announce : callable
        ``announce(range)`` on the thread that runs the backward pass, or the step.

    Attributes
    ----------
    ranges : tuple of Range
        In the order in which they are announced.
    announced : int
        How many of them were, for the step at hand.
    """

    def __init__(
        self,
        params: FlatParams,
        announce: Callable[[Range], None],
        range_bytes: int = RANGE_BYTES,
    ) -> None:
        self._announce, self._passes = announce, params.passes
        self._parameters = params.parameters
        found: list[Range] = []
        last, stop = len(params.entries), params.size
        for index in range(last - 1, -1, -1):
            start = params.entries[index].start
            if 4 * (stop - start) >= range_bytes or index == 0:
                found.append(Range(start, stop, index, last))
                last, stop = index, start
        self.ranges = tuple(found)
        self._range_of = [0] * len(params.entries)
        for number, part in enumerate(self.ranges):
            for index in range(part.first, part.last):
                self._range_of[index] = number
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(index))
            for index, p in enumerate(self._parameters)
        ]
        self.reset()

    def reset(self) -> None:
        """The step is over."""
        self.announced = 0
        self._again = False
        self._seen = [0] * len(self._parameters)
        self._marks: list[tuple[int, int] | None] = [None] * len(self._parameters)
        self._missing = [part.last - part.first for part in self.ranges]

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def arrived(parameter: torch.Tensor) -> None:
            self._seen[index] += 1
            if self._seen[index] != self._passes:
                self._again = self._again or self._seen[index] > self._passes
                return
            self._marks[index] = _mark(parameter)
            self._missing[self._range_of[index]] -= 1
            while self.announced < len(self.ranges) and not self._missing[self.announced]:
                self._next()

        return arrived

    def _next(self) -> None:
        self.announced += 1  # first: what is announced may fail, and must not be announced again
        self._announce(self.ranges[self.announced - 1])

    def complete(self) -> None:
        """Announce what is left: the gradients are as they will be."""
        while self.announced < len(self.ranges):
            part = self.ranges[self.announced]
            for index in range(part.first, part.last):
                self._marks[index] = _mark(self._parameters[index])
            self._next()

    @property
    def changed(self) -> bool:
        """A gradient is not what it was when its range was announced."""
        if self._again:
            return True
        for part in self.ranges[: self.announced]:
            for index in range(part.first, part.last):
                if self._marks[index] != _mark(self._parameters[index]):
                    return True
        return False

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def _mark(parameter: torch.Tensor) -> tuple[int, int] | None:
    """Which gradient a parameter has, and how often it has been changed in place."""
    gradient = parameter.grad
    return None if gradient is None else (gradient.data_ptr(), gradient._version)
