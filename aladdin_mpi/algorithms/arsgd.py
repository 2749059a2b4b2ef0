"""AR-SGD: synchronous SGD, the mean gradient by all-reduce::

    g = (1/k) Σ g_i   over the workers that still have data;   x_i ← x_i − η g

All workers make the same step of the same local optimizer, whichever that is.  Gradients are
reduced while earlier layers still compute, by one of three backends: ``horovod`` (its
DistributedOptimizer over MPI), ``ddp`` (torch's DistributedDataParallel over gloo) and ``mpi``
(ranges of the flat gradient vector by MPI's all-reduce).

With ``adascale`` the learning rate of one worker is multiplied by the gain r in [1, n], which is
estimated from the workers' gradients (Johnson et al., ICML 2020).  The schedule goes on counting
samples, where the paper counts r steps at each step.

Goyal et al., arXiv:1706.02677; Sergeev & Del Balso, Horovod, arXiv:1802.05799; Li et al., PyTorch
Distributed, VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aladdin_mpi.algorithms.averaging import mean_of_all
from aladdin_mpi.algorithms.base import Algorithm, Stateful, Topology, check, choose, option
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import PeerPort


@dataclass(frozen=True)
class Config:
    backend: str = option(
        "auto", "who reduces; auto: horovod if it is installed, else mpi",
        ("auto", "horovod", "mpi", "ddp"),
    )  # fmt: skip

    bucket_mb: float = option(
        0.0,
        "megabytes of gradients reduced together; 0: the backend's own (mpi 4, ddp 25)",
    )
    adascale: bool = option(False, "multiply the learning rate by AdaScale's gain (backend mpi)")

    def __post_init__(self) -> None:
        choose(self)
        if self.adascale and self.backend == "auto":
            object.__setattr__(self, "backend", "mpi")
        check(self, "bucket_mb", 0 <= self.bucket_mb <= 2000, "expected 0 to 2000")
        check(self, "adascale", not self.adascale or self.backend == "mpi", "needs --backend mpi")


class Worker(Stateful):
    STATE = ("made",)

    def __init__(self, config: Config, params: FlatParams, num_workers: int) -> None:
        self.made = 0

    def step(
        self, params: FlatParams, local_update: Callable[[], None], port: PeerPort, iteration: int
    ) -> None:
        port.mean_gradients()
        self.made += 1
        if params.gradients_finite():
            local_update()
        else:  # the same on all workers
            port.lost("nonfinite_push")

    def finish(self, params: FlatParams, port: PeerPort) -> None:
        while port.mean_gradients(contribute=False):
            pass
        mean_of_all(params, port, float(self.made == port.largest(self.made)))


ALGORITHM = Algorithm(
    "arsgd", "all workers step with the all-reduced mean gradient",
    "Goyal et al. 2017; Sergeev & Del Balso 2018", Topology.COLLECTIVE, Config, Worker,
    traits=frozenset(
        {"equals_sgd_at_one_worker", "synchronous", "lockstep", "waits_for_stragglers"}
    ),
)  # fmt: skip
