"""Torn and stale messages: none with the mailbox's order of calls, some when it is turned round."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from mailing import SERVER, Origin, Server
from mpi4py import MPI

from aladdin_mpi.comm.mailbox import Outbox
from aladdin_mpi.core.wire import Frame, FrameLayout

# Whoever looks must run at the same time as the one who writes; five ranks seldom do.
pytestmark = [pytest.mark.ranks(at_least=2, at_most=3), pytest.mark.timeout(120)]

FAULT_S = 60.0
"""How long the fault may take to show: milliseconds on a free machine."""


class Hasty(Outbox):
    """Announces a message before it puts the frame, every other time as over a slow link."""

    def start(self, raw: np.ndarray, sequence: int) -> None:
        self.begin(raw, sequence)
        self.finish()
        super().advance()  # nothing is under way: puts the word only
        if sequence % 2:
            time.sleep(2e-4)
        super().start(raw, sequence)

    def advance(self) -> bool:
        if not all(request.Test() for request in self.requests):
            return False
        self._windows.frames.Flush(self._server)
        self.requests, self._sequence, self._whole = [], 0, False
        return True


def exchange(
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
    layout: FrameLayout,
    outbox: type[Outbox],
    messages: int,
    limit_s: float,
) -> tuple[int, int]:
    """Send messages that are full of their number; how many were looked at, and were torn.

    Ends after ``messages`` of each worker, at the time limit, or when some are torn.  Collective.
    """
    count = np.zeros(2, np.int64)
    whole = Frame.intact

    def look(frame: Frame, sequence: int) -> bool:
        """Every word, as soon as the inbox has seen the message's number."""
        right = bool((frame.params == sequence).all()) and whole(frame, sequence)
        count[:] += 1, not right
        return True  # the inbox shall go on

    monkeypatch.setattr(Frame, "intact", look)
    if comm.rank == SERVER:
        server = Server(comm, layout, 2)
        deadline = time.monotonic() + limit_s
        ended = comm.Ibarrier()
        while not ended.Test():
            for arrival in server.poll():
                server.stop = bool(count[1]) or time.monotonic() > deadline
                server.acknowledge(arrival)
            os.sched_yield()
        server.free()
    else:
        origin = Origin(comm, layout, 2, outbox)
        while origin.sent < messages and not (origin.notice and origin.notice.stop):
            origin.next_frame.params.fill(origin.sent + 1)
            origin.send()
            origin.wait(lambda: origin.room, pause_s=0)
        origin.finish()
        comm.Ibarrier().Wait()
        origin.free()
    comm.Bcast(count, SERVER)
    return int(count[0]), int(count[1])


@pytest.mark.parametrize(
    ("size", "messages"), [(4_099, 4000), (262_144, 300)], ids=["16 KiB", "1 MiB"]
)
def test_no_message_is_torn(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, size: int, messages: int
) -> None:
    looked_at, torn = exchange(comm, monkeypatch, FrameLayout(size), Outbox, messages, 600.0)
    assert (looked_at, torn) == (messages * (comm.size - 1), 0)


def test_messages_announced_too_early_are_torn(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above is able to find something."""
    layout = FrameLayout(262_144)
    _, torn = exchange(comm, monkeypatch, layout, Hasty, 1_000_000, FAULT_S)
    assert torn
