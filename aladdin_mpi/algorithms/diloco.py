"""DiLoCo: many local steps, then an outer optimizer on the averaged difference.

Every ``period`` iterations of the local (inner) optimizer (Douillard et al., Algorithm 1)::

    Δ = (1/n) Σ (r − x_i)          r: the parameters after the last outer step
    v ← μ v + Δ;   r ← r − η (Δ + μ v)      Nesterov's momentum, as in torch.optim.SGD
    x_i ← r

The paper's inner optimizer is AdamW; any is allowed here.  Outer η = 1 and μ = 0 is Local SGD.

Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models,
arXiv:2311.08105.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aladdin_mpi.algorithms.averaging import AveragingWorker
from aladdin_mpi.algorithms.base import Algorithm, Topology, check, option
from aladdin_mpi.core import kernels
from aladdin_mpi.core.flat import FlatParams


@dataclass(frozen=True)
class Config:
    period: int = option(50, "local steps between two outer steps (H)")
    outer_lr: float = option(0.7, "learning rate of the outer step")
    outer_momentum: float = option(0.9, "Nesterov momentum of the outer step (μ)")

    def __post_init__(self) -> None:
        check(self, "period", self.period >= 1, "must be at least 1")
        check(self, "outer_lr", self.outer_lr > 0, "must be above 0")
        check(self, "outer_momentum", 0 <= self.outer_momentum < 1, "must be in [0, 1)")


class Worker(AveragingWorker):
    STATE = (*AveragingWorker.STATE, "r", "velocity")

    def __init__(self, config: Config, params: FlatParams, num_workers: int) -> None:
        super().__init__(config, params, num_workers)
        self.cfg = config
        self.r, self.velocity = params.new_vector(), params.new_vector()
        params.read(self.r)

    def collect(self, params: FlatParams) -> None:
        params.read(self.mean)
        np.subtract(self.r, self.mean, out=self.mean)

    def adopt(self, params: FlatParams, count: int) -> None:
        kernels.nesterov(
            self.r, self.mean, self.velocity, self.cfg.outer_lr, self.cfg.outer_momentum, 1 / count
        )
        params.assign(self.r)


ALGORITHM = Algorithm(
    "diloco", "many local steps, then an outer step on the averaged difference",
    "Douillard et al. 2023", Topology.COLLECTIVE, Config, Worker,
    traits=frozenset({"lockstep", "waits_for_stragglers"}),
)  # fmt: skip
