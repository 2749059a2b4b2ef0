"""The global model of one channel at a server: it obeys the algorithm's instructions.

Updates that are merged one after the other go through memory in one pass.  Every pass is cut into
pieces of about a millisecond, with ``between()`` called in between, so that MPI makes progress
meanwhile.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from aladdin_mpi.algorithms.base import Server
from aladdin_mpi.core import kernels
from aladdin_mpi.core.encoding import PLAIN, Dgc, Encoding, find
from aladdin_mpi.core.pairwise import add_pairwise
from aladdin_mpi.core.vector import aligned_zeros
from aladdin_mpi.core.wire import Frame, FrameLayout
from aladdin_mpi.errors import CheckpointError
from aladdin_mpi.messages import (
    Action,
    Apply,
    ChannelSpec,
    Hold,
    Merge,
    MergeHeld,
    Push,
    Send,
)

__all__ = ["PIECE", "GlobalModel", "Handled", "Pass"]

PIECE = 1 << 20
"""Elements of a pass between two polls: 4 MiB of each vector, about a millisecond."""


class Pass(NamedTuple):
    """One pass over the global vector: how many pushes it merged, [s], payload [bytes], and how
    many messages they came in.
    """

    merged: int
    merge_s: float
    nbytes: int
    version: int
    messages: int


class Handled(NamedTuple):
    """One push after its merge; ``frees`` is the relay's message, by relay and sequence, whose slot
    is needed no longer now.
    """

    push: Push
    staleness: int
    version: int
    nonfinite: bool
    frees: tuple[int, int] | None = None


@dataclass
class _Message:
    """A frame: the payload of one push, or of several that a relay has merged."""

    frame: Frame
    waiting: int  # pushes of it whose slot is still needed
    good: int  # pushes whose payload is in the sum
    merged: bool = False
    buffered: bool = False  # its buffers are merged


class _Held(NamedTuple):
    """A push whose slot is still needed."""

    message: _Message
    push: Push
    bad: bool


@dataclass
class _Turn:
    """What comes of the pushes handled together; ``waiting`` are messages and weights of one
    target.
    """

    handled: list[Handled] = field(default_factory=list)
    sends: dict[int, Send] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    waiting: list[tuple[_Message, float]] = field(default_factory=list)
    target: str = "global"


class GlobalModel:
    """x̃, its buffers and what the algorithm accumulates.

    Parameters
    ----------
    spec : ChannelSpec
    initial : Frame
        Where everybody starts from; becomes the global model's own memory.
    rules : Server
        The algorithm's decisions.
    between : callable
        Drives MPI; called between the pieces of a pass.

    Attributes
    ----------
    version : int
        Pushes merged so far.
    last_merged : list of int
        Each worker's last push that x̃ contains.
    """

    def __init__(
        self,
        spec: ChannelSpec,
        initial: Frame,
        rules: Server,
        num_workers: int,
        between: Callable[[], object],
    ) -> None:
        self.frame, self.rules, self.version = initial, rules, 0
        self.last_merged = [0] * num_workers
        self._held: dict[int, _Held] = {}
        self._spec, self._encoding = spec, find(spec.wire)
        self._num_rates = 1 + max(group for _, _, group in spec.ranges)
        self._between = between
        self._sum: np.ndarray | None = None
        self._velocity: np.ndarray | None = None

    def read(self, frame: Frame) -> list[Push]:
        """The pushes of a frame: one, or those that a relay has merged."""
        return frame.read_pushes(self._num_rates)

    def copy(self) -> GlobalModel:
        """A model of its own with the same values, of whose pushes none is held."""
        other = GlobalModel(
            self._spec, FrameLayout(*self._spec[3:6]).new_frame(), copy.deepcopy(self.rules),
            len(self.last_merged), self._between,
        )  # fmt: skip
        self.copy_to(other.frame)
        other.version, other.last_merged = self.version, list(self.last_merged)
        if self._sum is not None:
            for mine, its in zip(self._accumulator(), other._accumulator(), strict=True):
                for a, b in self._pieces():
                    kernels.copy(its, mine, a, b)
                    self._between()
        return other

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: parameters, buffers, version, accumulators, the algorithm's."""
        return {
            "params": self.frame.params, "floats": self.frame.floats, "counts": self.frame.counts,
            "version": self.version, "sum": self._sum, "velocity": self._velocity,
            "rules": self.rules.state_dict(),
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`; ``rules`` is left out where it was made for other workers.

        Raises
        ------
        CheckpointError
            It is another model's.
        """
        if [len(state[part]) for part in ("params", "floats", "counts")] != list(self._spec[3:6]):
            raise CheckpointError(
                "--resume: the checkpoint was made with another model, --max-shard-bytes or "
                "--shard-by"
            )
        np.copyto(self.frame.params, state["params"])
        np.copyto(self.frame.floats, state["floats"])
        np.copyto(self.frame.counts, state["counts"])
        self.version = state["version"]
        if state["sum"] is not None:
            total, velocity = self._accumulator()
            np.copyto(total, state["sum"])
            np.copyto(velocity, state["velocity"])
        if "rules" in state:
            self.rules.load_state_dict(state["rules"])

    def handle(self, frames: Sequence[Frame]) -> tuple[list[Handled], dict[int, Send], list[Pass]]:
        """Merge pushes in the order given, or as the algorithm says.

        Returns
        -------
        handled : list of Handled
            Those that need their slot no longer.
        sends : dict
            By worker, the replies to make now that all of them are merged.
        passes : list of Pass
        """
        turn = _Turn()
        for frame in frames:
            pushes = self.read(frame)
            broken = frame.nonfinite > 0
            message = _Message(frame, len(pushes), sum(not push.left_out for push in pushes))
            applies: list[Apply] = []
            for push in pushes:
                held = _Held(message, push, broken or push.left_out)
                self._held[push.worker] = held
                actions = self.rules.on_push(push)
                found = self._obey(turn, actions, push.worker)
                if Hold() not in actions and self._held.get(push.worker) is held:
                    self._release(turn, push.worker)
                if push.last:
                    found += self._obey(turn, self.rules.on_leave(push.worker), -1)
                applies = found or applies
            for action in applies:
                self._flush(turn)
                self._apply(action)
        self._flush(turn)
        return turn.handled, turn.sends, turn.passes

    def _obey(self, turn: _Turn, actions: Sequence[Action], worker: int) -> list[Apply]:
        """Do what the actions say, or note it; returns those that follow on the merges."""
        applies = []
        for action in actions:
            if isinstance(action, Send):
                turn.sends[action.worker] = action
            elif isinstance(action, Apply):
                applies.append(action)
            elif isinstance(action, MergeHeld):
                self._flush(turn)
                self._merge_held(turn, action)
            elif isinstance(action, Merge):
                held = self._held[worker]
                if action.target != turn.target:
                    self._flush(turn)
                    turn.target = action.target
                if not (held.bad or held.message.merged):
                    held.message.merged = True
                    turn.waiting.append((held.message, action.weight))
        return applies

    def _merge_held(self, turn: _Turn, action: MergeHeld) -> None:
        numbers, messages = [], []
        for worker in action.workers:
            held = self._held[worker]
            if not (held.bad or held.message.merged):
                held.message.merged = True
                numbers.append(worker)
                messages.append(held.message)
        if messages:
            turn.passes.append(self._merge(action.target, messages, [1.0] * len(messages), numbers))
        for worker in action.workers:
            self._release(turn, worker)

    def _release(self, turn: _Turn, worker: int) -> None:
        """A push is done with, apart from the pass over its payload."""
        message, push, bad = self._held.pop(worker)
        frame = message.frame
        staleness = self.version - push.version
        self.version += 1
        if not bad and not message.buffered:  # a relay's buffers are the mean of its workers'
            message.buffered = True
            weight = min(1.0, message.good / push.active)
            kernels.merge_buffers(self.frame.floats, frame.floats, weight)
            kernels.max_counters(self.frame.counts, frame.counts)
        self.last_merged[worker] = push.sequence
        message.waiting -= 1
        frees = None
        if not message.waiting and frame.header["parts"][0]:
            frees = int(frame.header["worker"][0]), int(frame.header["sequence"][0])
        turn.handled.append(Handled(push, staleness, self.version, bad, frees))

    def _flush(self, turn: _Turn) -> None:
        if turn.waiting:
            messages, weights = zip(*turn.waiting, strict=True)
            turn.passes.append(self._merge(turn.target, messages, weights))
            turn.waiting.clear()

    def copy_to(self, frame: Frame) -> float:
        """Copy parameters and buffers into a frame; returns [s]."""
        start = time.monotonic()
        for a, b in self._pieces():
            kernels.copy(frame.params, self.frame.params, a, b)
        np.copyto(frame.floats, self.frame.floats)
        np.copyto(frame.counts, self.frame.counts)
        return time.monotonic() - start

    def _pieces(self, encoding: Encoding = PLAIN) -> list[tuple[int, int]]:
        size = encoding.items(self.frame.params.size)
        found = []
        for a in range(0, size, PIECE):
            found.append((a, min(a + PIECE, size)))
        return found

    def _accumulator(self) -> tuple[np.ndarray, np.ndarray]:
        if self._sum is None or self._velocity is None:
            size = self.frame.params.size
            self._sum, self._velocity = aligned_zeros(size), aligned_zeros(size)
        return self._sum, self._velocity

    def _merge(
        self, target: str, messages: Sequence[_Message], weights: Sequence[float],
        pairwise: Sequence[int] = (),
    ) -> Pass:  # fmt: skip
        """``pairwise`` are the workers whose order the sum of plain payloads keeps to."""
        start = time.monotonic()
        into = self.frame.params if target == "global" else self._accumulator()[0]
        payloads = [message.frame.payload for message in messages]
        if pairwise and self._encoding == PLAIN:
            add_pairwise(into, pairwise, payloads, self._between, PIECE)
        else:
            for a, b in self._pieces(self._encoding):
                self._encoding.merge(into, payloads, weights, a, b)
                self._between()
        took = time.monotonic() - start
        nbytes = sum(b - a for payload in payloads for a, b in self._encoding.used(payload))
        return Pass(
            sum(message.good for message in messages), took, nbytes, self.version, len(messages)
        )  # fmt: skip

    def _apply(self, action: Apply) -> None:
        total, velocity = self._accumulator()
        momentum, decay = action.momentum, action.weight_decay
        momentum = self._spec.momentum if momentum is None else momentum
        decay = self._spec.weight_decay if decay is None else decay
        if isinstance(self._encoding, Dgc):  # the workers have done it: see core/dgc.py
            momentum, decay = 0.0, decay / (1 - momentum)
        for start, stop, group in self._spec.ranges:
            for a in range(start, stop, PIECE):
                kernels.lazy_update(
                    self.frame.params, total, velocity, action.rates[group], momentum, decay,
                    action.scale, a, min(a + PIECE, stop),
                )  # fmt: skip
                self._between()
