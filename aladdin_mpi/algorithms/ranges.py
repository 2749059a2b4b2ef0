"""An algorithm whose vector is cut into ranges, each with a state and a port of its own.

Each range decides for itself: whether it is pushed or coalesced, when it asks, what it mixes in.
The user's optimizer runs once per step for all of them, with the mean of the rates they ask for.
So that all ranges are pushed before any waits, their steps are nested: where the algorithm runs the
local update of a range, or is about to wait, the next range's step comes first, and inside the last
one the update of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aladdin_mpi.algorithms.base import Worker
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import LocalUpdate
from aladdin_mpi.core.shards import Range, Shard

__all__ = ["ShardedWorker"]


class _Ports(Protocol):
    ports: list[Any]
    """By range."""


class ShardedWorker:
    """The algorithm, once for each range.

    Parameters
    ----------
    make : callable
        ``make(shard) -> Worker``, the algorithm's state for a range.
    params : FlatParams
    ranges : sequence of Range
    gradients : bool
        Gradients are pushed: where one of a step's is not finite, none of them counts.
    """

    def __init__(
        self, make: Callable[[Shard], Worker], params: FlatParams,
        ranges: Sequence[Range], gradients: bool,
    ) -> None:  # fmt: skip
        self._shards: list[Any] = [Shard(params, part.start, part.stop) for part in ranges]
        self._workers = [make(shard) for shard in self._shards]
        self._gradients = gradients

    def step(
        self,
        params: FlatParams,
        local_update: LocalUpdate,
        port: _Ports,
        iteration: int,
    ) -> None:
        if self._gradients and not params.gradients_finite():
            for p in params.parameters:
                if p.grad is not None:
                    p.grad.fill_(float("nan"))
        updated = False
        rates: list[float] = []

        def run(k: int, update: bool) -> None:
            nonlocal updated
            if k == len(self._workers):
                if update and not updated:
                    updated = True
                    local_update(sum(rates) / len(rates))
                return
            gone_on = False

            def go_on(wanted: bool) -> None:
                nonlocal gone_on
                first, gone_on = not gone_on, True
                run(k + 1 if first else len(self._workers), wanted)

            def update_here(rate: float = 1.0) -> None:
                rates.append(rate)
                go_on(True)

            port.ports[k].others = lambda: go_on(update)
            self._workers[k].step(self._shards[k], update_here, port.ports[k], iteration)
            if not gone_on:
                go_on(update)

        run(0, False)

    def before_forward(self, params: FlatParams) -> None:
        for worker, shard in zip(self._workers, self._shards, strict=True):
            worker.before_forward(shard)

    def finish(self, params: FlatParams, port: _Ports) -> None:
        for worker, shard, one in zip(self._workers, self._shards, port.ports, strict=True):
            worker.finish(shard, one)

    def state_dict(self) -> dict[str, Any]:
        return {"ranges": [worker.state_dict() for worker in self._workers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for worker, own in zip(self._workers, state["ranges"], strict=True):
            worker.load_state_dict(own)
