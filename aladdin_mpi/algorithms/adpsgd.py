"""AD-PSGD: asynchronous averaging of pairs, in the background.

Workers with an even index are active, the others passive (a bipartite graph: no two wait for each
other).  Whenever its last exchange is done, an active one averages with a random passive one (Lian
et al., Algorithm 1)::

    x_i, x_j ← (x_i + x_j) / 2      atomically;        x_i ← x_i − η g_i     meanwhile

The communication threads do it, over a shadow s of the parameters, so that nobody waits for a step.
The active one sends s_i as it is; the passive one answers with its s_j and moves by (s_i − s_j)/2;
on the answer the active one moves by (s_j − s_i)/2, whatever has been added to s_i since: the sum
of all stays as it was.  At the end of a step the worker adds its own change to s, and goes on from
s.

Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aladdin_mpi.algorithms.base import Algorithm, Topology
from aladdin_mpi.algorithms.gossip import GossipWorker
from aladdin_mpi.core import kernels
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import PeerIncoming, PeerPort
from aladdin_mpi.messages import PeerHeader


@dataclass(frozen=True)
class Config:
    """AD-PSGD has no options."""


class Worker(GossipWorker):
    STATE = (*GossipWorker.STATE, "s")

    def __init__(self, config: Config, params: FlatParams, num_workers: int) -> None:
        super().__init__(params)
        self.s, self.r, self.sent = (params.new_vector() for _ in range(3))
        params.read(self.s)
        params.read(self.r)
        self.lock = threading.Lock()  # of s; held for a pass over it
        self.exchanging = self.listening = False

    def step(
        self, params: FlatParams, local_update: Callable[[], None], port: PeerPort, iteration: int
    ) -> None:
        self._listen(port)
        local_update()
        self._catch_up(params, port)
        self.made += 1
        passive = range(1, port.num_workers, 2)
        if port.worker % 2 == 0 and passive and not self.exchanging:
            self.exchanging = True
            to = int(port.rng.choice(passive))
            port.post(lambda: self._begin(port, to))

    def _listen(self, port: PeerPort) -> None:
        if not self.listening:
            self.listening = True
            port.on_message(lambda message: self._message(port, message))

    def _catch_up(self, params: FlatParams, port: PeerPort) -> None:
        """``s ← s + (x − r)``, ``x ← s``, ``r ← s``."""
        with port.span("mix_s"):
            good = params.difference(self.r, self.vector)
            with self.lock:
                if good:
                    kernels.add(self.s, self.vector)
                params.assign(self.s)
            params.read(self.r)
        if not good:
            port.lost("nonfinite_push")

    # -- communication thread ---------------------------------------------------------------------

    def _begin(self, port: PeerPort, to: int) -> None:
        with self.lock:
            np.copyto(self.sent, self.s)
        header = PeerHeader(port.worker, self.made)
        self.exchanging = port.try_send(to, lambda out: np.copyto(out, self.sent), header)

    def _message(self, port: PeerPort, message: PeerIncoming) -> bool:
        header = message.header
        with self.lock:
            if header.answer:
                other = self.sent
                self.exchanging = False
            else:
                reply = PeerHeader(port.worker, self.made, answer=True)
                other = self.sent  # a passive worker sends nothing of its own
                np.copyto(other, self.s)
                if not port.try_send(header.worker, lambda out: np.copyto(out, other), reply):
                    return False
            if message.finite:  # s ← s + (s_other − s_sent) / 2
                kernels.merge(self.s, [message.vector, other], [0.5, -0.5])
        port.absorbed(header, 0.5, self.made - header.iteration, discarded=not message.finite)
        message.release()
        return True

    def finish(self, params: FlatParams, port: PeerPort) -> None:
        self._listen(port)
        while self.exchanging:
            port.wait()
        port.leave(self.made)
        while not port.all_ended():
            port.wait()
        self._catch_up(params, port)
        self.settle(params, port)


ALGORITHM = Algorithm(
    "ad-psgd", "active workers average with random passive ones, in the background",
    "Lian et al. 2018", Topology.PEER, Config, Worker,
    traits=frozenset({"equals_sgd_at_one_worker", "keeps_the_mean"}),
)  # fmt: skip
