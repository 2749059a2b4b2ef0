"""Both ends of a mailbox with its acknowledgements: rank 0 serves, all others send."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from aladdin_mpi.comm.control import (
    NOTICE,
    TAG_NOTICE,
    SmallReceiver,
    SmallSender,
    pack_notice,
    unpack_notice,
)
from aladdin_mpi.comm.mailbox import Inbox, Outbox
from aladdin_mpi.core.wire import Arrival, Frame, FrameLayout
from aladdin_mpi.messages import Notice, Push

SERVER = 0
PAUSE_S = 5e-5


class Origin:
    """A worker's end.  Construction and :meth:`free` are collective over ``comm``."""

    def __init__(
        self, comm: MPI.Intracomm, layout: FrameLayout, slots: int, outbox: type[Outbox] = Outbox
    ) -> None:
        self.worker, self.slots = comm.rank - 1, slots
        self.sent = self.acknowledged = 0
        self.notice: Notice | None = None
        self._frames = [layout.new_frame() for _ in range(slots)]
        self._box = outbox(comm, SERVER, self.worker, layout, slots)
        self._notices = SmallReceiver(comm, TAG_NOTICE, NOTICE, [SERVER], unpack_notice)

    @property
    def room(self) -> bool:
        """The next message may be started."""
        return not self._box.busy and self.sent - self.acknowledged < self.slots

    @property
    def next_frame(self) -> Frame:
        """Where to write the next message; only when there is room."""
        return self._frames[(self.sent + 1) % self.slots]

    def send(self, last: bool = False, iterations: int = 1) -> None:
        """Start the next message."""
        frame = self.next_frame
        self.sent += 1
        frame.write_push(Push(self.worker, self.sent, iterations, last=last))
        self._box.start(frame.raw, self.sent)
        self.progress()

    def progress(self) -> None:
        """Move on what is under way, and take acknowledgements."""
        if self._box.busy:
            self._box.advance()
        for notice in self._notices.poll():
            assert notice.sequence == self.acknowledged + 1
            self.notice, self.acknowledged = notice, notice.sequence

    def wait(self, until: Callable[[], bool], pause_s: float = PAUSE_S) -> None:
        """Make progress until something is so."""
        self.progress()
        while not until():
            time.sleep(pause_s)
            self.progress()

    def wait_for_room(self) -> None:
        self.wait(lambda: self.room)

    def finish(self) -> None:
        """Wait until all is acknowledged."""
        self.wait(lambda: self.acknowledged == self.sent)

    def free(self) -> None:
        self._notices.cancel()
        self._box.free()


class Server:
    """The server's end.  Construction and :meth:`free` are collective over ``comm``."""

    def __init__(self, comm: MPI.Intracomm, layout: FrameLayout, slots: int) -> None:
        self._comm = comm
        self.num_workers = comm.size - 1
        self.stop = False
        self._inbox = Inbox(comm, comm.size - 1, layout, slots)
        self._notices = SmallSender(comm, TAG_NOTICE, NOTICE)

    def poll(self) -> list[Arrival]:
        """Drive MPI; messages that have arrived."""
        self._comm.Iprobe()
        self._notices.test()
        return self._inbox.poll()

    def acknowledge(self, arrival: Arrival) -> None:
        """Give the slot back; the notice also says :attr:`stop`."""
        record = self._notices.record()
        notice = Notice(0, arrival.sequence, 0, 0, 0, 0, self.num_workers, self.stop)
        pack_notice(record, notice)
        self._notices.send(record, arrival.origin + 1)

    def serve(self, take: Callable[[Arrival], None], pause_s: float = PAUSE_S) -> None:
        """Take and acknowledge messages until every worker's last one."""
        working = self.num_workers
        while working:
            found = self.poll()
            for arrival in found:
                last = arrival.frame.read_push(0).last
                take(arrival)
                self.acknowledge(arrival)
                working -= last
            if not found:
                time.sleep(pause_s)
        while not self._notices.idle:
            self._notices.test()

    def free(self) -> None:
        self._inbox.free()


def content(frame: Frame, worker: int, sequence: int) -> list[np.ndarray]:
    """What the parts of a message of the tests hold; no two messages are alike."""
    start = 1000 * worker + sequence
    return [
        start + np.arange(frame.params.size, dtype=np.float32) % 509,
        -start - np.arange(frame.floats.size, dtype=np.float32),
        (1 << 40) * start + np.arange(frame.counts.size),
    ]


def write(frame: Frame, worker: int, sequence: int) -> None:
    """Fill a frame with :func:`content`."""
    parts = frame.params, frame.floats, frame.counts
    for part, values in zip(parts, content(frame, worker, sequence), strict=True):
        part[:] = values


def differs(frame: Frame, worker: int, sequence: int) -> bool:
    """A frame does not hold :func:`content`."""
    parts = frame.params, frame.floats, frame.counts
    wanted = content(frame, worker, sequence)
    return not all(np.array_equal(a, b) for a, b in zip(parts, wanted, strict=True))
