"""The links of ``sender`` and ``receiver`` within one process, for tests.

Workers and server may be threads, or take turns in one thread: no call waits except those that must
(``fetch``, ``close``, ``wait_change``).  ``arrives`` decides, message by message, whether it has
arrived yet.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Event, Lock
from typing import Any

import numpy as np

from aladdin_mpi.core import kernels
from aladdin_mpi.core.encoding import find
from aladdin_mpi.core.wire import Arrival, Frame, FrameLayout
from aladdin_mpi.messages import (
    ChannelSpec,
    Notice,
    Phase,
    Push,
    Reply,
    Request,
    RequestKind,
    SendTimes,
)

__all__ = ["InProcess"]


class InProcess:
    """A world of ``num_workers`` workers and some servers.

    Parameters
    ----------
    slots : int
        Pushes that a worker may have on its way.
    servers : int
    arrives : callable
        ``arrives(kind, worker) -> bool`` for the message at the head of a queue; ``kind`` is
        ``push``, ``notice`` or ``reply``.
    """

    def __init__(
        self,
        num_workers: int,
        slots: int = 2,
        arrives: Callable[[str, int], bool] = lambda kind, worker: True,
        servers: int = 1,
    ) -> None:
        self.num_workers, self.slots, self.arrives = num_workers, slots, arrives
        self.lock = Lock()
        self.specs: list[tuple[ChannelSpec, Frame, Event]] = []
        self.servers = [_ServerLink(self, index) for index in range(servers)]
        self.workers = [_WorkerLink(self, index) for index in range(num_workers)]

    @property
    def server(self) -> _ServerLink:
        """The first one."""
        return self.servers[0]


class _Incoming:
    def __init__(self, frame: Frame) -> None:
        self.header, self.vector = frame.read_reply(), frame.params
        self.finite = not kernels.count_nonfinite(frame.params)

    def release(self) -> None:
        """The frame was a copy of its own."""


class _WorkerChannel:
    def __init__(
        self, link: _WorkerLink, index: int, server: int, layout: FrameLayout, pushed: FrameLayout
    ) -> None:  # fmt: skip
        self.index, self.layout, self.slots = index, layout, link.world.slots
        self.beyond = int(self.slots > 1)
        self._server = link.world.servers[server]
        self.acknowledged = 0
        self.last_notice: Notice | None = None
        self.send_time_s = 0.0
        self.on_sent: Callable[[SendTimes, Notice], None] = lambda times, notice: None
        self.transit: deque[int] = deque()
        self.frames = [pushed.new_frame() for _ in range(self.slots)]
        self.replies: deque[Frame] = deque()
        self.copies: deque[Frame] = deque()
        self._link, self._handed = link, 0

    def in_flight(self) -> int:
        self._link.deliver()
        return self._handed - self.acknowledged

    def next_frame(self) -> Frame:
        return self.frames[(self._handed + 1) % self.slots]

    @property
    def next_sequence(self) -> int:
        return self._handed + 1

    def submit(self, push: Push) -> None:
        self.next_frame().write_push(push)
        self._handed = push.sequence
        self._link.post(self.transit.append, push.sequence)

    def send_range(self, start: int, stop: int) -> None:
        """The frame is in the memory of both sides."""

    def abandon(self) -> None:
        """Nothing has left."""

    def take_reply(self) -> _Incoming | None:
        self._link.make_calls()
        world = self._link.world
        if self.replies and world.arrives("reply", self._link.worker):
            return _Incoming(self.replies.popleft())
        return None

    def wait_change(self, timeout_s: float) -> None:
        time.sleep(1e-4)

    def fetch(self, lend: bool = False) -> Frame:
        self.ask_copy(lend)
        return self.wait_copy()

    def ask_copy(self, lend: bool = False) -> None:
        self._link.ask(self._server, RequestKind.FETCH, self.index)

    def wait_copy(self) -> Frame:
        while not self.copies:
            time.sleep(1e-4)
        return self.copies.popleft()


class _WorkerLink:
    def __init__(self, world: InProcess, worker: int) -> None:
        self.world, self.worker = world, worker
        self.notice = Notice(0, 0, 0, 0, 0, 0, world.num_workers, 0)
        self.notices: list[deque[Notice]] = [deque() for _ in world.servers]
        self.phase_since = time.monotonic()
        self.phase, self.steps, self.own_samples = Phase.START, 0, 0
        self.channels: list[_WorkerChannel] = []
        self._posted: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()

    def ask(
        self, server: _ServerLink, kind: RequestKind, channel: int = 0,
        values: tuple[float, ...] = (),
    ) -> None:  # fmt: skip
        request = Request(kind, self.worker, self.phase, 0.0, self.steps, channel, values)
        server.asked.append(request)

    def tell(self, kind: RequestKind, values: tuple[float, ...] = ()) -> None:
        self.ask(self.world.server, kind, values=values)

    def post(self, call: Callable[..., Any], *args: Any) -> None:
        self._posted.append((call, args))
        self.make_calls()

    def wait_posted(self) -> None:
        while self._posted:
            self.make_calls()

    def make_calls(self) -> None:
        """Make the calls that were posted, up to one that is too early."""
        while self._posted:
            call, args = self._posted.popleft()
            if call(*args) is False:
                self._posted.appendleft((call, args))
                return

    def exchange(self, mine: bytes) -> list[bytes]:
        raise NotImplementedError("threads in one process have nothing to agree on")

    def deliver(self) -> None:
        """Take in the notices that have arrived, and make the calls that were too early."""
        self.make_calls()
        for server, notices in enumerate(self.notices):
            while notices and self.world.arrives("notice", self.worker):
                notice = notices.popleft()
                if server == 0:
                    self.notice = notice
                if notice.sequence:
                    channel = self.channels[notice.channel]
                    channel.acknowledged, channel.last_notice = notice.sequence, notice
                    times = SendTimes(0.0, 0.0, 0.0, 0.0, channel.layout.frame_bytes)
                    channel.on_sent(times, notice)

    def open_channel(
        self, spec: ChannelSpec, initial: Callable[[Frame], None], server: int = 0
    ) -> tuple[_WorkerChannel, Frame]:
        layout = FrameLayout(spec.size, spec.floats, spec.counts)
        pushed = replace(layout, encoding=find(spec.wire))
        index = len(self.channels)
        channel = _WorkerChannel(self, index, server, layout, pushed)
        self.channels.append(channel)
        with self.world.lock:
            if len(self.world.specs) == index:
                self.world.specs.append((spec, layout.new_frame(), Event()))
        _, first, filled = self.world.specs[index]
        if self.worker == 0:
            initial(first)
            filled.set()
        filled.wait()
        self.ask(self.world.servers[server], RequestKind.REGISTER, index)
        return channel, first

    def close(self, at_end: Callable[[], None]) -> list[Frame]:
        for server in self.world.servers:
            self.ask(server, RequestKind.BYE)
        return [channel.wait_copy() for channel in self.channels]


class _ServerChannel:
    def __init__(self, world: InProcess, index: int) -> None:
        self.world, self.index, self.slots = world, index, world.slots
        self.spec, first, _ = world.specs[index]
        self.layout = FrameLayout(self.spec.size, self.spec.floats, self.spec.counts)
        self.push_layout = replace(self.layout, encoding=find(self.spec.wire))
        self.sender_of, self.relayed = range(world.num_workers), 0
        self.initial = self.layout.new_frame()
        np.copyto(self.initial.raw, first.raw)

    def _ends(self) -> list[_WorkerChannel]:
        return [link.channels[self.index] for link in self.world.workers]

    def arrivals(self) -> list[Arrival]:
        found = []
        for worker, end in enumerate(self._ends()):
            while end.transit and self.world.arrives("push", worker):
                sequence = end.transit.popleft()
                frame = end.frames[sequence % end.slots]
                assert frame.intact(sequence)
                found.append(Arrival(worker, sequence, frame))
        return found

    def reply_frame(self, worker: int) -> Frame | None:
        self._reply = self.layout.new_frame()
        return None if self._ends()[worker].replies else self._reply

    def copy_frame(self, worker: int) -> Frame:
        self._copy = self.layout.new_frame()
        return self._copy

    def send_replies(self, sender: int, replies: Sequence[tuple[int, Reply]]) -> None:
        ((worker, reply),) = replies
        self._reply.write_reply(reply)
        self._ends()[worker].replies.append(self._reply)

    def send_copy(self, worker: int, reply: Reply) -> None:
        self._copy.write_reply(reply)
        self._ends()[worker].copies.append(self._copy)

    def send_to_all(self, frame: Frame, reply: Reply) -> None:
        frame.write_reply(reply)
        for end in self._ends():
            end.copies.append(frame)

    def reply_done(self, worker: int) -> bool:
        return not self._ends()[worker].replies


class _ServerLink:
    def __init__(self, world: InProcess, index: int) -> None:
        self.world, self.index = world, index
        self.opened: set[int] = set()
        self.asked: deque[Request] = deque()

    def progress(self) -> bool:
        return True

    def requests(self) -> list[Request]:
        waiting = self.asked
        found = [waiting.popleft() for _ in range(len(waiting))]
        early = [r for r in found if r.kind is RequestKind.FETCH and r.channel not in self.opened]
        waiting.extend(early)  # over MPI nobody asks before the channel is open
        return [request for request in found if request not in early]

    def notify(self, worker: int, notice: Notice) -> None:
        self.world.workers[worker].notices[self.index].append(notice)

    def notify_relay(self, relay: int, notice: Notice) -> None:
        raise NotImplementedError("threads in one process have no relays")

    def may_beat(self, worker: int) -> bool:
        return not self.world.workers[worker].notices[self.index]

    def open_channel(self, index: int) -> _ServerChannel:
        self.opened.add(index)
        return _ServerChannel(self.world, index)

    def close(self) -> None:
        """Nothing is under way."""
