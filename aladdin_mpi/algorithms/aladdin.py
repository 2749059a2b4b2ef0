"""ALADDIN: asymmetric centralized training, in which no worker ever waits.

Worker i, at every iteration (Algorithm 1)::

    x_i ← x_i − η g_i                       local self-update, by the user's optimizer
    push to the server, go straight on      asymmetric communication
    x_i ← (1 − α) x_i + α x̃  if it arrived  PS-triggered local update

Server, at every push (Algorithm 2)::

    c̃ ← c̃ + 1,  c_i ← c_i + 1,  g̃ ← g̃ + g_i
    if c_i ≥ π:  x̃ ← x̃ − η g̃/c̃,  reply (x̃, α) to worker i,  g̃, c̃, c_i ← 0

``preset="paper"`` is that, with the average before the update and no gradient dropped (the
printed lines have both the other way round), and momentum, which they do not place, in both
updates.  The default differs in five points, each an option:

1. ``push="update"``: Δ_i = x_i − r_i, r_i ← x_i is pushed, and merged as x̃ ← x̃ + Δ_i/n: x̃
   moves as the mean of the workers' own steps, for any optimizer.
2. ``coalesce``: while pushes are on their way the next is skipped; its step travels with a later
   one.
3. ``lag_compensation``: x_i ← x_i + α (x̃ − s_i), s_i the parameters at the worker's last push
   that x̃ contains; r_i moves along, so that a mix is never pushed.
4. ``one_outstanding``: no reply is asked for while one is due, so that no correction is applied
   twice.
5. ``count_leavers``: n is the number of workers still training.

Y. Ko, K. Choi, H. Jei, D. Lee, S.-W. Kim. ALADDIN: Asymmetric Centralized Training for
Distributed Deep Learning. CIKM 2021, doi:10.1145/3459637.3482412.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aladdin_mpi.algorithms.base import Algorithm, Stateful, Topology, check, fill, option
from aladdin_mpi.algorithms.pending import Pending, PendingGradients, PendingUpdate
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import Incoming, Port
from aladdin_mpi.core.snapshots import Snapshots
from aladdin_mpi.messages import Action, Apply, Merge, Push, Send

PRESETS = {
    "default": {"push": "update", "lag_compensation": True, "one_outstanding": True},
    "paper": {"push": "gradient", "lag_compensation": False, "one_outstanding": False},
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
    STATE = ("carried", "since_ask", "handled", "version", "sequence")

    def __init__(self, config: Config, params: FlatParams, num_workers: int) -> None:
        self.cfg = config
        gradient = config.push == "gradient"
        self.pending: Pending = PendingGradients(params) if gradient else PendingUpdate(params)
        self.snapshots = Snapshots(params, 2 if config.lag_compensation and config.replies else 0)
        self.carried = 0  # iterations not pushed yet
        self.since_ask = 0  # iterations since the push that asked for a reply last
        self.asked = 0  # that push
        self.due = False  # its reply was not handled yet
        self.handled = self.version = self.sequence = 0

    def step(
        self, params: FlatParams, local_update: Callable[[], None], port: Port, iteration: int
    ) -> None:
        with port.span("push_s"):
            finite = self.pending.collect(params)
        if not finite:  # g_i is thrown away before it reaches x_i
            return self._lost(port)
        local_update()  # x_i ← x_i − η g_i
        self.carried += 1
        self.since_ask += 1
        if self.cfg.push != "none":
            full = port.send_time_s() > 0.5 * port.iteration_s()  # a queue would only be staleness
            limit = (1 if full else 2) if self.cfg.in_flight == "auto" else int(self.cfg.in_flight)
            if not self.cfg.coalesce:
                port.wait_push(limit)
            self._push(params, port, iteration, limit)
        while (reply := port.take_reply()) is not None:
            self._mix(params, port, reply, iteration)

    def finish(self, params: FlatParams, port: Port) -> None:
        port.wait_push(1)
        while not self._push(params, port, -1, 1, last=True):
            pass  # what was not finite has been thrown away: push the rest

    def _lost(self, port: Port) -> None:
        self.carried = 0
        port.lost("nonfinite_push", 1)

    def _push(
        self, params: FlatParams, port: Port, iteration: int, limit: int, last: bool = False
    ) -> bool:
        ask = self.cfg.replies and not last and self.since_ask >= self.cfg.period
        ask = ask and not (self.cfg.one_outstanding and self.due)
        # a reply names the push that asked for it, or one that was merged together with that
        keep = self.cfg.lag_compensation and (ask or (self.due and self.sequence == self.asked))

        def write(out: np.ndarray) -> bool:
            s = self.snapshots.lend() if keep else None
            return self.pending.write(params, out, s)

        sent = port.try_push(
            write, self.carried, limit=limit, wants_reply=ask, handled=self.handled,
            version=self.version, last=last,
        )  # fmt: skip
        if sent < 0:
            self._lost(port)
        if sent <= 0:
            return False
        if keep:
            self.snapshots.keep(sent, iteration)
        if ask:
            self.since_ask, self.asked, self.due = 0, sent, True
        self.sequence, self.carried = sent, 0
        return True

    def _mix(self, params: FlatParams, port: Port, reply: Incoming, iteration: int) -> None:
        header = reply.header
        kept = self.snapshots.take(header.sequence)
        s, made_at = kept if kept else (None, iteration)
        if reply.finite:
            with port.span("mix_s"):  # x_i ← x_i + α (x̃ − s_i), and r_i; printed: s_i = x_i
                self.pending.mix(params, header.alpha, reply.vector, s)
            self.version = header.version
        else:
            port.lost("nonfinite_reply", 1)
        port.mixed(header, iteration - made_at, discarded=not reply.finite)
        self.handled = header.number
        self.due = self.cfg.one_outstanding is False and header.sequence < self.asked
        if not self.due:
            self.snapshots.clear()
        reply.release()


class Server(Stateful):
    STATE = ("merged", "count")

    def __init__(self, config: Config, num_workers: int) -> None:
        self.cfg = config
        self.num_workers = num_workers
        self.merged = 0  # c̃
        self.count = [0] * num_workers  # c_i

    def on_push(self, push: Push) -> list[Action]:
        n = push.active if self.cfg.count_leavers else self.num_workers
        self.merged += push.iterations
        self.count[push.worker] += push.iterations
        c = self.merged
        actions: list[Action]
        if self.cfg.push == "update":
            actions = [Merge("global", 1 / n)]  # x̃ ← x̃ + Δ_i/n
        else:
            actions = [Merge("sum", 1.0)]  # g̃ ← g̃ + g_i
            if self.count[push.worker] >= self.cfg.period:  # x̃ ← x̃ − η g̃/c̃
                momentum, decay = self.cfg.server_momentum, self.cfg.server_weight_decay
                actions.append(Apply(push.rates, 1 / c, momentum, decay))
        if self.count[push.worker] >= self.cfg.period:
            self.merged = self.count[push.worker] = 0
        if push.wants_reply:
            base = n * self.cfg.period if self.cfg.alpha == "n-period" else c
            actions.append(Send(push.worker, 1 - 1 / math.sqrt(base)))
        return actions


ALGORITHM = Algorithm(
    name="aladdin",
    summary="workers push and go on; the server merges and now and then replies",
    source="Ko et al., CIKM 2021",
    topology=Topology.SERVER,
    config=Config,
    worker=Worker,
    server=Server,
    traits=frozenset({"equals_sgd_at_one_worker", "keeps_the_mean"}),
)
