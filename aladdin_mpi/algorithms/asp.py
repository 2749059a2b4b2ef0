"""ASP: asynchronous parallel training, in which every gradient is applied when it arrives.

Worker i pushes g_i and waits for the answer; the server, at every push::

    x̃ ← x̃ − (η/n) g_i            momentum and weight decay as in the workers' SGD
    x_i ← x̃                       for the worker that pushed

Downpour SGD (Dean et al., NIPS 2012, sec. 4.1) keeps an Adagrad at the server and fetches every so
many steps; Hogwild! (Recht et al., NIPS 2011) shares memory.  Built here is the common form: one
push and one answer an iteration, with SGD at the server.
"""

from __future__ import annotations

from dataclasses import dataclass

from aladdin_mpi.algorithms.base import Algorithm, Stateful, Topology
from aladdin_mpi.algorithms.gradients import GradientWorker
from aladdin_mpi.messages import Action, Apply, Merge, Push, Send


@dataclass(frozen=True)
class Config:
    """ASP has no options."""


class Server(Stateful):
    def __init__(self, config: object, num_workers: int) -> None:
        self.num_workers = num_workers

    def on_push(self, push: Push) -> list[Action]:
        actions: list[Action] = []
        if push.iterations:
            actions = [Merge("sum", 1.0), Apply(push.rates, 1 / self.num_workers)]
        if push.wants_reply:
            actions.append(Send(push.worker, 1.0))
        return actions


ALGORITHM = Algorithm(
    "asp", "every gradient is applied on arrival; its worker waits for the answer",
    "Recht et al. 2011; Dean et al. 2012", Topology.SERVER, Config, GradientWorker, Server,
    traits=frozenset({"equals_sgd_at_one_worker", "server_applies", "waits_for_answers"}),
)  # fmt: skip
