"""What algorithms call, in virtual time: a worker's port towards the servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np

from aladdin_mpi.algorithms.base import Server
from aladdin_mpi.core import kernels
from aladdin_mpi.core.flat import FlatBuffers, FlatParams
from aladdin_mpi.core.port import Incoming
from aladdin_mpi.messages import Push, Reply, Send
from aladdin_mpi.simulation.events import Events
from aladdin_mpi.simulation.globals import GlobalParameters, Handled, Message, SgdOptions
from aladdin_mpi.simulation.links import ServerLanes, WorkerLane
from aladdin_mpi.simulation.outcome import Tally
from aladdin_mpi.simulation.served import SendTimes
from aladdin_mpi.simulation.setting import Setting
from aladdin_mpi.simulation.turns import NeverWaits, Process

__all__ = ["ServedWorld", "VirtualPort"]


class _Arrived:
    """A reply that has arrived."""

    def __init__(self, header: Reply, vector: np.ndarray) -> None:
        self.header, self.vector = header, vector
        self.finite = not kernels.count_nonfinite(vector)

    def release(self) -> None:
        """The vector is the reader's own."""


class ServedWorld:
    """The servers, as one that has all parameters and a part of the payload (see
    :class:`~aladdin_mpi.simulation.links.ServerLanes`), and the workers' ports.
    """

    def __init__(self, setting: Setting, tally: Tally, lanes: ServerLanes | None = None) -> None:
        self.setting, self.tally = setting, tally
        self.lanes = ServerLanes(Events(), setting) if lanes is None else lanes
        self.events = self.lanes.events
        self.ports: list[VirtualPort] = []
        self.active = setting.num_workers
        self._numbers = [0] * setting.num_workers
        self._replying: set[int] = set()
        self._owed: dict[int, Send] = {}
        self.model: GlobalParameters

    @property
    def carried_bytes(self) -> tuple[float, float]:
        """[B] that a server's links have carried, in and out."""
        return self.lanes.inward.carried_bytes, self.lanes.outward.carried_bytes

    def open(
        self, rules: Server, params: FlatParams, buffers: FlatBuffers, sgd: SgdOptions
    ) -> None:
        """Start from a worker's parameters."""
        self.model = GlobalParameters(rules, params, buffers, self.setting.num_workers, sgd)

    def found(self, message: Message, handed_s: float) -> None:
        """The server finds a push: merges it, or does what else the algorithm wants, and answers
        when that is done.
        """
        self.ports[message.push.worker].handed_s[message.push.sequence] = handed_s
        handled, sends, passes = self.model.handle(message)
        for one in handled:
            self.tally.merged(one.staleness)
            self.active -= one.push.last
        if handled or sends:
            self.lanes.work(passes, partial(self._answer, handled, sends))

    def _answer(self, handled: list[Handled], sends: list[Send]) -> None:
        for send in sends:
            self._owed[send.worker] = send
        self._reply()
        setting = self.setting
        known_s = self.events.now + setting.latency_s + setting.overhead_s / 2
        for one in handled:
            port = self.ports[one.push.worker]
            self.events.at(known_s, port.acknowledge, one.push.sequence, self.active)

    def _reply(self) -> None:
        """Send the replies whose workers have none on its way, with x̃ as it is now."""
        model = self.model
        for worker, send in list(self._owed.items()):
            if worker in self._replying:
                continue
            del self._owed[worker]
            self._replying.add(worker)
            self._numbers[worker] += 1
            header = Reply(
                self._numbers[worker], model.version, model.last_merged[worker], send.alpha,
                send.clock,
            )  # fmt: skip
            self.lanes.reply(self._replied, worker, _Arrived(header, model.x.copy()))

    def _replied(self, worker: int, reply: _Arrived) -> None:
        self._replying.discard(worker)
        self._reply()
        self.ports[worker].receive(reply)

    def copy_for(self, worker: int) -> None:
        """A worker has asked for a copy."""
        header = Reply(0, self.model.version, self.model.last_merged[worker], 1.0)
        self.lanes.reply(self.ports[worker].receive_copy, _Arrived(header, self.model.x.copy()))


class VirtualPort:
    """A worker's :class:`~aladdin_mpi.core.port.Port`.

    Parameters
    ----------
    world : ServedWorld
    worker : int
    rates : callable
        The learning rate of each parameter group.

    Attributes
    ----------
    process : Process
        What waits where the algorithm does.
    sends : SendTimes
    samples : int
        Not pushed yet.
    others, may_push : callable
        As of the real port: called before it waits; whether it is this range's turn.
    """

    process: Process | NeverWaits

    def __init__(
        self, world: ServedWorld, worker: int, params: FlatParams, buffers: FlatBuffers,
        rates: Callable[[], tuple[float, ...]],
    ) -> None:  # fmt: skip
        self.worker, self.num_workers = worker, world.setting.num_workers
        self.slots = world.setting.slots
        self.beyond = int(self.slots > 1)
        self.sends = SendTimes()
        self.samples = self.made = self.lost_count = 0
        self.handed_s: dict[int, float] = {}
        self._world, self._params, self._buffers, self._rates = world, params, buffers, rates
        self.others: Callable[[], None] = lambda: None
        self.may_push: Callable[[], bool] = lambda: True
        self._lane = WorkerLane(world.lanes)
        self._handed = self._acknowledged = 0
        self._active = self._known_active = self.num_workers
        self._version = 0
        self._replies: deque[_Arrived] = deque()
        self._copy: _Arrived | None = None
        world.ports.append(self)

    # -- what the training does -------------------------------------------------------------------

    def computed(self, took_s: float, samples: int, iteration: int) -> None:
        """The gradients of an iteration are there."""
        self.samples += samples
        self.made = iteration + 1

    def stepped(self, took_s: float) -> None:
        """A step has ended."""
        self.sends.stepped(took_s)

    # -- what the servers do ----------------------------------------------------------------------

    def acknowledge(self, sequence: int, active: int) -> None:
        """A push was merged."""
        self._acknowledged = max(self._acknowledged, sequence)
        self._known_active = active
        self.sends.sent(self._world.events.now - self.handed_s.pop(sequence))
        self.process.wake()

    def receive(self, reply: _Arrived) -> None:
        """A reply has come."""
        self._replies.append(reply)
        self.process.wake()

    def receive_copy(self, copy: _Arrived) -> None:
        """A copy has come."""
        self._copy = copy
        self.process.wake()

    # -- what the algorithm calls -----------------------------------------------------------------

    def try_push(
        self, write: Callable[[np.ndarray], bool], iterations: int, *, limit: int, **header: object
    ) -> int:
        if self.in_flight >= min(limit, self.slots):
            return 0
        staging = self._params.new_vector()
        if not write(staging):
            return -1
        self._buffers.gather()
        header.setdefault("version", self._version)
        self._handed += 1
        push = Push(
            self.worker, self._handed, iterations, self.samples, rates=self._rates(),
            iteration_s=self.sends.step_s, active=self._active, made=self.made,
            **header,  # type: ignore[arg-type]
        )  # fmt: skip
        self._active, self.samples = self._known_active, 0
        if iterations:
            self._world.tally.push(iterations)
        message = Message(push, staging, self._buffers.floats.copy(), self._buffers.counts.copy())
        self._lane.push(0.0, partial(self._world.found, message, self._world.events.now))
        return self._handed

    @property
    def in_flight(self) -> int:
        """Pushes on their way."""
        return self._handed - self._acknowledged

    def early_frame(self) -> np.ndarray | None:
        """Nothing is sent ahead of a push."""
        return None

    def send_range(self, start: int, stop: int) -> None:
        """Is never called: there is no early frame."""

    def abandon(self) -> None:
        """Nothing was sent ahead."""

    def post(self, call: Callable[..., None], *args: object) -> None:
        call(*args)

    def wait_posted(self) -> None:
        """Every call has been made."""

    def subtract(self, staging: np.ndarray, r: np.ndarray) -> None:
        kernels.take_difference(staging, r)

    def wait_push(self, limit: int) -> None:
        self.process.wait_until(lambda: self.in_flight < min(limit, self.slots))

    def settle(self) -> None:
        """Wait until everything that was pushed has been merged."""
        self.wait_push(1)

    def take_reply(self) -> Incoming | None:
        return self._replies.popleft() if self._replies else None

    def wait_reply(self) -> Incoming:
        self.others()
        self.process.wait_until(lambda: bool(self._replies))
        return self._replies.popleft()

    def fetch(self) -> np.ndarray:
        world, setting = self._world, self._world.setting
        self._copy = None
        asked_s = world.events.now + setting.latency_s + setting.overhead_s / 2
        world.events.at(asked_s, world.copy_for, self.worker)
        self.process.wait_until(lambda: self._copy is not None)
        assert self._copy is not None
        self._version = self._copy.header.version
        return self._copy.vector

    def push_limit(self, in_flight: str) -> int:
        if in_flight == "auto" and not self.may_push():
            return 0
        return self.sends.limit(in_flight, self.slots)

    def span(self, column: str) -> AbstractContextManager[None]:
        return nullcontext()

    def lost(self, kind: str) -> int:
        self.lost_count += 1
        return 0

    def mixed(self, reply: Reply, lag_iterations: int, *, discarded: bool) -> None:
        self._world.tally.mix(lag_iterations)
