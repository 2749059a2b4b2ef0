"""D-PSGD: synchronous averaging with the neighbours on a ring.

At iteration k, with the doubly stochastic matrix W of the ring (1/3 for itself and each of two
neighbours; 1/2 and 1/2 for two workers; Lian et al., Algorithm 1)::

    x_i ← Σ_j W_ij x_j − η g_i(x_i)

x_i(k) leaves right after iteration k − 1, so that it travels while the gradient is computed.  The
share of a neighbour that has ended is taken by the worker itself, which keeps W doubly stochastic
among those that train.

Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NIPS 2017.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aladdin_mpi.algorithms.base import Algorithm, Topology
from aladdin_mpi.algorithms.gossip import GossipWorker
from aladdin_mpi.core import kernels
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import PeerIncoming, PeerPort
from aladdin_mpi.messages import PeerHeader


@dataclass(frozen=True)
class Config:
    """D-PSGD has no options."""


class Worker(GossipWorker):
    def __init__(self, config: Config, params: FlatParams, num_workers: int) -> None:
        super().__init__(params)
        self.r = params.new_vector()
        self.early: dict[tuple[int, int], PeerIncoming] = {}  # by neighbour and iteration

    def step(
        self, params: FlatParams, local_update: Callable[[], None], port: PeerPort, iteration: int
    ) -> None:
        n, me = port.num_workers, port.worker
        neighbours = sorted({(me - 1) % n, (me + 1) % n} - {me})
        params.read(self.r)
        local_update()
        self.undo_bad_step(params, self.r, port)
        if self.made:  # at the start all are equal
            self._average(params, port, neighbours)
        self.made += 1
        header = PeerHeader(me, self.made)
        for to in neighbours:
            while port.ended(to) is None and not port.try_send(to, params.read, header):
                self._receive(port)
                port.wait()

    def _average(self, params: FlatParams, port: PeerPort, neighbours: list[int]) -> None:
        """``x ← x + Σ_j W_ij x_j(k) − x_i(k)``."""
        self._receive(port)
        while any(not self._known(port, other) for other in neighbours):
            port.wait()
            self._receive(port)
        messages = [self.early.pop((other, self.made), None) for other in neighbours]
        share = 1 / (1 + len(neighbours))
        with port.span("mix_s"):
            own = 1 - share * sum(m is not None for m in messages)
            self.vector[:] = self.r
            self.vector *= own
            for message in messages:
                if message is not None:
                    kernels.scale_add(self.vector, 1.0, message.vector, share)
                    port.absorbed(message.header, share, 0, discarded=False)
                    message.release()
            params.mix(1.0, self.vector, self.r)

    def _known(self, port: PeerPort, other: int) -> bool:
        ended = port.ended(other)
        return (other, self.made) in self.early or (ended is not None and ended < self.made)

    def _receive(self, port: PeerPort) -> None:
        while (message := port.take()) is not None:
            if message.finite:
                self.early[message.header.worker, message.header.iteration] = message
            else:
                raise AssertionError("a worker sends finite parameters only")

    def absorb(self, params: FlatParams, port: PeerPort, message: PeerIncoming) -> float:
        return 0.0  # this worker has ended: what still comes is thrown away


ALGORITHM = Algorithm(
    "d-psgd", "every iteration averages with the two neighbours on a ring",
    "Lian et al. 2017", Topology.PEER, Config, Worker,
    traits=frozenset(
        {"equals_sgd_at_one_worker", "lockstep", "waits_for_stragglers", "keeps_the_mean"}
    ),
)  # fmt: skip
