"""A relay's link: a mailbox for the workers of its node, one message for all of them to the server.

It is a server towards its workers and a worker towards the servers, in one thread.  Replies fan out
the same way: one message from the server, which every worker that it is for receives as it is.
Acknowledgements, heartbeats and copies do not pass through it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mpi4py import MPI

from aladdin_mpi.comm.channel import Opening, agree, broadcast, tags
from aladdin_mpi.comm.control import (
    NOTICE,
    REQUEST,
    TAG_NOTICE,
    TAG_REQUEST,
    SmallReceiver,
    SmallSender,
    pack_request,
    unpack_notice,
    unpack_request,
)
from aladdin_mpi.comm.mailbox import Inbox, Outbox, pieces
from aladdin_mpi.comm.routes import Routes
from aladdin_mpi.comm.thread import BEAT_S
from aladdin_mpi.core.wire import Arrival, Frame
from aladdin_mpi.messages import ChannelSpec, Notice, Phase, Request, RequestKind

__all__ = ["RelayChannel", "RelayLink"]


class RelayChannel:
    """One optimizer's pushes and replies, or a range's, between some workers and a server.

    Attributes
    ----------
    index, slots : int
    spec : ChannelSpec
    push_layout : FrameLayout
        Of the messages to the server.
    size : int
        Elements of the vector.
    on_answer : callable
        ``on_answer(worker)`` when a reply for a worker has come.
    """

    def __init__(self, link: RelayLink, index: int, server: int, opening: Opening) -> None:
        self.index, self.slots, self.push_layout = index, opening.slots, opening.push_layout
        self.spec: ChannelSpec = opening.spec
        self.size = opening.layout.size
        self.on_answer: Callable[[int], None] = lambda worker: None
        self._link, self._server, self._opening = link, server, opening
        self._inbox = Inbox(opening.node, len(link.workers), opening.node_layout, opening.slots)
        self._box = Outbox(
            opening.up, 0, opening.up.rank - 1, opening.push_layout, opening.slots
        )  # fmt: skip
        broadcast(opening, opening.layout.new_frame(), 1)
        self._frames = [opening.push_layout.new_frame() for _ in range(opening.slots)]
        self._submitted = self._freed = 0
        self._early: set[int] = set()  # freed before an earlier one
        self._spare: list[Frame] = []
        self._receiving: tuple[Frame, list[MPI.Request]] | None = None
        self._forwards: list[tuple[Frame, list[MPI.Request]]] = []

    def arrivals(self) -> list[Arrival]:
        """Pushes that have arrived; their frames are valid until the server acknowledges them."""
        return self._inbox.poll()

    def in_flight(self) -> int:
        """Messages submitted whose slot at the server is not free yet."""
        return self._submitted - self._freed

    def next_frame(self) -> Frame | None:
        """The frame of the next message; None while there is no room for it."""
        if self._box.busy or self.in_flight() == self.slots:
            return None
        return self._frames[(self._submitted + 1) % self.slots]

    def submit(self, frame: Frame, count: int) -> int:
        """Send :meth:`next_frame`, whose payload and ``count`` parts are filled in; returns how
        many bytes.
        """
        self._submitted += 1
        frame.write_merged(self._link.relay, self._submitted, count)
        return self._box.start(frame.raw, self._submitted, frame.stretches())

    def free_slot(self, sequence: int) -> None:
        """The server needs a message no longer."""
        self._early.add(sequence)
        while self._freed + 1 in self._early:
            self._freed += 1
            self._early.remove(self._freed)

    def insist(self) -> None:
        """See that the server hears of the oldest message."""
        self._box.insist(self._freed)

    def progress(self) -> None:
        """Move messages and replies on."""
        if self._box.busy:
            self._box.advance()
        if self._receiving is None:
            reply_layout = self._opening.reply_layout
            frame = self._spare.pop() if self._spare else reply_layout.new_frame()
            self._receiving = frame, self._transfer(self._link.comm.Irecv, frame, self._server)
        frame, requests = self._receiving
        if MPI.Request.Testall(requests):
            self._receiving = None
            count = int(frame.header["parts"][0])
            forward = []
            for worker in frame.parts["worker"][:count].tolist():
                rank = self._link.rank_of[worker]
                forward += self._transfer(self._link.comm.Isend, frame, rank)
                self.on_answer(worker)
            self._forwards.append((frame, forward))
        for entry in list(self._forwards):
            if MPI.Request.Testall(entry[1]):
                self._forwards.remove(entry)
                self._spare.append(entry[0])

    def _transfer(
        self, start: Callable[..., MPI.Request], frame: Frame, rank: int
    ) -> list[MPI.Request]:
        return [
            start((frame.raw[a:b], b - a, MPI.BYTE), rank, tags(self.index)[0])
            for a, b in pieces(frame.raw.size)
        ]

    @property
    def moving(self) -> bool:
        """Something of this channel is on its way."""
        return self._box.busy or bool(self._forwards)

    def close(self) -> None:
        """Collective; everything has been sent."""
        for request in self._receiving[1] if self._receiving else ():
            request.Cancel()
            request.Wait()
        self._inbox.free()
        self._box.free()
        self._opening.free()


class RelayLink:
    """All that a relay exchanges with its workers and the servers; used by one thread.

    Parameters
    ----------
    comm : MPI.Intracomm
        Everybody; a communicator of the link's own.
    servers : sequence of int
        The servers' ranks.
    groups : sequence of MPI.Intracomm
        For each server, it as rank 0, the workers and the relays.
    workers : sequence of int
        Ranks of all workers.
    relay : int
        This relay's index.
    routes : Routes

    Attributes
    ----------
    workers : list of int
        The numbers of this relay's workers.
    stop : int
        The servers' last word on why everybody should end.
    over : bool
        Every server has said that all workers have ended.
    """

    def __init__(
        self, comm: MPI.Intracomm, servers: Sequence[int], groups: Sequence[MPI.Intracomm],
        workers: Sequence[int], relay: int, routes: Routes,
    ) -> None:  # fmt: skip
        self.comm, self.relay, self.workers = comm, relay, routes.workers_of(relay)
        self.rank_of = {worker: workers[worker] for worker in self.workers}
        self.channels: list[RelayChannel] = []
        self.stop = 0
        self._servers, self._groups, self._routes = servers, groups, routes
        self._num_workers = len(workers)
        self._over: set[int] = set()
        self._registered: dict[int, int] = {}
        self._next_beat = 0.0
        self._beats = SmallSender(comm, TAG_REQUEST, REQUEST)
        ranks = list(self.rank_of.values())
        self._requests = SmallReceiver(comm, TAG_REQUEST, REQUEST, ranks, unpack_request)
        self._notices = [
            SmallReceiver(comm, TAG_NOTICE, NOTICE, [server], unpack_notice) for server in servers
        ]

    @property
    def over(self) -> bool:
        return len(self._over) == len(self._servers)

    def progress(self) -> bool:
        """Drive MPI, messages and replies; True when nothing is on its way."""
        self.comm.Iprobe()
        self._beats.test()
        if time.monotonic() >= self._next_beat and self._beats.idle:
            self.tell(RequestKind.BEAT)
            for channel in self.channels:
                channel.insist()
        for request in self._requests.poll():
            self._register(request)
        for server, receiver in enumerate(self._notices):
            for notice in receiver.poll():
                self._heed(server, notice)
        for channel in self.channels:
            channel.progress()
        return not any(channel.moving for channel in self.channels)

    def tell(self, kind: RequestKind) -> None:
        """Send a small message to the servers."""
        self._next_beat = time.monotonic() + BEAT_S
        for rank in self._servers:
            record = self._beats.record()
            pack_request(record, Request(kind, self._num_workers + self.relay, Phase.SERVE))
            self._beats.send(record, rank)

    def _register(self, request: Request) -> None:
        """A worker opens a channel: so does the relay once all of its workers do."""
        index = request.channel
        self._registered[index] = self._registered.get(index, 0) + 1
        if self._registered[index] == len(self.workers):
            server = int(request.values[0])
            opening = agree(self._groups[server], 0, None, self._routes)
            self.channels.append(RelayChannel(self, index, self._servers[server], opening))

    def _heed(self, server: int, notice: Notice) -> None:
        self.stop = max(self.stop, notice.stop)
        if not notice.active:
            self._over.add(server)
        elif notice.sequence:
            self.channels[notice.channel].free_slot(notice.sequence)

    def close(self) -> None:
        """Wait until everybody has everything (polling); collective."""
        for _ in range(2):  # a reply that has come may still have to be handed on, and its workers
            while not self.progress():  # receive until they have passed the barrier
                time.sleep(0.001)
        barrier = self.comm.Ibarrier()
        while not (self.progress() and self._beats.idle and barrier.Test()):
            time.sleep(0.001)
        self._requests.cancel()
        for receiver in self._notices:
            receiver.cancel()

    def free(self) -> None:
        """Collective, after :meth:`close`."""
        for channel in self.channels:
            channel.close()
