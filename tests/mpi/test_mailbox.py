"""The mailbox towards a server, and the small messages beside it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from mailing import SERVER, Origin, Server, differs, write
from mpi4py import MPI

from aladdin_mpi.comm import control, mailbox
from aladdin_mpi.comm.control import NOTICE, REQUEST, SmallReceiver, SmallSender
from aladdin_mpi.core.wire import Arrival, Frame, FrameLayout
from aladdin_mpi.errors import CommunicationError
from aladdin_mpi.messages import Notice, Phase, Request, RequestKind

pytestmark = pytest.mark.ranks(at_least=2)

Together = Callable[[Callable[[], None]], None]

TINY, ODD, LONG = FrameLayout(1), FrameLayout(1001, 7, 3), FrameLayout(20_011, 130, 5)
MESSAGES = 25


def test_pieces_cover_a_frame_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "PIECE_BYTES", 64)
    assert mailbox.pieces(64) == [(0, 64)]
    assert mailbox.pieces(130) == [(0, 64), (64, 128), (128, 130)]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(
    ("layout", "piece_bytes"),
    [(TINY, 1 << 30), (ODD, 1 << 30), (LONG, 1 << 30), (LONG, 4096), (LONG, 1000)],
    ids=["tiny", "odd", "long", "pieces", "odd pieces"],
)
def test_every_message_arrives_once_whole_and_in_order(
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
    layout: FrameLayout,
    piece_bytes: int,
    slots: int,
) -> None:
    monkeypatch.setattr(mailbox, "PIECE_BYTES", piece_bytes)
    seen: list[list[int]] = [[] for _ in range(comm.size - 1)]
    wrong: list[str] = []

    def take(arrival: Arrival) -> None:
        push = arrival.frame.read_push(0)
        if (push.worker, push.sequence) != (arrival.origin, arrival.sequence):
            wrong.append(f"{push} is not {arrival.origin}, {arrival.sequence}")
        if differs(arrival.frame, push.worker, push.sequence):
            wrong.append(f"the content of {push}")
        seen[arrival.origin].append(arrival.sequence)

    if comm.rank == SERVER:
        server = Server(comm, layout, slots)
        server.serve(take)
        server.free()
        assert not wrong
        assert seen == [list(range(1, MESSAGES + 1))] * (comm.size - 1)
    else:
        origin = Origin(comm, layout, slots)
        for number in range(1, MESSAGES + 1):
            origin.wait_for_room()
            write(origin.next_frame, origin.worker, number)
            origin.send(last=number == MESSAGES)
        origin.finish()
        origin.free()


@pytest.mark.parametrize("slots", [1, 2])
def test_a_slot_is_free_only_after_its_acknowledgement(
    comm: MPI.Intracomm, together: Together, slots: int
) -> None:
    server = Server(comm, ODD, slots) if comm.rank == SERVER else None
    origin = None if server else Origin(comm, ODD, slots)
    held: dict[int, list[Arrival]] = {}

    def fill() -> None:
        for number in range(1, slots + 1) if origin else ():
            assert origin.room
            write(origin.next_frame, origin.worker, number)
            origin.send()
            origin.wait(lambda: not origin._box.busy)
        assert origin is None or not origin.room

    def receive() -> None:
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            for arrival in server.poll() if server else ():
                held.setdefault(arrival.origin, []).append(arrival)
            if origin:
                origin.progress()
                assert not origin.room
            time.sleep(0.001)
        for worker, arrivals in held.items():
            assert [a.sequence for a in arrivals] == list(range(1, slots + 1))
            assert not any(differs(a.frame, worker, a.sequence) for a in arrivals)
        assert len(held) == (comm.size - 1 if server else 0)

    def free_one() -> None:
        if server:
            for arrivals in held.values():
                server.acknowledge(arrivals[0])
            while not server._notices.idle:
                server.poll()
        else:
            origin.wait_for_room()
            assert origin.acknowledged == 1
            origin.send()
            origin.wait(lambda: not origin._box.busy)
            assert not origin.room

    for step in (fill, receive, free_one):
        together(step)
    (server or origin).free()


def test_a_torn_message_is_refused(comm: MPI.Intracomm) -> None:
    if comm.rank == SERVER:
        server = Server(comm, ODD, 2)
        with pytest.raises(CommunicationError, match="message 1 of worker 0 arrived torn"):
            while True:
                server.poll()
        comm.Barrier()
        server.free()
    else:
        origin = Origin(comm, ODD, 2)
        if origin.worker == 0:
            frame = origin.next_frame
            whole = frame.write_push

            class Torn(Frame):
                def write_push(self, push: object) -> None:
                    whole(push)
                    self._trailer[0] = 7

            origin._frames[1] = Torn(ODD, frame.raw)
            origin.send()
            origin.wait(lambda: not origin._box.busy)
        comm.Barrier()
        origin.free()


def test_a_number_that_is_not_due_is_refused(comm: MPI.Intracomm) -> None:
    if comm.rank == SERVER:
        server = Server(comm, TINY, 2)
        with pytest.raises(CommunicationError, match="worker 0 announced message 3 where 1 was"):
            while True:
                server.poll()
        comm.Barrier()
        server.free()
    else:
        origin = Origin(comm, TINY, 2)
        if origin.worker == 0:
            origin.sent = 2
            origin._box.start(origin.next_frame.raw, 3)
            origin.wait(lambda: not origin._box.busy)
        comm.Barrier()
        origin.free()


class Counted:
    """A window that knows how often it was flushed."""

    def __init__(self, window: MPI.Win) -> None:
        self._window, self.flushes = window, 0

    def Flush(self, rank: int) -> None:
        self.flushes += 1
        self._window.Flush(rank)

    def __getattr__(self, name: str) -> object:
        return getattr(self._window, name)


def test_a_word_is_flushed_only_when_it_has_no_answer_for_long(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.rank == SERVER:
        server = Server(comm, TINY, 2)
        comm.Barrier()
        server.serve(lambda arrival: None)
    else:
        origin = Origin(comm, TINY, 2)
        words = origin._box._windows.words = Counted(origin._box._windows.words)  # type: ignore[assignment]
        origin._box.insist(0)  # nothing has been sent
        for last in (False, True):
            origin.send(last)
            origin.wait(lambda: not origin._box.busy)
        origin._box.insist(0)
        assert words.flushes == 0
        monkeypatch.setattr(mailbox, "INSIST_S", 0.0)
        origin._box.insist(0)
        assert words.flushes == 1
        comm.Barrier()  # the server looks from here on
        origin.finish()
        origin._box.insist(2)
        assert words.flushes == 1
        origin.free()
        return
    server.free()


# ---------------------------------------------------------------------------- small messages


def some_notice(worker: int, number: int) -> Notice:
    return Notice(1, number, 2**40 + number, 3, number * worker, 5, worker, number % 3 == 0)


def some_request(worker: int, number: int) -> Request:
    values = (number / 7, float("inf"), -0.0, 1e-300, 5.0, 6.0)
    kind, phase = RequestKind(1 + number % 6), Phase(number % 8)
    return Request(kind, worker, phase, number / 3, number, 2, values)


BURST = 1000


def test_bursts_of_small_messages_keep_their_order(comm: MPI.Intracomm) -> None:
    workers = range(comm.size - 1)
    if comm.rank == SERVER:
        sender = SmallSender(comm, control.TAG_NOTICE, NOTICE)
        sources = [worker + 1 for worker in workers]
        receiver = SmallReceiver(
            comm, control.TAG_REQUEST, REQUEST, sources, control.unpack_request
        )
        pack, message, peers = control.pack_notice, some_notice, workers
    else:
        sender = SmallSender(comm, control.TAG_REQUEST, REQUEST)
        receiver = SmallReceiver(comm, control.TAG_NOTICE, NOTICE, [SERVER], control.unpack_notice)
        pack, message, peers = control.pack_request, some_request, [comm.rank - 1]
    for number in range(BURST):
        for worker in peers:
            record = sender.record()
            pack(record, message(worker, number))
            sender.send(record, worker + 1 if comm.rank == SERVER else SERVER)
    found: list[Request | Notice] = []
    while len(found) < BURST * len(peers) or not sender.idle:
        sender.test()
        found += receiver.poll()
        time.sleep(1e-5)
    comm.Barrier()
    assert not receiver.poll()
    receiver.cancel()
    for worker in peers:
        if comm.rank == SERVER:
            mine = [entry for entry in found if entry.worker == worker]
            wanted = [some_request(worker, number) for number in range(BURST)]
        else:
            mine, wanted = found, [some_notice(worker, number) for number in range(BURST)]
        assert mine == wanted


def test_short_requests_are_filled_up_and_buffers_used_again(comm: MPI.Intracomm) -> None:
    sender = SmallSender(comm, control.TAG_REQUEST, REQUEST)
    receiver = SmallReceiver(
        comm, control.TAG_REQUEST, REQUEST, [comm.rank], control.unpack_request
    )
    for round_ in range(10):
        record = sender.record()
        control.pack_request(record, Request(RequestKind.BEAT, comm.rank, steps=round_))
        sender.send(record, comm.rank)
        found: list[Request] = []
        while not found or not sender.idle:
            sender.test()
            found += receiver.poll()
        (request,) = found
        assert request[:-1] == (RequestKind.BEAT, comm.rank, 0, 0.0, round_, 0)
        assert np.isnan(request.values).all()
    assert len(sender._free) == 1
    receiver.cancel()
