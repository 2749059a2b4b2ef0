"""The global model of one channel at a server: it obeys the algorithm's instructions.

Updates that are merged one after the other go through memory in one pass.  Every pass is cut into
pieces of about a millisecond, with ``between()`` called in between, so that MPI makes progress
meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from aladdin_mpi.algorithms.base import Server
from aladdin_mpi.core import kernels
from aladdin_mpi.core.flat import aligned_zeros
from aladdin_mpi.core.wire import Frame
from aladdin_mpi.messages import Apply, ChannelSpec, Merge, Push, Send

__all__ = ["PIECE", "GlobalModel", "Handled", "Pass"]

PIECE = 1 << 20
"""Elements of a pass between two polls: 4 MiB of each vector, about a millisecond."""


class Pass(NamedTuple):
    """One pass over the global vector: how many pushes it merged, [s], payload [bytes]."""

    merged: int
    merge_s: float
    nbytes: int
    version: int


class Handled(NamedTuple):
    """One push after its merge."""

    push: Push
    staleness: int
    version: int
    nonfinite: bool


class GlobalModel:
    """x̃, its buffers and what the algorithm accumulates.

    Parameters
    ----------
    spec : ChannelSpec
    initial : Frame
        Where everybody starts from; becomes the global model's own memory.
    rules : Server
        The algorithm's decisions.
    between : callable
        Drives MPI; called between the pieces of a pass.

    Attributes
    ----------
    version : int
        Pushes merged so far.
    last_merged : list of int
        Each worker's last push that x̃ contains.
    """

    def __init__(
        self,
        spec: ChannelSpec,
        initial: Frame,
        rules: Server,
        num_workers: int,
        between: Callable[[], object],
    ) -> None:
        self.frame, self.rules, self.version = initial, rules, 0
        self.last_merged = [0] * num_workers
        self._ranges = spec.ranges
        self._num_rates = 1 + max(group for _, _, group in spec.ranges)
        self._between = between
        self._sum: np.ndarray | None = None
        self._velocity: np.ndarray | None = None

    def handle(self, frames: Sequence[Frame]) -> tuple[list[Handled], dict[int, float], list[Pass]]:
        """Merge pushes in the order given.

        Returns
        -------
        handled : list of Handled
        sends : dict
            Worker to α, for the replies to make now that all of them are merged.
        passes : list of Pass
        """
        handled: list[Handled] = []
        sends: dict[int, float] = {}
        passes: list[Pass] = []
        waiting: list[tuple[np.ndarray, float]] = []  # payloads and weights of one target
        target = "global"

        def flush() -> None:
            if waiting:
                passes.append(self._merge(target, waiting))
                waiting.clear()

        for frame in frames:
            push = frame.read_push(self._num_rates)
            bad = self._nonfinite(frame.params)
            staleness = self.version - push.version
            self.version += 1
            for action in self.rules.on_push(push):
                if isinstance(action, Send):
                    sends[action.worker] = action.alpha
                elif isinstance(action, Apply):
                    flush()
                    self._apply(action)
                elif not bad:
                    assert isinstance(action, Merge)
                    if action.target != target:
                        flush()
                        target = action.target
                    waiting.append((frame.params, action.weight))
            if not bad:
                kernels.merge_buffers(self.frame.floats, frame.floats, 1 / push.active)
                kernels.max_counters(self.frame.counts, frame.counts)
            self.last_merged[push.worker] = push.sequence
            if push.last:
                for action in self.rules.on_leave(push.worker):
                    assert isinstance(action, Send), "a leaver brings no payload"
                    sends[action.worker] = action.alpha
            handled.append(Handled(push, staleness, self.version, bad))
        flush()
        return handled, sends, passes

    def copy_to(self, frame: Frame) -> float:
        """Copy parameters and buffers into a frame; returns [s]."""
        start = time.monotonic()
        for a, b in self._pieces():
            kernels.copy(frame.params, self.frame.params, a, b)
        np.copyto(frame.floats, self.frame.floats)
        np.copyto(frame.counts, self.frame.counts)
        return time.monotonic() - start

    def _pieces(self) -> list[tuple[int, int]]:
        size = self.frame.params.size
        found = []
        for a in range(0, size, PIECE):
            found.append((a, min(a + PIECE, size)))
        return found

    def _nonfinite(self, payload: np.ndarray) -> bool:
        for a, b in self._pieces():
            if kernels.count_nonfinite(payload, a, b):
                return True
            self._between()
        return False

    def _accumulator(self) -> tuple[np.ndarray, np.ndarray]:
        if self._sum is None or self._velocity is None:
            size = self.frame.params.size
            self._sum, self._velocity = aligned_zeros(size), aligned_zeros(size)
        return self._sum, self._velocity

    def _merge(self, target: str, waiting: list[tuple[np.ndarray, float]]) -> Pass:
        start = time.monotonic()
        into = self.frame.params if target == "global" else self._accumulator()[0]
        payloads = [payload for payload, _ in waiting]
        weights = [weight for _, weight in waiting]
        for a, b in self._pieces():
            kernels.merge(into, payloads, weights, a, b)
            self._between()
        took = time.monotonic() - start
        return Pass(len(waiting), took, len(waiting) * into.nbytes, self.version)

    def _apply(self, action: Apply) -> None:
        total, velocity = self._accumulator()
        for start, stop, group in self._ranges:
            for a in range(start, stop, PIECE):
                kernels.lazy_update(
                    self.frame.params, total, velocity, action.rates[group], action.momentum,
                    action.weight_decay, action.scale, a, min(a + PIECE, stop),
                )  # fmt: skip
                self._between()
