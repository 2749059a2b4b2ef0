"""What the algorithms share in which all workers average their parameters now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from aladdin_mpi.algorithms.base import Stateful
from aladdin_mpi.core import kernels
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import PeerPort

__all__ = ["AveragingWorker", "mean_of_all"]


def mean_of_all(params: FlatParams, port: PeerPort, weight: float = 1.0) -> None:
    """``x ← Σ w x / Σ w`` over all workers.  Collective."""
    vector = params.new_vector()
    params.read(vector)
    vector *= weight
    (total,) = port.sum(vector, weight)
    vector /= total
    params.assign(vector)


class AveragingWorker(Stateful):
    """Local steps; every ``period`` of them a round over all workers.

    A worker that has ended takes part in the others' rounds without contributing, and takes over
    what comes of them.
    """

    STATE: ClassVar[tuple[str, ...]] = ("since",)

    def __init__(self, config: Any, params: FlatParams, num_workers: int) -> None:
        self.period = config.period
        self.mean = params.new_vector()
        self.since = 0

    def collect(self, params: FlatParams) -> None:
        """Fill ``mean`` with what is averaged."""
        params.read(self.mean)

    def adopt(self, params: FlatParams, count: int) -> None:
        """``mean`` holds the sum over ``count`` workers."""
        self.mean /= count
        params.assign(self.mean)

    def step(
        self, params: FlatParams, local_update: Callable[[], None], port: PeerPort, iteration: int
    ) -> None:
        local_update()
        self.since += 1
        if self.since == self.period:
            self.since = 0
            self._round(params, port, True)

    def finish(self, params: FlatParams, port: PeerPort) -> None:
        while self._round(params, port, False):
            pass
        mean_of_all(params, port)

    def _round(self, params: FlatParams, port: PeerPort, trains: bool) -> bool:
        """One round; False where nobody trains any more."""
        good = False
        if trains:
            self.collect(params)
            good = not kernels.count_nonfinite(self.mean)
        if not good:
            self.mean.fill(0.0)
        if trains and not good:
            port.lost("nonfinite_push")
        training, count = port.sum(self.mean, float(trains), float(good))
        if count:
            with port.span("mix_s"):
                self.adopt(params, int(count))
        return training > 0
