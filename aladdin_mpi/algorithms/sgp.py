"""SGP: stochastic gradient push over a directed exponential graph.

Worker i holds a numerator x_i and a weight w_i, at first 1; its model is z_i = x_i / w_i (Assran et
al., Algorithm 1)::

    x_i ← x_i − η g_i(z_i)
    send (x_i/2, w_i/2) to worker  i + 2^(k mod (⌊log₂(n−1)⌋ + 1))  mod n;   keep the other half
    x_i ← x_i + Σ x_j,   w_i ← w_i + Σ w_j   over what has arrived;   z_i = x_i / w_i

``overlap=1`` (1-OSGP) needs at iteration k only what was sent at k − 1, so that messages travel
while gradients are computed; ``overlap=0`` waits for those of iteration k.  What is of a later
iteration, or comes before this worker's own message has left, is taken in when its next one has.
Who has ended gets nothing more; Σ w stays n, and the final model is Σ x / Σ w.

Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aladdin_mpi.algorithms.base import Algorithm, Topology, check, option
from aladdin_mpi.algorithms.gossip import GossipWorker
from aladdin_mpi.core import kernels
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import PeerIncoming, PeerPort
from aladdin_mpi.messages import PeerHeader


@dataclass(frozen=True)
class Config:
    overlap: int = option(1, "iterations that a message may take (τ)")

    def __post_init__(self) -> None:
        check(self, "overlap", 0 <= self.overlap <= 100, "must be from 0 to 100")


def distance(n: int, iteration: int) -> int:
    """How far along the ring worker i's message of this iteration goes."""
    return 2 ** (iteration % ((n - 1).bit_length())) if n > 1 else 0


class Worker(GossipWorker):
    STATE = (*GossipWorker.STATE, "weight", "x", "later", "later_weight")

    def __init__(self, config: Config, params: FlatParams, num_workers: int) -> None:
        super().__init__(params)
        self.overlap = config.overlap
        self.x, self.r = params.new_vector(), params.new_vector()
        params.read(self.x)
        params.read(self.r)  # z
        self.weight = 1.0
        self.later, self.later_weight = params.new_vector(), 0.0  # came too early
        self.halved = True  # this iteration's message has left
        self.received: dict[int, int] = {}  # the last iteration that came, by worker

    def step(
        self, params: FlatParams, local_update: Callable[[], None], port: PeerPort, iteration: int
    ) -> None:
        local_update()
        if params.difference(self.r, self.vector):  # the local step
            kernels.add(self.x, self.vector)
        else:
            port.lost("nonfinite_push")
        n, k = port.num_workers, self.made
        if n > 1:
            self.halved = False
            self._send((port.worker + distance(n, k)) % n, params, port)
            self.halved = True
            self._take_later()
            due = k - self.overlap
            source = (port.worker - distance(n, due)) % n
            self.wait_until(lambda: due < 0 or self._has_come(port, source, due), params, port)
        with port.span("mix_s"):
            np.multiply(self.x, 1 / self.weight, out=self.r)  # z = x / w
            params.assign(self.r)
        self.made += 1

    def _send(self, to: int, params: FlatParams, port: PeerPort) -> None:
        def half(out: np.ndarray) -> None:
            np.multiply(self.x, 0.5, out=out)
            self.x *= 0.5
            self.weight *= 0.5

        def sent() -> bool:
            header = PeerHeader(port.worker, self.made, self.weight / 2)
            return port.ended(to) is not None or port.try_send(to, half, header)

        self.wait_until(sent, params, port)

    def _has_come(self, port: PeerPort, source: int, iteration: int) -> bool:
        ended = port.ended(source)
        return self.received.get(source, -1) >= iteration or (
            ended is not None and ended <= iteration
        )

    def absorb(self, params: FlatParams, port: PeerPort, message: PeerIncoming) -> float:
        header = message.header
        if self.halved and header.iteration <= self.made:
            kernels.add(self.x, message.vector)
            self.weight += header.weight
        else:
            kernels.add(self.later, message.vector)
            self.later_weight += header.weight
        self.received[header.worker] = header.iteration
        return header.weight

    def _take_later(self) -> None:
        if self.later_weight:
            kernels.add(self.x, self.later)
            self.weight += self.later_weight
            self.later.fill(0.0)
            self.later_weight = 0.0

    def total(self, params: FlatParams) -> float:
        self._take_later()
        np.copyto(self.vector, self.x)
        return self.weight


ALGORITHM = Algorithm(
    "sgp", "push-sum: half of a worker's parameters goes to another one in every iteration",
    "Assran et al. 2019", Topology.PEER, Config, Worker,
    traits=frozenset(
        {"equals_sgd_at_one_worker", "lockstep", "waits_for_stragglers", "keeps_the_mean"}
    ),
)  # fmt: skip
