"""A server's link to its workers: windows for pushes, non-blocking sends for everything else.

No call here waits for a worker: a send that is stuck keeps its own buffer and delays nobody else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from mpi4py import MPI

from aladdin_mpi.comm.channel import Opening, agree, broadcast, tags
from aladdin_mpi.comm.control import (
    NOTICE,
    REQUEST,
    TAG_NOTICE,
    TAG_REQUEST,
    SmallReceiver,
    SmallSender,
    pack_notice,
    unpack_request,
)
from aladdin_mpi.comm.mailbox import Inbox, pieces
from aladdin_mpi.comm.routes import Routes
from aladdin_mpi.core.wire import Arrival, Frame, FrameLayout
from aladdin_mpi.messages import Notice, Reply, Request

__all__ = ["ServerChannel", "ServerLink"]


class _Sending:
    """One worker's buffer of one kind, and the send that uses it."""

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.requests: list[MPI.Request] = []

    def done(self) -> bool:
        if self.requests and MPI.Request.Testall(self.requests):
            self.requests = []
        return not self.requests


class ServerChannel:
    """One optimizer's pushes and replies, at the server.

    Attributes
    ----------
    spec : ChannelSpec
    initial : Frame
        Worker 0's values at the start.
    sender_of : list of int
        By worker, who passes its pushes and replies on: itself, or its relay.
    relayed : int
        The most workers that a relay has.
    """

    def __init__(self, link: ServerLink, index: int, opening: Opening) -> None:
        self.index, self.spec, self.layout = index, opening.spec, opening.layout
        self.push_layout = opening.push_layout
        self.slots = opening.slots
        self.sender_of, self.relayed = link.routes.sender_of, link.routes.largest
        self._link, self._opening = link, opening
        senders = len(link.senders)
        self._inbox = Inbox(opening.up, senders, opening.push_layout, opening.slots)
        self.initial = opening.layout.new_frame()
        broadcast(opening, self.initial, 1)
        self._replies = [_Sending() for _ in range(senders)]
        # where memory is scarce, a worker's reply and its copy take turns
        shared = opening.slots == 1 and not link.relays
        self._copies = self._replies if shared else [_Sending() for _ in link.workers]
        self._finals = [_Sending() for _ in link.workers]

    def arrivals(self) -> list[Arrival]:
        """Pushes that have arrived; their frames are valid until acknowledged."""
        return self._inbox.poll()

    def reply_frame(self, sender: int) -> Frame | None:
        """The reply buffer of a worker, or of a relay's workers; None while the last reply is on
        its way.
        """
        return self._frame(self._replies[sender], self._opening.reply_layout)

    def copy_frame(self, worker: int) -> Frame | None:
        """The same for a copy that the worker asked for."""
        return self._frame(self._copies[worker], self.layout)

    def _frame(self, sending: _Sending, layout: FrameLayout) -> Frame | None:
        if not sending.done():
            return None
        if sending.frame is None:
            sending.frame = layout.new_frame()
        return sending.frame

    def send_replies(self, sender: int, replies: Sequence[tuple[int, Reply]]) -> None:
        """Send what was written into :meth:`reply_frame`, to the sender's worker or workers."""
        sending = self._replies[sender]
        frame = sending.frame
        assert frame is not None and not sending.requests
        if frame.parts.size:
            frame.write_replies(replies)
        else:
            frame.write_reply(replies[0][1])
        sending.requests = self._start(frame, self._link.senders[sender], tags(self.index)[0])

    def send_copy(self, worker: int, reply: Reply) -> None:
        """Send what was written into :meth:`copy_frame`."""
        sending = self._copies[worker]
        frame = sending.frame
        assert frame is not None and not sending.requests
        frame.write_reply(reply)
        sending.requests = self._start(frame, self._link.workers[worker], tags(self.index)[1])

    def send_to_all(self, frame: Frame, reply: Reply) -> None:
        """Send a frame, which then stays as it is, to every worker as the copy that it expects."""
        frame.write_reply(reply)
        for to, sending in zip(self._link.workers, self._finals, strict=True):
            sending.requests = self._start(frame, to, tags(self.index)[1])

    def _start(self, frame: Frame, to: int, tag: int) -> list[MPI.Request]:
        return [
            self._link.comm.Isend((frame.raw[a:b], b - a, MPI.BYTE), to, tag)
            for a, b in pieces(frame.raw.size)
        ]

    def test(self) -> bool:
        """Drive the sends; True when none is on its way."""
        idle = True
        for sending in (*self._replies, *self._copies, *self._finals):
            idle = sending.done() and idle
        return idle

    def reply_done(self, worker: int) -> bool:
        """The worker's last reply has left."""
        return self._replies[self.sender_of[worker]].done()

    def close(self) -> None:
        """Collective; everything has been sent."""
        self._inbox.free()
        self._opening.free()


class ServerLink:
    """All that a server exchanges with its workers.

    Parameters
    ----------
    comm : MPI.Intracomm
        Servers and workers; a communicator of the link's own.
    group : MPI.Intracomm
        This server, as rank 0, the workers and the relays.
    workers, relays : sequence of int
        Their ranks in ``comm``, in order.
    routes : Routes

    Attributes
    ----------
    senders : list of int
        Ranks of those that put into this server's mailboxes, in order.
    """

    def __init__(
        self, comm: MPI.Intracomm, group: MPI.Intracomm, workers: Sequence[int],
        relays: Sequence[int], routes: Routes,
    ) -> None:  # fmt: skip
        self.comm, self.group, self.workers, self.relays = comm, group, list(workers), list(relays)
        self.routes = routes
        ranks = [*self.workers, *self.relays]
        self.senders = [ranks[sender - 1] for sender in routes.senders]
        self.channels: list[ServerChannel] = []
        self._notices = SmallSender(comm, TAG_NOTICE, NOTICE)
        self._requests = SmallReceiver(comm, TAG_REQUEST, REQUEST, ranks, unpack_request)

    def progress(self) -> bool:
        """Drive MPI and all sends; True when none is on its way."""
        self.comm.Iprobe()
        self._notices.test()
        idle = True
        for channel in self.channels:
            idle = channel.test() and idle
        return idle

    def requests(self) -> list[Request]:
        """Small messages that have come in."""
        return self._requests.poll()

    def notify(self, worker: int, notice: Notice) -> None:
        """Send an acknowledgement or heartbeat."""
        self._tell(self.workers[worker], notice)

    def notify_relay(self, relay: int, notice: Notice) -> None:
        """Tell a relay that a message's slot is free, or, with nobody active, that all is over."""
        self._tell(self.relays[relay], notice)

    def _tell(self, rank: int, notice: Notice) -> None:
        record = self._notices.record()
        pack_notice(record, notice)
        self._notices.send(record, rank)

    def may_beat(self, worker: int) -> bool:
        """No small message to this worker is stuck."""
        return not self._notices.pending_to(self.workers[worker])

    def open_channel(self, index: int) -> ServerChannel:
        """Open the channel of this number; collective, when all workers have asked for it."""
        channel = ServerChannel(self, index, agree(self.group, 0, None, self.routes))
        self.channels.append(channel)
        return channel

    def close(self) -> None:
        """Wait until everybody has everything (polling), then free all; collective."""
        barrier = self.comm.Ibarrier()
        while not (self.progress() and self._notices.idle and barrier.Test()):
            time.sleep(0.001)
        self._requests.cancel()

    def free(self) -> None:
        """Collective, after :meth:`close`."""
        for channel in self.channels:
            channel.close()
