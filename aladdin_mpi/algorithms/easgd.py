"""EASGD: workers tied elastically to a center.

Worker i makes local steps, and every π iterations an elastic exchange (Zhang et al., Algorithm 1)::

    d = β (x_i − x̃),   x_i ← x_i − d,   x̃ ← x̃ + d

It waits for x̃, computes d and goes on; d is pushed.  The same d on both sides keeps Σ x_i + x̃ as
it was, however old x̃ is when d arrives.  Momentum is the local optimizer's (EAMSGD where it has
one); the model that is evaluated is the center.

Zhang, Choromanska & LeCun, Deep learning with Elastic Averaging SGD, NIPS 2015.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aladdin_mpi.algorithms.base import Algorithm, Stateful, Topology, check, option
from aladdin_mpi.core import kernels
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import Port
from aladdin_mpi.messages import Action, Merge, Push


@dataclass(frozen=True)
class Config:
    period: int = option(2, "local steps between two exchanges (π)")
    beta: float = option(0.9, "β·n: the elastic weights of all workers together")

    def __post_init__(self) -> None:
        check(self, "period", self.period >= 1, "must be at least 1")
        check(self, "beta", 0 < self.beta < 1, "must be between 0 and 1")


class Worker(Stateful):
    STATE = ("since",)

    def __init__(self, config: Config, params: FlatParams, num_workers: int) -> None:
        self.period, self.beta = config.period, config.beta / num_workers
        self.since = 0

    def step(
        self, params: FlatParams, local_update: Callable[[], None], port: Port, iteration: int
    ) -> None:
        local_update()
        self.since += 1
        if self.since < self.period:
            return
        center = port.fetch()
        port.wait_push(port.slots)

        def elastic(out: np.ndarray) -> bool:
            params.read(out)
            kernels.scale_add(out, self.beta, center, -self.beta)  # d = β (x_i − x̃)
            return not kernels.count_nonfinite(out)

        if port.try_push(elastic, self.since, limit=port.slots) < 0:
            port.lost("nonfinite_push")
            params.assign(center)
        else:
            with port.span("mix_s"):
                params.mix(self.beta, center, None)  # x_i ← x_i − d
        self.since = 0

    def finish(self, params: FlatParams, port: Port) -> None:
        port.wait_push(1)

        def nothing(out: np.ndarray) -> bool:
            out.fill(0.0)
            return True

        port.try_push(nothing, self.since, limit=1, last=True)


class Server(Stateful):
    def __init__(self, config: Config, num_workers: int) -> None:
        pass

    def on_push(self, push: Push) -> list[Action]:
        return [Merge("global", 1.0)]


ALGORITHM = Algorithm(
    "easgd", "local steps; now and then worker and center move towards each other",
    "Zhang, Choromanska & LeCun 2015", Topology.SERVER, Config, Worker, Server,
    traits=frozenset({"keeps_the_sum"}),
)  # fmt: skip
