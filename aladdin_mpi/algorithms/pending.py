"""What a worker has not pushed yet: a change of its parameters, or a sum of gradients.

Both coalesce exactly: what a skipped push would have carried is part of the next one.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from aladdin_mpi.core import kernels
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import Port

__all__ = ["Pending", "PendingGradients", "PendingUpdate"]


class Pending(Protocol):
    """What is to be pushed, and how a reply is mixed in without being pushed itself."""

    def collect(self, params: FlatParams, port: Port) -> bool:
        """Take in this iteration's gradients, before the local update; False if not finite."""

    def write(self, params: FlatParams, out: np.ndarray, snapshot: np.ndarray | None) -> bool:
        """Fill ``out``, and ``snapshot`` with the parameters; False withdraws what is not
        finite.
        """

    def mix(
        self, params: FlatParams, alpha: float, target: np.ndarray, s: np.ndarray | None
    ) -> None:
        """``x ← x + α (target − s)``; ``s`` is the snapshot, or else ``x`` itself."""


class PendingUpdate:
    """Δ = x − r, where r are the parameters as they have been pushed so far."""

    def __init__(self, params: FlatParams) -> None:
        self.r = params.new_vector()
        params.read(self.r)

    def collect(self, params: FlatParams, port: Port) -> bool:
        return True

    def write(self, params: FlatParams, out: np.ndarray, snapshot: np.ndarray | None) -> bool:
        return params.difference(self.r, out, snapshot)  # Δ = x − r, r ← x

    def mix(
        self, params: FlatParams, alpha: float, target: np.ndarray, s: np.ndarray | None
    ) -> None:
        params.mix(alpha, target, s, self.r)


class PendingGradients:
    """Σ g since the last push."""

    def __init__(self, params: FlatParams) -> None:
        self.total = params.new_vector()

    def collect(self, params: FlatParams, port: Port) -> bool:
        with port.span("push_s"):
            params.add_gradients(self.total)
            finite = not kernels.count_nonfinite(self.total)
            if not finite:
                self.total.fill(0.0)
        return finite

    def write(self, params: FlatParams, out: np.ndarray, snapshot: np.ndarray | None) -> bool:
        if snapshot is not None:
            params.read(snapshot)
        np.copyto(out, self.total)
        self.total.fill(0.0)
        return True

    def mix(
        self, params: FlatParams, alpha: float, target: np.ndarray, s: np.ndarray | None
    ) -> None:
        params.mix(alpha, target, s, None)
