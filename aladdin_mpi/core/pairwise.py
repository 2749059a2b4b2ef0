"""Sums of the workers' vectors that have the same bits whoever adds them up.

Floating-point addition depends on the order, so the order is fixed by the workers' numbers alone:
they are the leaves of a binary tree, 0 and 1 below one node, 2 and 3 below the next, and so on;
every node is the sum of the two below it, or the only one of them that is there.  A relay may
add up what lies below a node, a server the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from aladdin_mpi.core import kernels

__all__ = ["add_pairwise", "subtrees"]

_BLOCK = 1 << 15
"""Elements that are added up at once: some of these stay in the second-level cache."""


def subtrees(mine: Collection[int], num_workers: int) -> list[list[int]]:
    """``mine`` in as few groups as possible, each of them all the workers below one node."""

    def visit(low: int, width: int) -> list[list[int]]:
        below = range(low, min(low + width, num_workers))
        own = [worker for worker in below if worker in mine]
        if not own or len(own) == len(below):
            return [own] if own else []
        half = width // 2
        return visit(low, half) + visit(low + half, half)

    return visit(0, 1 << max(0, num_workers - 1).bit_length())


def _program(numbers: Sequence[int]) -> tuple[list[tuple[int, int, int]], int]:
    """Additions ``(to, a, b)`` that make the sum, and how many places beside the vectors'.

    Places are numbered, those of the vectors first; the last addition is the root.
    """
    steps: list[tuple[int, int, int]] = []
    free: list[int] = []
    places = len(numbers)

    def visit(inside: list[int], low: int, width: int) -> int:
        nonlocal places
        if len(inside) == 1:
            return inside[0]
        half = width // 2
        left = [i for i in inside if numbers[i] < low + half]
        right = [i for i in inside if numbers[i] >= low + half]
        if not left or not right:
            return visit(inside, low if left else low + half, half)
        a, b = visit(left, low, half), visit(right, low + half, half)
        used = [place for place in (a, b) if place >= len(numbers)]
        if not used and not free:
            free.append(places)
            places += 1
        to = used.pop() if used else free.pop()
        free.extend(used)
        steps.append((to, a, b))
        return to

    visit(list(range(len(numbers))), 0, 1 << max(numbers).bit_length())
    return steps, places - len(numbers)


def add_pairwise(
    target: np.ndarray,
    numbers: Sequence[int],
    vectors: Sequence[np.ndarray],
    between: Callable[[], object] = lambda: None,
    piece: int = 1 << 20,
) -> None:
    """``target ← target + Σ``, in one pass over memory.

    Parameters
    ----------
    numbers : sequence of int
        For each vector a worker below its node, all different.
    vectors : sequence of ndarray
        Of the target's shape and dtype.
    between : callable
        Called after every ``piece`` elements.
    """
    steps, extra = _program(numbers)
    scratch = [np.empty(min(_BLOCK, target.size), target.dtype) for _ in range(extra)]
    for start in range(0, target.size, _BLOCK):
        stop = min(start + _BLOCK, target.size)
        places = [vector[start:stop] for vector in vectors]
        places += [one[: stop - start] for one in scratch]
        for to, a, b in steps:
            kernels.add_two(places[to], places[a], places[b])
        kernels.add(target[start:stop], places[steps[-1][0] if steps else 0])
        if stop % piece == 0:
            between()
