"""The links of workers where there is no server: sums over all, and messages from one to another.

Two-sided and non-blocking in both directions, so that no pair ever waits for each other: a message
that nobody takes holds up its sender's buffer and nothing else.  A receive is posted when a message
has come, from who has sent it; never from anybody (decision 006).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from aladdin_mpi.comm.channel import Opening, agree, broadcast
from aladdin_mpi.comm.control import REQUEST, TAG_REQUEST, SmallReceiver, unpack_request
from aladdin_mpi.comm.mailbox import pieces
from aladdin_mpi.comm.thread import BUSY_S, IDLE_S, WAITING_S, CommThread
from aladdin_mpi.core import kernels
from aladdin_mpi.core.wire import Frame, FrameLayout
from aladdin_mpi.errors import CommunicationError, ModelError
from aladdin_mpi.messages import ChannelSpec, PeerHeader, Request, RequestKind, Stop

__all__ = ["PeerChannel", "PeerLink"]

LARGEST_BYTES = 2**31 - 1
"""[bytes] of a message from worker to worker, which travels in one piece."""

SEND_FRAMES, RECEIVE_FRAMES = 2, 4
"""Buffers.  Two neighbours may each be one message ahead of this worker (D-PSGD): four to receive.
"""


class _Message:
    """A message that has arrived (the port's ``PeerIncoming``)."""

    def __init__(self, frame: Frame, give_back: Callable[[Frame], None]) -> None:
        self._frame, self._give_back = frame, give_back
        self.header = frame.read_peer()
        if not frame.intact(self.header.sequence):
            raise CommunicationError(f"a message of worker {self.header.worker} arrived torn")
        self.vector: np.ndarray = frame.params
        self.finite = not kernels.count_nonfinite(frame.params)

    def release(self) -> None:
        self._give_back(self._frame)


class Sum:
    """A sum over all workers under way."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.requests: list[MPI.Request] = []

    def test(self) -> bool:
        """Done?  On the communication thread."""
        if MPI.Request.Testall(self.requests):
            self._done.set()
        return self._done.is_set()

    def wait(self) -> None:
        """Wait for it."""
        self._done.wait()


class PeerChannel:
    """One optimizer's sums and messages.

    Attributes
    ----------
    ended : dict
        By worker that has ended: the iterations that it made.
    sent, received : dict
        Messages by worker: sent to it, taken in from it.
    on_message : callable or None
        ``on_message(message) -> bool`` on the communication thread, in place of :meth:`take`.
    on_sent : callable
        ``on_sent(header, to, started_s, took_s, nbytes)`` when a message has left (communication
        thread).
    """

    def __init__(self, link: PeerLink, index: int, opening: Opening) -> None:
        self.index, self.layout = index, FrameLayout(opening.spec.size)
        if self.layout.frame_bytes > LARGEST_BYTES:
            raise ModelError(
                f"the model has {self.layout.frame_bytes / 2**30:.1f} GiB of parameters; workers "
                "exchange less than 2 GiB with one another: use an algorithm with a server"
            )
        self.ended: dict[int, int] = {}
        self.sent = dict.fromkeys(range(link.num_workers), 0)
        self.received = dict.fromkeys(range(link.num_workers), 0)
        self.on_message: Callable[[_Message], bool] | None = None
        self.on_sent: Callable[[PeerHeader, int, float, float, int], None] | None = None
        self.changed = threading.Event()
        self._expected: dict[int, int] = {}
        self._link, self._comm = link, opening.comm
        self._free: deque[Frame] = deque()
        self._sending: dict[int, tuple[MPI.Request, Frame, PeerHeader, float]] = {}
        self._busy: set[int] = set()  # whom a message is on its way to
        self._receiving: list[tuple[int, Frame, MPI.Request]] = []  # from whom, in order
        self._coming = MPI.Status()
        self._ready: deque[_Message] = deque()
        self._held: deque[_Message] = deque()
        self._spare: deque[Frame] = deque()
        self._sums: list[Sum] = []
        self._allocated = False

    def use_messages(self) -> None:
        """Allocate the buffers of messages; an algorithm that only sums needs none."""
        if not self._allocated:
            self._allocated = True
            self._free.extend(self.layout.new_frame() for _ in range(SEND_FRAMES))
            self._spare.extend(self.layout.new_frame() for _ in range(RECEIVE_FRAMES))

    # -- training thread, or the communication thread in ``on_message`` ---------------------------

    def try_send(self, to: int, write: Callable[[np.ndarray], None], header: PeerHeader) -> bool:
        """Send to a worker what ``write`` fills in; False where there is no room."""
        if to in self._busy:
            return False
        try:
            frame = self._free.popleft()
        except IndexError:
            return False
        write(frame.params)
        self.sent[to] += 1
        header = header._replace(sequence=self.sent[to])
        frame.write_peer(header)
        self._busy.add(to)
        self._link.post(self._start, to, frame, header)
        return True

    def take(self) -> _Message | None:
        """The oldest message that was not taken yet."""
        return self._ready.popleft() if self._ready else None

    def wait_change(self, timeout_s: float) -> None:
        """Wait until something has arrived or left since the last call."""
        self.changed.wait(timeout_s)
        self.changed.clear()

    def start_sum(self, array: np.ndarray, op: MPI.Op = MPI.SUM) -> Sum:
        """Sum an array over all workers, in place; collective, in the same order everywhere."""
        under_way = Sum()

        def start() -> None:
            for a, b in pieces(array.nbytes):
                part = array[a // array.itemsize : b // array.itemsize]
                under_way.requests.append(self._comm.Iallreduce(MPI.IN_PLACE, part, op))
            self._sums.append(under_way)

        self._link.post(start)
        return under_way

    def largest(self, array: np.ndarray) -> None:
        """``array ← max array`` over all workers; waits.  Collective."""
        self.start_sum(array, MPI.MAX).wait()

    def leave(self, iterations: int) -> None:
        """This worker sends nothing more of its own accord."""

        def tell() -> None:
            for other in self._link.others:
                values = (float(iterations), float(self.sent[other]))
                self._link.send_to(other, RequestKind.BYE, self.index, values)

        self._link.post(tell)

    def all_ended(self) -> bool:
        """Everybody else has ended, and what they sent was handed out."""
        return len(self.ended) == len(self._link.others) and all(
            self.received[worker] >= count for worker, count in self._expected.items()
        )

    # -- communication thread ---------------------------------------------------------------------

    def _start(self, to: int, frame: Frame, header: PeerHeader) -> None:
        raw = frame.raw
        request = self._comm.Isend((raw, raw.size, MPI.BYTE), to, 0)
        self._sending[to] = (request, frame, header, time.monotonic())

    def has_ended(self, request: Request) -> None:
        """A worker said goodbye."""
        iterations, count = request.values[:2]
        self._expected[request.worker] = int(count)
        self.ended[request.worker] = int(iterations)
        self.changed.set()

    def progress(self) -> None:
        """Move everything on."""
        for under_way in [s for s in self._sums if s.test()]:
            self._sums.remove(under_way)
        for to, (request, frame, header, started) in list(self._sending.items()):
            if request.Test():
                del self._sending[to]
                self._free.append(frame)
                self._busy.discard(to)
                self.changed.set()
                if self.on_sent is not None:
                    took = time.monotonic() - started
                    self.on_sent(header, to, started, took, self.layout.frame_bytes)
        while self._spare and self._comm.Iprobe(MPI.ANY_SOURCE, 0, self._coming):
            source, frame = self._coming.source, self._spare.popleft()
            raw = frame.raw
            request = self._comm.Irecv((raw, raw.size, MPI.BYTE), source, 0)
            self._receiving.append((source, frame, request))
        self._hold_arrived()
        while self._held:
            message = self._held[0]
            if self.on_message is None:
                self._ready.append(message)
            elif not self.on_message(message):
                break
            self._held.popleft()
            self.received[message.header.worker] += 1
            self.changed.set()

    def _hold_arrived(self) -> None:
        """Take what is there whole, each worker's in order; a slow one holds up nobody else's."""
        under_way, late = [], set()
        for source, frame, request in self._receiving:
            if source not in late and request.Test():
                self._held.append(_Message(frame, self._spare.append))
            else:
                late.add(source)
                under_way.append((source, frame, request))
        self._receiving = under_way

    @property
    def delay_s(self) -> float:
        """[s] how long the communication thread may sleep."""
        if self._sending or self._sums or self._held:
            return BUSY_S
        return WAITING_S if self._allocated else IDLE_S

    def close(self) -> None:
        """Collective; everything has been received."""
        self._comm.Free()


class PeerLink(CommThread):
    """All that a worker exchanges with the other workers.

    Parameters
    ----------
    comm : MPI.Intracomm
        The workers; a communicator of the link's own.
    on_failure : callable
        Called with an exception that ended the communication thread; must end the job.

    Attributes
    ----------
    others : list of int
        The other workers.
    """

    def __init__(self, comm: MPI.Intracomm, on_failure: Callable[[BaseException], None]) -> None:
        self.others = [rank for rank in range(comm.size) if rank != comm.rank]
        super().__init__(comm, self.others, comm.rank, comm.size, on_failure, comm.Dup())
        self.channels: list[PeerChannel] = []
        self._counts = [0] * comm.size
        self._said = SmallReceiver(comm, TAG_REQUEST, REQUEST, self.others, unpack_request)
        self._gone: set[int] = set()
        self._thread.start()

    def tell(self, kind: RequestKind, values: tuple[float, ...] = ()) -> None:
        """Send a small message to all; what is for all is for this worker, too."""
        if kind is RequestKind.STOP:
            self.notice = self.notice._replace(stop=int(Stop.ASKED))
        if kind in (RequestKind.STOP, RequestKind.PREEMPT):
            super().tell(kind, values)

    def open_channel(
        self, spec: ChannelSpec, initial: Callable[[Frame], None]
    ) -> tuple[PeerChannel, Frame]:
        """Open the next channel; collective over all workers (see ``WorkerLink``)."""

        def open_() -> tuple[PeerChannel, Frame]:
            opening = agree(self.comm, None, spec)
            channel = PeerChannel(self, len(self.channels), opening)
            frame = opening.layout.new_frame()
            initial(frame)
            broadcast(opening, frame, 0)
            self.channels.append(channel)
            return channel, frame

        return self.ask(open_)

    def close(self, at_end: Callable[[], None]) -> list[Frame]:
        """Wait for everybody, and free all; collective.  There are no parameters to return."""

        def free() -> None:
            self._said.cancel()
            for channel in self.channels:
                channel.close()

        self.ask(lambda: self._end_together(at_end, free))
        self._thread.join()
        return []

    def _delay_s(self) -> float:
        return min((c.delay_s for c in self.channels), default=IDLE_S)

    def _listen(self) -> None:
        for channel in self.channels:
            channel.progress()
        for request in self._said.poll():
            self.heard_s[request.worker] = time.monotonic()
            if request.kind is RequestKind.BEAT:
                self._counts[request.worker] = int(request.values[0])
            elif request.kind is RequestKind.STOP:
                self.notice = self.notice._replace(stop=int(Stop.ASKED))
            elif request.kind is RequestKind.PREEMPT:
                self.preempt = True
            elif request.kind is RequestKind.BYE:
                self.channels[request.channel].has_ended(request)
                self._gone.add(request.worker)
        self.notice = self.notice._replace(
            samples=sum(self._counts), active=self.num_workers - len(self._gone)
        )
