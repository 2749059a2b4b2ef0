"""A worker's link to the servers: pushes through the mailbox, replies by posted receives."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from aladdin_mpi.comm.channel import Opening, agree, broadcast, tags
from aladdin_mpi.comm.control import NOTICE, TAG_NOTICE, SmallReceiver, unpack_notice
from aladdin_mpi.comm.mailbox import Outbox, pieces
from aladdin_mpi.comm.routes import Routes
from aladdin_mpi.comm.thread import BUSY_S, IDLE_S, WAITING_S, CommThread
from aladdin_mpi.core import kernels
from aladdin_mpi.core.wire import Frame
from aladdin_mpi.messages import (
    FRAME_HEADER_BYTES,
    ChannelSpec,
    Notice,
    Push,
    Reply,
    RequestKind,
    SendTimes,
)

__all__ = ["WorkerChannel", "WorkerLink"]

SLOW_BYTES_PER_S = 1e8
"""A link on which a transfer gets less than that need not be driven more often than every ms: what
it carries meanwhile fits into any socket's buffer.
"""


class Received:
    """Parameters that have arrived (the port's ``Incoming``)."""

    def __init__(self, frame: Frame, worker: int, give_back: Callable[[Frame], None]) -> None:
        self._frame, self._give_back = frame, give_back
        self.header: Reply = frame.read_reply(worker)
        self.vector: np.ndarray = frame.params
        self.finite = not kernels.count_nonfinite(frame.params)

    def release(self) -> None:
        self._give_back(self._frame)


class WorkerChannel:
    """One optimizer's pushes and replies; the training thread's side.

    Attributes
    ----------
    slots : int
        Pushes that may be on their way at once.
    beyond : int
        How many pushes after the one that asked for it a reply may contain: one that is merged
        together with that; with a relay any number, while the reply waits for that to others.
    acknowledged : int
        The last push that the server has merged.
    last_notice : Notice or None
        Its acknowledgement.
    send_time_s : float
        [s] from handing over to acknowledgement, running mean.
    on_sent : callable
        ``on_sent(times, notice)`` for every acknowledged push, on the communication thread.
    """

    def __init__(self, link: WorkerLink, index: int, server: int, opening: Opening) -> None:
        self.index, self.server = index, server
        self.slots, self.layout = opening.slots, opening.layout
        relayed = opening.node != MPI.COMM_NULL
        self.beyond = sys.maxsize if relayed else int(self.slots > 1)
        self._push_layout = opening.node_layout if relayed else opening.push_layout
        self._reply_layout, self._from = opening.reply_layout, link.relay if relayed else server
        self.acknowledged = 0
        self.last_notice: Notice | None = None
        self.send_time_s = 0.0
        self.on_sent: Callable[[SendTimes, Notice], None] = lambda times, notice: None
        self.changed = threading.Event()
        self._link = link
        self._opening = opening
        self._handed = 0
        self._sending = 0  # the push whose frame is whole, 0: none
        self._frames = [self._push_layout.new_frame() for _ in range(self.slots)]
        self._queued_at = [0.0] * self.slots
        self._times = [[0.0, 0.0] for _ in range(self.slots)]  # put began, published
        self._nbytes = [self._push_layout.frame_bytes] * self.slots
        self._waiting: deque[tuple[int, int]] = deque()
        self._early: int | None = None  # where the elements begin that were sent early
        self._ready: deque[Received] = deque()
        self._spare = deque(self._reply_layout.new_frame() for _ in range(self.slots))
        self._receiving: tuple[Frame, list[MPI.Request]] | None = None
        self._fetching: tuple[Frame, list[MPI.Request]] | None = None
        self._asked_s = 0.0
        self._fetched: Frame | None = None
        self._ending = False
        self._copy: Frame | None = None
        way = opening.node if relayed else opening.up
        self._box = Outbox(way, 0, way.rank - 1, self._push_layout, opening.slots)

    # -- training thread --------------------------------------------------------------------------

    def in_flight(self) -> int:
        """Pushes handed over and not acknowledged yet."""
        return self._handed - self.acknowledged

    def next_frame(self) -> Frame:
        """The staging frame of the next push; only while ``in_flight() < slots``."""
        return self._frames[(self._handed + 1) % self.slots]

    @property
    def next_sequence(self) -> int:
        return self._handed + 1

    def submit(self, push: Push) -> None:
        """Hand the next frame over: its parts are filled, ``push`` becomes its header."""
        frame = self.next_frame()
        frame.write_push(push)
        self._queued_at[push.sequence % self.slots] = time.monotonic()
        self._handed = push.sequence
        first = self.layout.size if self._early is None else self._early
        self._early = None
        self._link.post(self._waiting.append, (push.sequence, first))

    def send_range(self, start: int, stop: int) -> None:
        """Send elements of the next frame's parameters ahead of it; nothing else is on its way.

        The first range reaches to the end of the vector, each later one to the one before it.
        """
        if self._early is None:
            self._link.post(self._box.begin, self.next_frame().raw, self.next_sequence)
        self._early = start
        self._link.post(
            self._box.put, FRAME_HEADER_BYTES + 4 * start, FRAME_HEADER_BYTES + 4 * stop
        )

    def abandon(self) -> None:
        """What was sent ahead is to be sent anew, or not at all."""
        if self._early is not None:
            self._early = None
            self._link.post(self._box.abandon)

    def take_reply(self) -> Received | None:
        """The oldest reply that was not taken yet."""
        return self._ready.popleft() if self._ready else None

    def wait_change(self, timeout_s: float) -> None:
        """Wait until something was acknowledged or has arrived since the last call."""
        self.changed.wait(timeout_s)
        self.changed.clear()

    def fetch(self, lend: bool = False) -> Frame:
        """The server's current parameters and buffers, until the next call; waits for them."""
        self.ask_copy(lend)
        return self.wait_copy()

    def ask_copy(self, lend: bool = False) -> None:
        """Ask for the server's current parameters and buffers; :meth:`wait_copy` has them.

        With ``lend`` they may come into the frame of the next push, where memory is scarce: they
        are there until that is made.  It then waits for the last one.
        """
        while lend and self.slots == 1 and self.in_flight():
            self.wait_change(1.0)
        self._link.post(self._ask_copy, lend)

    def wait_copy(self) -> Frame:
        """Wait for a copy that is on its way."""
        while self._fetched is None:
            self.wait_change(1.0)
        frame, self._fetched = self._fetched, None
        return frame

    # -- communication thread ---------------------------------------------------------------------

    def _receive(self, frame: Frame, source: int, tag: int) -> tuple[Frame, list[MPI.Request]]:
        return frame, [
            self._link.comm.Irecv((frame.raw[a:b], b - a, MPI.BYTE), source, tag)
            for a, b in pieces(frame.raw.size)
        ]

    def _ask_copy(self, lend: bool) -> None:
        self.expect_copy(lend)
        self._link.send_to(self.server, RequestKind.FETCH, self.index)

    def expect_copy(self, lend: bool) -> None:
        """Post the receive of a copy."""
        if lend and self.slots == 1 and self._push_layout == self.layout:
            frame = self._frames[0]
        else:
            if self._copy is None:
                self._copy = self.layout.new_frame()
            frame = self._copy
        self._fetching = self._receive(frame, self.server, tags(self.index)[1])
        self._asked_s = time.monotonic()

    def expect_final(self) -> None:
        """Post the receive of the final parameters, after which nothing else is taken."""
        self._ending = True
        self.expect_copy(lend=True)

    def awaited(self) -> list[MPI.Request]:
        """What is under way."""
        receives = [one[1] for one in (self._receiving, self._fetching) if one is not None]
        return sum(receives, self._box.requests)

    def progress(self, done: bool) -> None:
        """Move sends and receives on; ``done``: something that was under way may have ended."""
        if self._waiting and not (self._box.busy and self._sending):
            sequence, first = self._waiting.popleft()
            self._times[sequence % self.slots][0] = time.monotonic()
            frame = self._frames[sequence % self.slots]
            if self._box.busy:  # ranges of it have been sent ahead
                self._box.put(0, FRAME_HEADER_BYTES + 4 * first)
                self._box.put(self._push_layout.floats_at, self._push_layout.frame_bytes)
                self._box.finish()
            else:
                self._nbytes[sequence % self.slots] = self._box.start(
                    frame.raw, sequence, frame.stretches()
                )
            self._sending = sequence
            done = True
        if done and self._box.busy and self._box.advance():
            self._times[self._sending % self.slots][1] = time.monotonic()
            self._sending = 0
        # while the training thread waits for a copy, a reply may not wait for the training thread
        if self._receiving is None and (self._spare or self._fetching or self._ending):
            frame = self._spare.popleft() if self._spare else self._reply_layout.new_frame()
            self._receiving = self._receive(frame, self._from, tags(self.index)[0])
            done = True
        if done and self._receiving is not None and MPI.Request.Testall(self._receiving[1]):
            incoming = Received(self._receiving[0], self._link.worker, self._spare.append)
            self._receiving = None
            self._ready.append(incoming)
            self.changed.set()
        if done and self._fetching is not None and MPI.Request.Testall(self._fetching[1]):
            self._fetched, self._fetching = self._fetching[0], None
            self.changed.set()

    def insist(self) -> None:
        """See that the server hears of the oldest push."""
        self._box.insist(self.acknowledged)

    def acknowledge(self, notice: Notice) -> SendTimes:
        """The server has merged push ``notice.sequence``."""
        now = time.monotonic()
        at = notice.sequence % self.slots
        queued, (began, published) = self._queued_at[at], self._times[at]
        took = now - queued
        self.send_time_s += (took - self.send_time_s) * (0.2 if self.acknowledged else 1.0)
        self.last_notice = notice
        self.acknowledged = notice.sequence
        self.changed.set()
        return SendTimes(
            queued, began - queued, published - began, now - published, self._nbytes[at]
        )  # fmt: skip

    @property
    def delay_s(self) -> float:
        """[s] how long the communication thread may sleep: a part of what is awaited, so that it is
        prompt on a fast link and cheap on a slow one.
        """
        waits = []
        if self._box.busy:
            slow = self._push_layout.frame_bytes < SLOW_BYTES_PER_S * self.send_time_s
            waits.append(WAITING_S if slow else BUSY_S)
        elif self.in_flight():
            waits.append(self.send_time_s / 5)
        if self._fetching:
            waits.append((time.monotonic() - self._asked_s) / 20)
        return min(max(min(waits), BUSY_S), WAITING_S) if waits else IDLE_S

    def close(self) -> None:
        """Collective; everything has been received."""
        if self._receiving is not None:
            for request in self._receiving[1]:
                request.Cancel()
                request.Wait()
        self._box.free()
        self._opening.free()


class WorkerLink(CommThread):
    """All that a worker exchanges with the servers.

    Parameters
    ----------
    comm : MPI.Intracomm
        Servers and workers; a communicator of the link's own.
    servers : sequence of int
        The servers' ranks; the first one's word is :attr:`notice`.
    groups : sequence of MPI.Intracomm
        For each server, it and the workers, it as rank 0.
    worker : int
        This worker's index.
    on_failure : callable
        Called with an exception that ended the communication thread; must end the job.
    among_workers : MPI.Intracomm
        The workers alone.
    routes : Routes
    relay : int
        Rank of this worker's relay; −1: it has none.

    Attributes
    ----------
    notice : Notice
        The first server's last word.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        servers: Sequence[int],
        groups: Sequence[MPI.Intracomm],
        worker: int,
        num_workers: int,
        on_failure: Callable[[BaseException], None],
        among_workers: MPI.Intracomm,
        routes: Routes,
        relay: int = -1,
    ) -> None:
        super().__init__(comm, servers, worker, num_workers, on_failure, among_workers)
        self.servers, self._groups, self._routes, self.relay = servers, groups, routes, relay
        self._handed_on = False
        self.channels: list[WorkerChannel] = []
        self._notices = [
            SmallReceiver(comm, TAG_NOTICE, NOTICE, [server], unpack_notice) for server in servers
        ]
        self._thread.start()

    # -- any thread -------------------------------------------------------------------------------

    def open_channel(
        self, spec: ChannelSpec, initial: Callable[[Frame], None], server: int = 0
    ) -> tuple[WorkerChannel, Frame]:
        """Open the next channel, to one of the servers; collective over it and all workers.

        ``initial`` fills a frame with this worker's values; the frame that is returned holds
        worker 0's, which all start from.
        """

        def open_() -> tuple[WorkerChannel, Frame]:
            index = len(self.channels)
            self.send_to(self.servers[server], RequestKind.REGISTER, index)
            if self.relay >= 0:
                self.send_to(self.relay, RequestKind.REGISTER, index, (float(server),))
            opening = agree(self._groups[server], 0, spec, self._routes)
            channel = WorkerChannel(self, index, self.servers[server], opening)
            frame = opening.layout.new_frame()
            initial(frame)
            broadcast(opening, frame, 1)
            self.channels.append(channel)
            return channel, frame

        return self.ask(open_)

    def tell(self, kind: RequestKind, values: tuple[float, ...] = ()) -> None:
        """Send a small message to the first server, which leads; does not wait."""
        self.post(self.send_to, self.servers[0], kind, 0, values)

    def close(self, at_end: Callable[[], None]) -> list[Frame]:
        """Say goodbye, wait for everybody, and free all; collective.

        Every channel's last push has been acknowledged.  ``at_end`` runs on the communication
        thread when all have ended.  Returns the final parameters of each channel.
        """

        def bye() -> None:
            for channel in self.channels:
                channel.expect_final()
            self.send(RequestKind.BYE)

        self.post(bye)
        frames = [channel.wait_copy() for channel in self.channels]
        if not self.channels:
            self.ask(lambda: None)

        def free() -> None:
            for receiver in self._notices:
                receiver.cancel()
            for channel in self.channels:
                channel.close()

        self.ask(lambda: self._end_together(at_end, free))
        self._thread.join()
        return frames

    # -- communication thread ---------------------------------------------------------------------

    def _delay_s(self) -> float:
        return min((c.delay_s for c in self.channels), default=IDLE_S)

    def _beat(self) -> None:
        super()._beat()
        for channel in self.channels:
            channel.insist()

    def _listen(self) -> None:
        # MPI looks at the network once for all channels, not once for each
        awaited = [request for channel in self.channels for request in channel.awaited()]
        done = bool(MPI.Request.Testsome(awaited))
        for channel in self.channels:
            channel.progress(done)
        for server, receiver in zip(self.servers, self._notices, strict=True):
            for notice in receiver.poll():
                if server == self.servers[0]:
                    self.notice = notice
                elif notice.stop and not self._handed_on:  # it was told to stop: so are all
                    self._handed_on = True
                    self.send_to(self.servers[0], RequestKind.PREEMPT)
                self.heard_s[server] = time.monotonic()
                if notice.sequence:
                    channel = self.channels[notice.channel]
                    channel.on_sent(channel.acknowledge(notice), notice)
