"""Local SGD: local steps, parameters averaged every ``period`` of them::

    x_i ← x_i − η g_i;   every π iterations:  x_i ← (1/n) Σ x_j

With π = 1 and plain SGD it is AR-SGD.  Momentum buffers stay local, as in PR-SGD.

Yu, Yang & Zhu, Parallel Restarted SGD, AAAI 2019; Wang & Joshi, Cooperative SGD, arXiv:1808.07576.
"""

from __future__ import annotations

from dataclasses import dataclass

from aladdin_mpi.algorithms.averaging import AveragingWorker
from aladdin_mpi.algorithms.base import Algorithm, Topology, check, option


@dataclass(frozen=True)
class Config:
    period: int = option(4, "local steps between two averages (π)")

    def __post_init__(self) -> None:
        check(self, "period", self.period >= 1, "must be at least 1")


ALGORITHM = Algorithm(
    "localsgd", "local steps; all workers' parameters are averaged now and then",
    "Yu et al. 2019; Wang & Joshi 2018", Topology.COLLECTIVE, Config, AveragingWorker,
    traits=frozenset(
        {"equals_sgd_at_one_worker", "lockstep", "waits_for_stragglers", "keeps_the_mean"}
    ),
)  # fmt: skip
