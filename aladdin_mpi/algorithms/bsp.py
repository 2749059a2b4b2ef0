"""BSP: bulk synchronous parallel training over a parameter server.

At every iteration the server waits for the gradients of all workers that still train, and then::

    x̃ ← x̃ − η (1/k) Σ g_i        momentum and weight decay as in the workers' SGD
    x_i ← x̃                       for all of them

Gradients are added pairwise in the order of the workers, so that a run repeats to the bit, however
many servers and relays there are.  A worker whose data has ended joins: from then on it counts as
having answered.

Gerbessiotis & Valiant, Direct bulk-synchronous parallel algorithms, J. Parallel Distrib. Comput.
22(2), 1994; with a parameter server: Li et al., OSDI 2014.
"""

from __future__ import annotations

from dataclasses import dataclass

from aladdin_mpi.algorithms.base import Algorithm, Stateful, Topology
from aladdin_mpi.algorithms.gradients import GradientWorker
from aladdin_mpi.messages import Action, Apply, Hold, MergeHeld, Push, Send


@dataclass(frozen=True)
class Config:
    """BSP has no options."""


class Server(Stateful):
    def __init__(self, config: Config, num_workers: int) -> None:
        self.active = set(range(num_workers))
        self.arrived: set[int] = set()  # answered in this round
        self.held: set[int] = set()  # with a gradient
        self.rates: tuple[float, ...] = ()

    def on_push(self, push: Push) -> list[Action]:
        if push.last:
            return []
        self.arrived.add(push.worker)
        if not push.iterations:  # its gradient was not finite
            return self._complete()
        self.held.add(push.worker)
        self.rates = push.rates
        return self._complete() or [Hold()]

    def on_leave(self, worker: int) -> list[Action]:
        self.active.discard(worker)
        return self._complete()

    def _complete(self) -> list[Action]:
        """The round's update, if everybody has answered."""
        if not self.arrived or not self.active <= self.arrived:
            return []
        actions: list[Action] = []
        if self.held:
            actions.append(MergeHeld("sum", tuple(sorted(self.held))))
            actions.append(Apply(self.rates, 1 / len(self.held)))
        actions += [Send(worker, 1.0) for worker in sorted(self.arrived)]
        self.arrived, self.held = set(), set()
        return actions


ALGORITHM = Algorithm(
    "bsp", "the server waits for all workers' gradients and applies their mean",
    "Gerbessiotis & Valiant 1994", Topology.SERVER, Config, GradientWorker, Server,
    traits=frozenset(
        {"equals_sgd_at_one_worker", "synchronous", "lockstep", "waits_for_stragglers",
         "server_applies"}
    ),
)  # fmt: skip
