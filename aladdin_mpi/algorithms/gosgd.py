"""GoSGD: gossip with sum-weights, in which nobody waits.

Worker i makes its local step; with probability p it then shares half of its weight with a random
other worker j (Blot et al., Algorithm 1 and 2)::

    w_i ← w_i / 2;   send (x_i, w_i) to j
    at j, when it comes:   x_j ← (w_j x_j + w_i x_i) / (w_j + w_i);   w_j ← w_j + w_i

The weights start at 1/n and sum to 1.  A message is skipped, and the weight kept, while the last
one to the same worker is still on its way.

Blot et al., Gossip training for deep learning, arXiv:1611.09726; GoSGD, arXiv:1804.01852.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aladdin_mpi.algorithms.base import Algorithm, Topology, check, option
from aladdin_mpi.algorithms.gossip import GossipWorker
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import PeerIncoming, PeerPort
from aladdin_mpi.messages import PeerHeader


@dataclass(frozen=True)
class Config:
    p: float = option(0.01, "probability of a message after an iteration")

    def __post_init__(self) -> None:
        check(self, "p", 0 <= self.p <= 1, "must be in [0, 1]")


class Worker(GossipWorker):
    STATE = (*GossipWorker.STATE, "weight")

    def __init__(self, config: Config, params: FlatParams, num_workers: int) -> None:
        super().__init__(params)
        self.p, self.weight = config.p, 1 / num_workers
        self.r = params.new_vector()

    def step(
        self, params: FlatParams, local_update: Callable[[], None], port: PeerPort, iteration: int
    ) -> None:
        params.read(self.r)
        local_update()
        self.undo_bad_step(params, self.r, port)
        self.absorb_all(params, port)
        others = [w for w in range(port.num_workers) if w != port.worker and port.ended(w) is None]
        if port.rng.random() < self.p and others:
            to = int(port.rng.choice(others))
            header = PeerHeader(port.worker, self.made, self.weight / 2)
            if port.try_send(to, params.read, header):
                self.weight /= 2
        self.made += 1

    def absorb(self, params: FlatParams, port: PeerPort, message: PeerIncoming) -> float:
        self.weight += message.header.weight
        part = message.header.weight / self.weight
        params.mix(part, message.vector, None)
        return part

    def total(self, params: FlatParams) -> float:
        params.read(self.vector)
        self.vector *= self.weight
        return self.weight


ALGORITHM = Algorithm(
    "gosgd", "now and then a worker sends its parameters to a random other; nobody waits",
    "Blot et al. 2016, 2018", Topology.PEER, Config, Worker,
    traits=frozenset({"equals_sgd_at_one_worker"}),
)  # fmt: skip
