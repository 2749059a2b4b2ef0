"""ALADDIN: asymmetric centralized training, in which no worker ever waits.

Worker i, at every iteration (Algorithm 1)::

    x_i ← x_i − η g_i                       local self-update, by the user's optimizer
    push to the server, go straight on      asymmetric communication
    x_i ← (1 − α) x_i + α x̃  if it arrived  PS-triggered local update

Server, at every push (Algorithm 2)::

    c̃ ← c̃ + 1,  c_i ← c_i + 1,  g̃ ← g̃ + g_i
    if c_i ≥ π:  x̃ ← x̃ − η g̃/c̃,  reply (x̃, α) to worker i,  g̃, c̃, c_i ← 0

``preset="paper"`` is that; printed, the average comes after the update and the gradient that makes
c_i reach π is dropped.  The default differs in six points, each an option:

1. ``push="update"``: Δ_i = x_i − r_i, r_i ← x_i is pushed; x̃ ← x̃ + Δ_i/n moves as the mean step.
2. ``coalesce``: while pushes are on their way the next is skipped; a later one carries its step.
3. ``lag_compensation``: x_i ← x_i + α (x̃ − s_i), s_i the parameters at the last push that x̃
   contains; r_i moves along, so that a mix is never pushed.
4. ``one_outstanding``: no reply is asked for while one is due: no correction is applied twice.
5. ``count_leavers``: n is the number of workers that trained when a push's steps were begun.
6. ``staleness_aware``: η min(1, (π + 4)/a), where the last x̃ names a push a iterations ago.

Ko et al.: ALADDIN: Asymmetric Centralized Training …, CIKM 2021, doi:10.1145/3459637.3482412.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aladdin_mpi.algorithms.base import Algorithm, Stateful, Topology, check, fill, option
from aladdin_mpi.algorithms.pending import PendingGradients, PendingUpdate
from aladdin_mpi.algorithms.replies import Replies
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import LocalUpdate, Port
from aladdin_mpi.messages import Action, Apply, Merge, Push, Send

OWN = ("lag_compensation", "one_outstanding", "staleness_aware")
PRESETS = {
    "default": {"push": "update", **dict.fromkeys(OWN, True)},
    "paper": {"push": "gradient", **dict.fromkeys(OWN, False)},
}


@dataclass(frozen=True)
class Config:
    period: int = option(4, "iterations pushed between two replies to a worker (π)")
    preset: str = option("default", "where to start from", ("default", "paper"))
    push: str | None = option(None, "what is pushed [by preset]", ("update", "gradient", "none"))
    alpha: str = option("n-period", "α = 1 − 1/√(nπ), or 1 − 1/√c̃", ("n-period", "count"))
    coalesce: bool = option(True, "skip a push while others are on their way, else wait")
    lag_compensation: bool | None = option(None, "keep steps made meanwhile [by preset]")
    one_outstanding: bool | None = option(None, "ask only when no reply is due [by preset]")
    staleness_aware: bool | None = option(None, "smaller steps while replies are old [by preset]")
    count_leavers: bool = option(True, "n is the number of workers that train, not that started")
    replies: bool = option(True, "send global parameters back at all")
    in_flight: str = option("auto", "pushes on their way at once", ("auto", "1", "2"))
    server_momentum: float = option(0.9, "momentum of the global update (pushed gradients)")
    server_weight_decay: float = option(1e-4, "weight decay of the global update (ditto)")

    def __post_init__(self) -> None:
        check(self, "period", self.period >= 1, "must be at least 1")
        check(self, "server_momentum", 0 <= self.server_momentum < 1, "must be in [0, 1)")
        check(self, "server_weight_decay", self.server_weight_decay >= 0, "must not be negative")
        fill(self, PRESETS)


class Worker(Stateful):
    STATE = ("replies",)

    def __init__(self, config: Config, params: FlatParams, num_workers: int) -> None:
        self.cfg = cfg = config
        self.pending = (PendingGradients if cfg.push == "gradient" else PendingUpdate)(params)
        keep = bool(cfg.lag_compensation and cfg.replies)
        aware = bool(cfg.staleness_aware and cfg.replies and cfg.push != "none" and num_workers > 1)
        self.replies = Replies(params, cfg.period, bool(cfg.one_outstanding), keep, aware)
        self.carried = 0  # iterations not pushed yet

    def step(
        self, params: FlatParams, local_update: LocalUpdate, port: Port, iteration: int
    ) -> None:
        if self.pending.collect(params, port):
            local_update(self.replies.count())  # x_i ← x_i − η g_i
            self.carried += 1
        else:  # g_i is thrown away before it reaches x_i
            self.carried = port.lost("nonfinite_push")
        if self.carried and self.cfg.push != "none":
            limit = port.push_limit(self.cfg.in_flight)
            if not self.cfg.coalesce:
                port.wait_push(limit := max(limit, 1))
            self._push(params, port, iteration, limit)
        self.replies.mix_all(params, self.pending, port, iteration)

    def finish(self, params: FlatParams, port: Port) -> None:
        port.wait_push(1)
        if not self._push(params, port, -1, 1, last=True):  # not finite, and thrown away:
            self._push(params, port, -1, 1, last=True)  # what is left
        self.pending.close()

    def _push(
        self, params: FlatParams, port: Port, iteration: int, limit: int, last: bool = False
    ) -> bool:
        ask = self.cfg.replies and not last and self.replies.wanted()
        s = self.replies.snapshot(ask, port.beyond)
        sent = port.try_push(
            lambda out: self.pending.write(params, port, out, s, last), self.carried, limit=limit,
            last=last, wants_reply=ask, handled=self.replies.handled, version=self.replies.version,
        )  # fmt: skip
        if sent > 0:
            self.replies.pushed(sent, ask, s is not None, iteration)
        if sent:
            self.carried = 0 if sent > 0 else port.lost("nonfinite_push")
        return sent > 0


class Server(Stateful):
    STATE = ("merged", "count")

    def __init__(self, config: Config, num_workers: int) -> None:
        self.cfg, self.num_workers = config, num_workers
        self.merged = 0  # c̃
        self.count = [0] * num_workers  # c_i

    def on_push(self, push: Push) -> list[Action]:
        n = push.active if self.cfg.count_leavers else self.num_workers
        self.count[push.worker] += push.iterations
        self.merged = c = self.merged + push.iterations
        complete = self.count[push.worker] >= self.cfg.period
        summed = self.cfg.push == "gradient"  # g̃ ← g̃ + g_i, or else x̃ ← x̃ + Δ_i/n
        actions: list[Action] = [Merge("sum", 1.0) if summed else Merge("global", 1 / n)]
        if summed and complete:  # x̃ ← x̃ − η g̃/c̃
            decay = self.cfg.server_weight_decay
            actions.append(Apply(push.rates, 1 / c, self.cfg.server_momentum, decay))
        if complete:
            self.merged = self.count[push.worker] = 0
        if push.wants_reply:
            base = n * self.cfg.period if self.cfg.alpha == "n-period" else c
            actions.append(Send(push.worker, 1 - 1 / math.sqrt(base)))
        return actions


ALGORITHM = Algorithm(
    "aladdin", "workers push and go on; the server merges and now and then replies",
    "Ko et al., CIKM 2021", Topology.SERVER, Config, Worker, Server,
    traits=frozenset({"equals_sgd_at_one_worker", "keeps_the_mean"}),
)  # fmt: skip
