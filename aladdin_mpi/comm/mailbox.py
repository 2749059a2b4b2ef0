"""The mailbox towards a server: one-sided, never waiting.

On the server there is, for every origin, a ring of slots, and for every slot one aligned 64-bit
word.  A message number k of an origin goes to slot k mod slots:

1. Unless message k − slots has been acknowledged, there is no room: the origin does something else.
2. ``Rput`` of the frame, in pieces; ``Test`` until the origin's side of it is done.
3. One ``Flush``: the frame is complete in the server's memory.
4. ``Rput`` of exactly one aligned word, k.  Nobody waits for it: its answer is the acknowledgement.
   A ``Flush`` would look at the network without pause meanwhile.  It is made up for where a second
   later nothing has been acknowledged, for a library that keeps the word back until then.

Records of several words are torn now and then, so nothing but that word announces a message.  The
server reads the words in its own memory, and after a new one synchronizes the frames' window
before it reads the frame: a view, merged in place.  Its acknowledgement is a two-sided message
(``control.py``); the slot is free again when it arrives.  ``mailbox.pml`` is the model of this
that is checked.

The server never waits for anybody here.  An origin may be held up in step 3 by a server that has
stopped; so only a worker's communication thread sends.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from aladdin_mpi.core.vector import ALIGN
from aladdin_mpi.core.wire import Arrival, Frame, FrameLayout
from aladdin_mpi.errors import CommunicationError, LaunchError

__all__ = ["PIECE_BYTES", "Inbox", "Outbox", "pieces"]

PIECE_BYTES = 1 << 30
"""[bytes] the most that one Put carries: from 2^31 on some libraries fail."""

INSIST_S = 1.0
"""[s] after which a word that was put without an acknowledgement is flushed."""


def pieces(nbytes: int) -> list[tuple[int, int]]:
    """``(start, stop)`` of the pieces in which ``nbytes`` travel."""
    return [(a, min(a + PIECE_BYTES, nbytes)) for a in range(0, nbytes, PIECE_BYTES)]


class _Windows:
    """The two windows of a mailbox: frames and words, memory on the server only.  Collective."""

    def __init__(
        self, comm: MPI.Intracomm, server: int, frames_bytes: int, words_bytes: int
    ) -> None:
        here = comm.rank == server
        info = MPI.Info.Create()
        info.Set("accumulate_ordering", "none")
        info.Set("same_disp_unit", "true")
        self.frames = MPI.Win.Allocate(frames_bytes if here else 0, 1, info, comm)
        self.words = MPI.Win.Allocate(words_bytes if here else 0, 1, info, comm)
        info.Free()
        if MPI.WIN_UNIFIED not in (self.frames.model, self.words.model):
            raise LaunchError(
                "this MPI library keeps separate copies of window memory (MPI_WIN_SEPARATE): use "
                "one with a unified memory model, such as MPICH or Open MPI on x86-64 or ARM"
            )
        for window in (self.frames, self.words):
            window.Lock_all(MPI.MODE_NOCHECK)

    def free(self) -> None:
        """Collective; only when nothing is under way."""
        for window in (self.words, self.frames):
            window.Unlock_all()
            window.Free()


class Inbox:
    """A server's end.  Construction and :meth:`free` are collective over ``comm``.

    Parameters
    ----------
    comm : MPI.Comm
        A communicator of the mailbox's own.
    origins : int
        How many ranks send.
    layout : FrameLayout
    slots : int
        Messages that an origin may have under way.
    """

    def __init__(self, comm: MPI.Intracomm, origins: int, layout: FrameLayout, slots: int) -> None:
        self.layout = layout
        count = origins * slots
        self._windows = _Windows(comm, comm.rank, count * layout.frame_bytes, count * ALIGN)
        memory: Any = self._windows
        raw = np.frombuffer(memory.frames, np.uint8)
        raw.fill(0)  # first touch, before the first Put
        words = np.frombuffer(memory.words, np.int64)
        words.fill(0)
        self._windows.words.Sync()
        self._words = words.reshape(origins, slots, ALIGN // 8)[:, :, 0]
        step = layout.frame_bytes
        self._frames = [
            [Frame(layout, raw[(i * slots + s) * step :][:step]) for s in range(slots)]
            for i in range(origins)
        ]
        self._slots = slots
        self._next = [1] * origins
        comm.Barrier()  # nobody puts before the words are zero

    def poll(self) -> list[Arrival]:
        """All messages that have arrived and were not returned before, each origin's in order."""
        self._windows.words.Sync()
        found: list[Arrival] = []
        for origin, words in enumerate(self._words.tolist()):
            k = self._next[origin]
            while words[k % self._slots] == k:
                found.append(Arrival(origin, k, self._frames[origin][k % self._slots]))
                k += 1
            if words[k % self._slots] > k:
                raise CommunicationError(
                    f"worker {origin} announced message {words[k % self._slots]} where {k} was due"
                )
            self._next[origin] = k
        if not found:
            return found
        self._windows.frames.Sync()  # after the word, before the frame
        for origin, k, frame in found:
            if not frame.intact(k):
                raise CommunicationError(
                    f"message {k} of worker {origin} arrived torn: this MPI library or network "
                    "does not keep the order that Win.Flush promises; run 'aladdin-mpi doctor'"
                )
        return found

    def free(self) -> None:
        """Collective; only when nothing is under way."""
        self._frames.clear()
        self._windows.free()


class Outbox:
    """An origin's end; used by one thread.  Construction and :meth:`free` are collective.

    Parameters
    ----------
    server : int
        The server's rank in ``comm``.
    index : int
        This origin's place among the server's origins; None for a rank that only takes part.

    Attributes
    ----------
    requests : list of MPI.Request
        Of the ranges that were put and may not have left yet.
    """

    def __init__(
        self, comm: MPI.Intracomm, server: int, index: int, layout: FrameLayout, slots: int
    ) -> None:
        self._windows = _Windows(comm, server, 0, 0)
        self._server = server
        self._slots = slots
        # where each slot begins, and the word that announces it: what to put, and where
        ring = range(index * slots, (index + 1) * slots)
        self._bases = [place * layout.frame_bytes for place in ring]
        self._places = [(place * ALIGN, 8, MPI.BYTE) for place in ring]
        self._words = [array("q", [0]) for _ in ring]
        self._sent = [MPI.REQUEST_NULL] * slots  # the words' puts
        self._sent_s = [0.0] * slots
        self._announced = 0  # the last message that was
        self.requests: list[MPI.Request] = []
        self._raw = np.empty(0, np.uint8)
        self._sequence = 0  # of the message begun, 0: none
        self._whole = False
        comm.Barrier()

    @property
    def busy(self) -> bool:
        """A message was begun and is not published yet."""
        return self._sequence != 0

    def start(
        self, raw: np.ndarray, sequence: int, stretches: Sequence[tuple[int, int]] = ()
    ) -> int:
        """Begin to send a frame, or only some ``(start, stop)`` of it; see :meth:`begin`.  Returns
        how many bytes.
        """
        self.begin(raw, sequence)
        stretches = stretches or [(0, raw.size)]
        for start, stop in stretches:
            self.put(start, stop)
        self._whole = True
        return sum(stop - start for start, stop in stretches)

    def begin(self, raw: np.ndarray, sequence: int) -> None:
        """Begin a message whose frame, ``raw``, is put range by range, as it becomes ready.

        A range that was put must stay as it is until :meth:`advance` returns True.  The caller
        knows that message ``sequence − slots`` has been acknowledged.
        """
        assert not self.busy, "one message at a time"
        self._raw, self._sequence = raw, sequence

    def put(self, start: int, stop: int) -> None:
        """Send the bytes ``start:stop`` of the frame."""
        base = self._bases[self._sequence % self._slots]
        for a in range(start, stop, PIECE_BYTES):
            size = min(PIECE_BYTES, stop - a)
            request = self._windows.frames.Rput(
                (self._raw, size, a, MPI.BYTE), self._server, (base + a, size, MPI.BYTE)
            )
            self.requests.append(request)

    def finish(self) -> None:
        """All ranges of the frame have been put."""
        self._whole = True

    def abandon(self) -> None:
        """Forget the message begun last, which is not whole yet; its number is free again.

        Returns when its ranges lie in the slot, so that others can be put over them.
        """
        if self.busy:
            MPI.Request.Waitall(self.requests)
            self._windows.frames.Flush(self._server)
            self.requests, self._sequence = [], 0

    def advance(self) -> bool:
        """Push the message started last further; True once it is published."""
        if not self._whole or not MPI.Request.Testall(self.requests):
            return False
        # The order is the protocol: the frame complete at the target, only then the word.
        self._windows.frames.Flush(self._server)
        slot = self._sequence % self._slots
        self._sent[slot].Wait()  # of a message that has been acknowledged
        word = self._words[slot]
        word[0] = self._sequence
        self._sent[slot] = self._windows.words.Rput(
            (word, 8, MPI.BYTE), self._server, self._places[slot]
        )
        self._sent_s[slot], self._announced = time.monotonic(), self._sequence
        self.requests, self._sequence, self._whole = [], 0, False
        return True

    def insist(self, acknowledged: int) -> None:
        """Flush the word of the message after ``acknowledged``, if it was put long ago."""
        due = acknowledged + 1
        since = time.monotonic() - self._sent_s[due % self._slots]
        if due <= self._announced and since > INSIST_S:
            self._windows.words.Flush(self._server)

    def free(self) -> None:
        """Collective; only when nothing is under way."""
        MPI.Request.Waitall(self._sent)
        self._windows.free()
