"""A server's global parameters in virtual time: they obey the algorithm, push by push."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from aladdin_mpi.algorithms.base import Server
from aladdin_mpi.core import kernels
from aladdin_mpi.core.flat import FlatBuffers, FlatParams
from aladdin_mpi.core.pairwise import add_pairwise
from aladdin_mpi.messages import Action, Apply, Hold, Merge, MergeHeld, Push, Send

__all__ = ["GlobalParameters", "Handled", "Message", "SgdOptions"]


class Message(NamedTuple):
    """A push and what it carries: float32 (size,), float32 and int64 buffers."""

    push: Push
    payload: np.ndarray
    floats: np.ndarray
    counts: np.ndarray


class Handled(NamedTuple):
    """A push after its merge: merges between the version its worker had and this one, which is
    number ``version``.
    """

    push: Push
    staleness: int
    version: int


@dataclass(frozen=True)
class SgdOptions:
    """The workers' momentum and weight decay, for servers that step as they would."""

    momentum: float
    weight_decay: float


class GlobalParameters:
    """x̃, buffers, and what the algorithm accumulates.

    Parameters
    ----------
    rules : Server
    params, buffers
        Of any worker, before the first step.
    num_workers : int
    sgd : SgdOptions

    Attributes
    ----------
    x, floats : ndarray of float32
    counts : ndarray of int64
    version : int
        Pushes merged so far.
    last_merged : list of int
        Each worker's last push that x̃ contains.
    """

    def __init__(
        self, rules: Server, params: FlatParams, buffers: FlatBuffers, num_workers: int,
        sgd: SgdOptions,
    ) -> None:  # fmt: skip
        self._rules, self._sgd, self._ranges = rules, sgd, params.group_ranges()
        self.x, self._sum, self._velocity = (params.new_vector() for _ in range(3))
        params.read(self.x)
        self.floats, self.counts = buffers.floats.copy(), buffers.counts.copy()
        self.version = 0
        self.last_merged = [0] * num_workers
        self._held: dict[int, tuple[Message, bool]] = {}

    def handle(self, message: Message) -> tuple[list[Handled], list[Send], int]:
        """Do what the rules say about a push.

        Returns
        -------
        handled : list of Handled
            Those that are done with, in order.
        sends : list of Send
            The replies to make now.
        passes : int
            Over the whole vector.
        """
        push = message.push
        self._handled: list[Handled] = []
        self._sends: list[Send] = []
        self._passes = 0
        bad = kernels.count_nonfinite(message.payload) > 0
        self._held[push.worker] = held = (message, bad)
        actions = self._rules.on_push(push)
        self._obey(actions, push.worker)
        if Hold() not in actions and self._held.get(push.worker) is held:
            self._release(push.worker)
        if push.last:
            self._obey(self._rules.on_leave(push.worker), -1)
        return self._handled, self._sends, self._passes

    def _obey(self, actions: list[Action], worker: int) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._sends.append(action)
            elif isinstance(action, Apply):
                self._apply(action)
            elif isinstance(action, Merge):
                message, bad = self._held[worker]
                if not bad:
                    kernels.merge(self._target(action), [message.payload], [action.weight])
                self._passes += 1
            elif isinstance(action, MergeHeld):
                good = [one for one in action.workers if not self._held[one][1]]
                if good:
                    payloads = [self._held[one][0].payload for one in good]
                    add_pairwise(self._target(action), good, payloads)
                self._passes += len(action.workers)
                for one in action.workers:
                    self._release(one)

    def _target(self, action: Merge | MergeHeld) -> np.ndarray:
        return self.x if action.target == "global" else self._sum

    def _apply(self, action: Apply) -> None:
        momentum, decay = action.momentum, action.weight_decay
        momentum = self._sgd.momentum if momentum is None else momentum
        decay = self._sgd.weight_decay if decay is None else decay
        for start, stop, group in self._ranges:
            kernels.lazy_update(
                self.x, self._sum, self._velocity, action.rates[group], momentum, decay,
                action.scale, start, stop,
            )  # fmt: skip
        self._passes += 1

    def _release(self, worker: int) -> None:
        message, bad = self._held.pop(worker)
        push = message.push
        staleness = self.version - push.version
        self.version += 1
        if not bad:
            kernels.merge_buffers(self.floats, message.floats, 1 / push.active)
            kernels.max_counters(self.counts, message.counts)
        self.last_merged[worker] = push.sequence
        self._handled.append(Handled(push, staleness, self.version))
