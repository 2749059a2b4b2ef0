"""DSSP: SSP whose bound moves between ``low`` and ``high``.

A worker that is ``low`` iterations ahead of the slowest asks.  The server then predicts, from the
workers' last iteration times I_i, after how many further iterations r ≤ high − low its wait for the
slowest would be shortest (Zhao et al., Algorithm 2)::

    wait(r) = min over k with k·I_s ≥ r·I_i of  k·I_s − r·I_i
    r* = argmin wait(r)

and lets it go on at once for r* iterations; for r* = 0 it waits, as in SSP.  The paper's controller
simulates from the times of the last pushes; the server here has no clock, and takes the slowest
worker's next push to be a whole iteration away.  ``low = high`` is SSP.

Zhao et al., Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning, ICDCS 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aladdin_mpi.algorithms.base import Algorithm, Topology, check, option
from aladdin_mpi.algorithms.ssp import BoundedServer, BoundedWorker
from aladdin_mpi.messages import Action, Push, Send


@dataclass(frozen=True)
class Config:
    low: int = option(3, "iterations ahead of the slowest from which a worker asks")
    high: int = option(15, "iterations ahead of the slowest beyond which it waits in any case")

    def __post_init__(self) -> None:
        check(self, "low", self.low >= 0, "must not be negative")
        check(self, "high", self.high >= self.low, f"must be at least --low, here {self.low}")


class Server(BoundedServer):
    STATE = (*BoundedServer.STATE, "times")

    def __init__(self, config: Config, num_workers: int) -> None:
        super().__init__(config.low, num_workers)
        self.cfg = config
        self.times = [0.0] * num_workers  # [s] of the last iterations

    def on_push(self, push: Push) -> list[Action]:
        if push.iteration_s > 0:
            self.times[push.worker] = push.iteration_s
        actions = super().on_push(push)
        if push.worker in self.waiting:
            more = self.further(push.worker)
            if more:
                self.waiting.discard(push.worker)
                clock = self.clocks[push.worker] - self.cfg.low + more
                actions.append(Send(push.worker, 1.0, clock))
        return actions

    def further(self, worker: int) -> int:
        """r*, the iterations that a worker may make before it waits."""
        slowest = min(self.clocks, key=lambda w: self.clocks[w])
        own, slow = self.times[worker], self.times[slowest]
        room = self.cfg.high - (self.clocks[worker] - self.clocks[slowest])
        if not own or not slow or room <= 0:
            return 0
        most = min(room, self.cfg.high - self.cfg.low)

        def wait(r: int) -> float:
            return max(1, math.ceil(r * own / slow)) * slow - r * own

        return min(range(most + 1), key=wait)


ALGORITHM = Algorithm(
    "dssp", "SSP with a bound that follows the workers' speeds",
    "Zhao et al. 2019", Topology.SERVER, Config,
    lambda config, params, num_workers: BoundedWorker(config.low, params, num_workers), Server,
    traits=frozenset({"waits_for_stragglers", "server_applies"}),
)  # fmt: skip
