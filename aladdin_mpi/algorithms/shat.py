"""SHAT: ASP whose workers keep a part of their own parameters, by scale and heterogeneity.

Worker i makes its local step, pushes g_i and waits for the answer; the server applies g_i as in
ASP, and answers with a weight::

    x̃ ← x̃ − (η/n) g_i
    x_i ← (1 − α_i) x_i + α_i x̃,   α_i = 1 − s_i / log n,   s_i = n / c_i

c_i is the number of merges by others since the last one of i: a slow worker finds many, and takes
more of x̃.  α is clipped to [0, 1], and is 1 where n = 1; the logarithm is the natural one.

Ko & Kim, SHAT: A Novel Asynchronous Training Algorithm …, Appl. Sci. 12(1):292, 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from aladdin_mpi.algorithms.asp import Server as AspServer
from aladdin_mpi.algorithms.base import Algorithm, Topology
from aladdin_mpi.algorithms.gradients import GradientWorker
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import Incoming, Port
from aladdin_mpi.messages import Action, Push, Send


@dataclass(frozen=True)
class Config:
    """SHAT has no options."""


class Worker(GradientWorker):
    def step(
        self, params: FlatParams, local_update: Callable[[], None], port: Port, iteration: int
    ) -> None:
        self.local_update = local_update
        super().step(params, local_update, port, iteration)

    def take(self, params: FlatParams, reply: Incoming, port: Port) -> None:
        if reply.header.alpha < 1:
            self.local_update()
        with port.span("mix_s"):
            params.mix(reply.header.alpha, reply.vector, None)


class Server(AspServer):
    STATE = ("merges", "last")

    def __init__(self, config: Config, num_workers: int) -> None:
        super().__init__(config, num_workers)
        self.merges = 0
        self.last = [0] * num_workers  # merges after each worker's last one

    def on_push(self, push: Push) -> list[Action]:
        by_others = self.merges - self.last[push.worker]
        self.merges += 1
        self.last[push.worker] = self.merges
        alpha = mixing_weight(self.num_workers, by_others)
        return [
            Send(action.worker, alpha) if isinstance(action, Send) else action
            for action in super().on_push(push)
        ]


def mixing_weight(n: int, by_others: int) -> float:
    """α_i for c_i = ``by_others``."""
    if n == 1:
        return 1.0
    if by_others == 0:
        return 0.0
    return min(1.0, max(0.0, 1 - n / by_others / math.log(n)))


ALGORITHM = Algorithm(
    "shat", "ASP that mixes the answer by the number of workers and their speeds",
    "Ko & Kim 2022", Topology.SERVER, Config, Worker, Server,
    traits=frozenset({"equals_sgd_at_one_worker", "server_applies", "waits_for_answers"}),
)  # fmt: skip
