"""SSP: stale synchronous parallel training, asynchronous within a bound.

A worker at iteration c (its clock) may use parameters in which every worker's pushes up to
c − s − 1 are contained, and its own (Ho et al., sec. 3)::

    push g_i;   x̃ ← x̃ − (η/n) g_i  at the server
    if its copy of x̃ is recent enough:   x_i ← x_i − η g_i    a local step, no waiting
    else:   wait until the slowest worker has reached c − s;  x_i ← x̃

``staleness=0`` is bulk synchronous.  The copy's age is the clock of the slowest worker when it was
sent, as in the paper's client cache; own steps made since are in x_i at full η ("read my writes").
A worker that has ended counts as infinitely fast.

Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS
2013.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from aladdin_mpi.algorithms.base import Algorithm, Stateful, Topology, check, option
from aladdin_mpi.algorithms.gradients import GradientWorker
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import Incoming, Port
from aladdin_mpi.messages import Action, Apply, Merge, Push, Send

__all__ = ["BoundedServer", "BoundedWorker"]


@dataclass(frozen=True)
class Config:
    staleness: int = option(3, "iterations that a worker may be ahead of the slowest")

    def __post_init__(self) -> None:
        check(self, "staleness", self.staleness >= 0, "must not be negative")


class BoundedWorker(GradientWorker):
    """Asks for x̃ when its copy is older than ``bound`` iterations."""

    STATE: ClassVar[tuple[str, ...]] = (*GradientWorker.STATE, "known")

    def __init__(self, bound: int, params: FlatParams, num_workers: int) -> None:
        super().__init__(None, params, num_workers)
        self.bound = bound
        self.known = 0  # what every worker had reached when x̃ was sent last

    def wants_reply(self) -> bool:
        return self.clock - self.known > self.bound

    def take(self, params: FlatParams, reply: Incoming, port: Port) -> None:
        super().take(params, reply, port)
        self.known = reply.header.clock


class BoundedServer(Stateful):
    """Answers a worker when the slowest has come close enough."""

    STATE: ClassVar[tuple[str, ...]] = ("clocks",)

    def __init__(self, bound: int, num_workers: int) -> None:
        self.bound, self.num_workers = bound, num_workers
        self.clocks = dict.fromkeys(range(num_workers), 0)  # of those that train
        self.waiting: set[int] = set()

    def on_push(self, push: Push) -> list[Action]:
        actions: list[Action] = []
        if push.iterations:
            actions = [Merge("sum", 1.0), Apply(push.rates, 1 / self.num_workers)]
        if not push.last:
            self.clocks[push.worker] += 1
        if push.wants_reply:
            self.waiting.add(push.worker)
        return actions + self._answers()

    def on_leave(self, worker: int) -> list[Action]:
        self.clocks.pop(worker, None)
        self.waiting.discard(worker)
        return self._answers()

    def _answers(self) -> list[Action]:
        slowest = min(self.clocks.values(), default=0)
        ready = [w for w in sorted(self.waiting) if self.clocks[w] - slowest <= self.bound]
        self.waiting.difference_update(ready)
        return [Send(worker, 1.0, slowest) for worker in ready]


ALGORITHM = Algorithm(
    "ssp", "as ASP, but a worker waits only when it is too far ahead of the slowest",
    "Ho et al. 2013", Topology.SERVER, Config,
    lambda config, params, num_workers: BoundedWorker(config.staleness, params, num_workers),
    lambda config, num_workers: BoundedServer(config.staleness, num_workers),
    traits=frozenset({"waits_for_stragglers", "server_applies"}),
)  # fmt: skip
