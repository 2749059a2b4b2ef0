"""A worker's link to the server: one background thread that makes every MPI call of the process.

The training thread hands pushes over and takes replies through plain Python objects and never
calls MPI, so that nothing that MPI does can hold it up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from aladdin_mpi.comm.channel import Opening, agree, tags
from aladdin_mpi.comm.control import (
    NOTICE,
    REQUEST,
    TAG_NOTICE,
    TAG_REQUEST,
    SmallReceiver,
    SmallSender,
    pack_request,
    unpack_notice,
)
from aladdin_mpi.comm.mailbox import Outbox, pieces
from aladdin_mpi.core import kernels
from aladdin_mpi.core.wire import Frame
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

__all__ = ["WorkerChannel", "WorkerLink"]

BEAT_S = 1.0
"""[s] between two heartbeats."""

_BUSY_S, _WAITING_S, _IDLE_S = 0.0002, 0.001, 0.005


class _Incoming:
    """A reply that has arrived (the port's ``Incoming``)."""

    def __init__(self, frame: Frame, give_back: Callable[[Frame], None]) -> None:
        self._frame, self._give_back = frame, give_back
        self.header: Reply = frame.read_reply()
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
    acknowledged : int
        The last push that the server has merged.
    last_notice : Notice or None
        Its acknowledgement.
    send_time_s : float
        [s] from handing over to acknowledgement, running mean.
    on_sent : callable
        ``on_sent(times, notice)`` for every acknowledged push, on the communication thread.
    """

    def __init__(self, link: WorkerLink, index: int, opening: Opening) -> None:
        self.index, self.slots, self.layout = index, opening.slots, opening.layout
        self.acknowledged = 0
        self.last_notice: Notice | None = None
        self.send_time_s = 0.0
        self.on_sent: Callable[[SendTimes, Notice], None] = lambda times, notice: None
        self.changed = threading.Event()
        self._link = link
        self._comm = opening.comm
        self._handed = 0
        self._frames = [self.layout.new_frame() for _ in range(self.slots)]
        self._queued_at = [0.0] * self.slots
        self._times = [[0.0, 0.0] for _ in range(self.slots)]  # put began, published
        self._waiting: deque[int] = deque()
        self._ready: deque[_Incoming] = deque()
        self._spare = deque(self.layout.new_frame() for _ in range(2))
        self._receiving: tuple[Frame, list[MPI.Request]] | None = None
        self._fetching: tuple[Frame, list[MPI.Request]] | None = None
        self._fetched: Frame | None = None
        self._box = Outbox(opening.comm, link.server, link.worker, opening.layout, opening.slots)

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
        self._link.post(self._waiting.append, push.sequence)

    def take_reply(self) -> _Incoming | None:
        """The oldest reply that was not taken yet."""
        return self._ready.popleft() if self._ready else None

    def wait_change(self, timeout_s: float) -> None:
        """Wait until something was acknowledged or has arrived since the last call."""
        self.changed.wait(timeout_s)
        self.changed.clear()

    def fetch(self) -> Frame:
        """The server's current parameters and buffers; waits for them."""
        self._link.post(self._ask_copy)
        return self.wait_copy()

    def wait_copy(self) -> Frame:
        """Wait for a copy that is on its way."""
        while self._fetched is None:
            self.wait_change(1.0)
        frame, self._fetched = self._fetched, None
        return frame

    # -- communication thread ---------------------------------------------------------------------

    def _receive(self, frame: Frame, tag: int) -> tuple[Frame, list[MPI.Request]]:
        comm, server = self._link.comm, self._link.server
        return frame, [
            comm.Irecv((frame.raw[a:b], b - a, MPI.BYTE), server, tag)
            for a, b in pieces(self.layout.frame_bytes)
        ]

    def _ask_copy(self) -> None:
        self.expect_copy()
        self._link.send(RequestKind.FETCH, channel=self.index)

    def expect_copy(self) -> None:
        """Post the receive of a copy."""
        self._fetching = self._receive(self.layout.new_frame(), tags(self.index)[1])

    def progress(self) -> None:
        """Move sends and receives on."""
        if not self._box.busy and self._waiting:
            sequence = self._waiting.popleft()
            self._times[sequence % self.slots][0] = time.monotonic()
            self._box.start(self._frames[sequence % self.slots].raw, sequence)
            self._sending = sequence
        if self._box.busy and self._box.advance():
            self._times[self._sending % self.slots][1] = time.monotonic()
        if self._receiving is None and self._spare:
            self._receiving = self._receive(self._spare.popleft(), tags(self.index)[0])
        if self._receiving is not None and MPI.Request.Testall(self._receiving[1]):
            incoming = _Incoming(self._receiving[0], self._spare.append)
            self._receiving = None
            self._ready.append(incoming)
            self.changed.set()
        if self._fetching is not None and MPI.Request.Testall(self._fetching[1]):
            self._fetched, self._fetching = self._fetching[0], None
            self.changed.set()

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
            queued, began - queued, published - began, now - published, self.layout.frame_bytes
        )

    @property
    def delay_s(self) -> float:
        """[s] how long the communication thread may sleep."""
        if self._box.busy or self._fetching:
            return _BUSY_S
        if (
            self.in_flight()
        ):  # a fifth of what sends take: prompt on a fast link, cheap on a slow one
            return min(max(self.send_time_s / 5, _BUSY_S), _WAITING_S)
        return _IDLE_S

    def close(self) -> None:
        """Collective; everything has been received."""
        if self._receiving is not None:
            for request in self._receiving[1]:
                request.Cancel()
                request.Wait()
        self._box.free()
        self._comm.Free()


class WorkerLink:
    """All that a worker exchanges with the server.

    Parameters
    ----------
    comm : MPI.Intracomm
        Servers and workers; a communicator of the link's own.
    server : int
        The server's rank.
    worker : int
        This worker's index.
    on_failure : callable
        Called with an exception that ended the communication thread; must end the job.
    among_workers : MPI.Intracomm
        The workers alone.

    Attributes
    ----------
    notice : Notice
        The server's last word.
    last_heard_s : float
        [s] monotonic time of it.
    phase, phase_since, steps
        What the training thread is doing, since when, and its iterations; told in heartbeats.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        server: int,
        worker: int,
        num_workers: int,
        on_failure: Callable[[BaseException], None],
        among_workers: MPI.Intracomm,
    ) -> None:
        self._among_workers = among_workers
        self._exchanges: list[tuple[MPI.Request, threading.Event]] = []
        self.comm, self.server, self.worker = comm, server, worker
        self.notice = Notice(0, 0, 0, 0, 0, 0, num_workers, False)
        self.last_heard_s = time.monotonic()
        self.phase, self.phase_since, self.steps = Phase.START, self.last_heard_s, 0
        self.channels: list[WorkerChannel] = []
        self._on_failure = on_failure
        # No SimpleQueue: its get(timeout) can wait for ever (seen with CPython 3.11), when the
        # thread loses its core for longer than a short timeout.
        self._commands: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._wake = threading.Lock()  # free: there is a command
        self._wake.acquire()
        self._requests = SmallSender(comm, TAG_REQUEST, REQUEST)
        self._notices = SmallReceiver(comm, TAG_NOTICE, NOTICE, [server], unpack_notice)
        self._next_beat = 0.0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="aladdin-sender", daemon=True)
        self._thread.start()

    # -- any thread -------------------------------------------------------------------------------

    def post(self, call: Callable[..., Any], *args: Any) -> None:
        """Have the communication thread make a call soon."""
        self._commands.append((call, args))
        with contextlib.suppress(RuntimeError):  # it is free already
            self._wake.release()

    def ask(self, call: Callable[[], Any]) -> Any:
        """Have the communication thread make a call, and wait for what it returns or raises."""
        done = threading.Event()
        result: list[Any] = []

        def run() -> None:
            try:
                result.extend((True, call()))
            except Exception as error:  # handed to the caller, who waits for it
                result.extend((False, error))
            done.set()

        self.post(run)
        done.wait()
        if result[0]:
            return result[1]
        raise result[1]

    def tell(self, kind: RequestKind, values: tuple[float, ...] = ()) -> None:
        """Send a small message; does not wait."""
        self.post(lambda: self.send(kind, values=values))

    def exchange(self, mine: bytes, size: int = 512) -> list[bytes]:
        """Every worker's bytes, cut to ``size``; waits for all workers.  Collective over them."""
        out = np.zeros(size, np.uint8)
        out[: len(mine[:size])] = np.frombuffer(mine[:size], np.uint8)
        gathered = np.zeros((self._among_workers.size, size), np.uint8)
        done = threading.Event()

        def start() -> None:
            request = self._among_workers.Iallgather(out, gathered)
            self._exchanges.append((request, done))

        self.post(start)
        done.wait()
        return [row.tobytes().rstrip(b"\0") for row in gathered]

    def open_channel(
        self, spec: ChannelSpec, initial: Callable[[Frame], None]
    ) -> tuple[WorkerChannel, Frame]:
        """Open the next channel; collective over all workers and the server.

        ``initial`` fills a frame with this worker's values; the frame that is returned holds
        worker 0's, which all start from.
        """

        def open_() -> tuple[WorkerChannel, Frame]:
            index = len(self.channels)
            self.send(RequestKind.REGISTER, channel=index)
            opening = agree(self.comm, self.server, spec)
            channel = WorkerChannel(self, index, opening)
            frame = opening.layout.new_frame()
            initial(frame)
            root = 0 if self.server else 1
            for a, b in pieces(opening.layout.frame_bytes):
                opening.comm.Bcast((frame.raw[a:b], b - a, MPI.BYTE), root)
            self.channels.append(channel)
            return channel, frame

        return self.ask(open_)

    def close(self, at_end: Callable[[], None]) -> list[Frame]:
        """Say goodbye, wait for everybody, and free all; collective.

        Every channel's last push has been acknowledged.  ``at_end`` runs on the communication
        thread when all have ended.  Returns the final parameters of each channel.
        """

        def bye() -> None:
            for channel in self.channels:
                channel.expect_copy()
            self.send(RequestKind.BYE)

        self.post(bye)
        frames = [channel.wait_copy() for channel in self.channels]
        if not self.channels:
            bye_done = threading.Event()
            self.post(bye_done.set)
            bye_done.wait()

        def end() -> None:
            barrier = self.comm.Ibarrier()
            while not barrier.Test():
                self._progress()
                time.sleep(_WAITING_S)
            self._notices.cancel()
            at_end()
            for channel in self.channels:
                channel.close()
            self._ended = True

        self.ask(end)
        self._thread.join()
        return frames

    # -- communication thread ---------------------------------------------------------------------

    def send(self, kind: RequestKind, channel: int = 0, values: tuple[float, ...] = ()) -> None:
        """Send a small message now."""
        now = time.monotonic()
        record = self._requests.record()
        since = now - self.phase_since
        request = Request(kind, self.worker, self.phase, since, self.steps, channel, values)
        pack_request(record, request)
        self._requests.send(record, self.server)
        self._next_beat = now + BEAT_S

    def _run(self) -> None:
        try:
            while not self._ended:
                delay = min((c.delay_s for c in self.channels), default=_IDLE_S)
                if not self._commands:
                    self._wake.acquire(timeout=delay)
                if self._commands:
                    call, args = self._commands.popleft()
                    call(*args)
                if not self._ended:
                    self._progress()
        except BaseException as error:
            self._on_failure(error)

    def _progress(self) -> None:
        for channel in self.channels:
            channel.progress()
        for notice in self._notices.poll():
            self.notice = notice
            self.last_heard_s = time.monotonic()
            if notice.sequence:
                channel = self.channels[notice.channel]
                channel.on_sent(channel.acknowledge(notice), notice)
        for exchange in list(self._exchanges):
            if exchange[0].Test():
                self._exchanges.remove(exchange)
                exchange[1].set()
        self._requests.test()
        if time.monotonic() >= self._next_beat and not self._requests.pending_to(self.server):
            self.send(RequestKind.BEAT)
