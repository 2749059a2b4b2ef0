"""The links of workers and server: channels, pushes, replies, copies, farewells."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from aladdin_mpi.comm import channel, mailbox, sender
from aladdin_mpi.comm.receiver import ServerChannel, ServerLink
from aladdin_mpi.comm.sender import WorkerChannel, WorkerLink
from aladdin_mpi.core.wire import Frame
from aladdin_mpi.errors import ModelError
from aladdin_mpi.messages import ChannelSpec, Notice, Push, Reply, Request, RequestKind

pytestmark = pytest.mark.ranks(at_least=2)

PUSHES, REPLY_PERIOD = 6, 2
FULL = RequestKind.EVALUATION
"""What a worker of these tests says when it has no room left."""


def a_spec(size: int = 1001, **changes: object) -> ChannelSpec:
    spec = ChannelSpec(
        entries=(("conv.weight", "(8, 3) float32"), ("conv.bias", "(8,) float32")),
        buffers=(("norm.mean", "(8,) float32"),),
        ranges=((0, size, 0),),
        size=size,
        floats=8,
        counts=1,
        options="aladdin period=4",
    )
    return spec._replace(**changes)


def fail(error: BaseException) -> None:
    traceback.print_exception(error)
    MPI.COMM_WORLD.Abort(1)


@pytest.fixture
def link(comm: MPI.Intracomm) -> ServerLink | WorkerLink:
    """This rank's link: rank 0 serves."""
    workers = list(range(1, comm.size))
    group = comm.group.Incl(workers)
    among = comm.Create_group(group) if comm.rank else None
    if among is None:
        return ServerLink(comm, workers)
    return WorkerLink(comm, 0, comm.rank - 1, len(workers), fail, among)


class Loop:
    """A little server: adds what is pushed, replies with the sum when asked.

    With ``hold``, nothing is acknowledged before every worker has said that it is full.
    """

    def __init__(self, link: ServerLink, hold: bool = False) -> None:
        self.link, self.hold = link, hold
        self.num_workers = len(link.workers)
        self.sums: list[np.ndarray] = []
        self.merged: list[list[int]] = []
        self.requests: list[Request] = []
        self.errors: list[ModelError] = []
        self._held: list[tuple[int, Notice]] = []
        self._owed: list[tuple[ServerChannel, int, Reply]] = []
        self._copies: list[tuple[int, int]] = []

    def count(self, kind: RequestKind) -> int:
        return sum(request.kind == kind for request in self.requests)

    def run(self) -> None:
        """Serve until everyone has said goodbye; then free the link."""
        while self.count(RequestKind.BYE) < self.num_workers:
            self.turn()
        self._copies += [(c.index, w) for c in self.link.channels for w in range(self.num_workers)]
        while self._copies:
            self.turn()
        self.link.close()
        self.link.free()

    def turn(self) -> None:
        self.link.progress()
        for request in self.link.requests():
            self.requests.append(request)
            if request.kind == RequestKind.FETCH:
                self._copies.append((request.channel, request.worker))
            if request.kind == RequestKind.REGISTER:
                if self.count(RequestKind.REGISTER) % self.num_workers == 0:
                    self.open()
        for end in self.link.channels:
            for arrival in end.arrivals():
                self.merge(end, arrival.frame.read_push(0), arrival.frame)
        if not self.hold or self.count(FULL) == self.num_workers:
            for worker, notice in self._held:
                self.link.notify(worker, notice)
            self._held.clear()
        for owed in list(self._owed):
            end, worker, reply = owed
            frame = end.reply_frame(worker)
            if frame is not None:
                frame.params[:] = self.sums[end.index]
                end.send_reply(worker, reply)
                self._owed.remove(owed)
        for index, worker in list(self._copies):
            end = self.link.channels[index]
            frame = end.copy_frame(worker)
            if frame is not None:
                frame.params[:] = self.sums[index]
                end.send_copy(worker, Reply(0, sum(self.merged[index]), 0, 1.0))
                self._copies.remove((index, worker))

    def open(self) -> None:
        try:
            end = self.link.open_channel()
        except ModelError as error:
            self.errors.append(error)
            return
        self.sums.append(end.initial.params.copy())
        self.merged.append([0] * self.num_workers)

    def merge(self, end: ServerChannel, push: Push, frame: Frame) -> None:
        merged = self.merged[end.index]
        assert push.sequence == merged[push.worker] + 1
        self.sums[end.index] += frame.params
        merged[push.worker] += 1
        if push.wants_reply:
            number = merged[push.worker] // REPLY_PERIOD
            reply = Reply(number, sum(merged), push.sequence, 0.25)
            self._owed.append((end, push.worker, reply))
        notice = Notice(end.index, push.sequence, sum(merged), 0, 0, 0, self.num_workers, False)
        self._held.append((push.worker, notice))


def initial(worker: int, spec: ChannelSpec) -> Callable[[Frame], None]:
    def fill(frame: Frame) -> None:
        frame.params[:] = 1000.0 * (1 + worker) + np.arange(spec.size) % 7

    return fill


def push_and_listen(end: WorkerChannel, worker: int, num_workers: int) -> list[Reply]:
    """Push 1, 2, 3, ... at this worker's own places; return the headers of the replies."""
    replies: list[Reply] = []

    def listen() -> None:
        while (reply := end.take_reply()) is not None:
            places = (
                reply.vector[worker::num_workers]
                - np.arange(reply.vector.size)[worker::num_workers] % 7
            )
            # worker 0's values at the start, and at least the pushes that were answered
            answered = 1000.0 + reply.header.sequence * (reply.header.sequence + 1) / 2
            assert (places >= answered).all()
            assert (places == places[0]).all()
            assert reply.finite
            replies.append(reply.header)
            reply.release()

    for number in range(1, PUSHES + 1):
        while end.in_flight() >= end.slots:
            end.wait_change(0.1)
            listen()
        frame = end.next_frame()
        frame.params[:] = 0
        frame.params[worker::num_workers] = number
        assert end.next_sequence == number
        end.submit(Push(worker, number, wants_reply=number % REPLY_PERIOD == 0))
    while end.in_flight() or len(replies) < PUSHES // REPLY_PERIOD:
        end.wait_change(0.1)
        listen()
    return replies


@pytest.mark.parametrize("piece_bytes", [1 << 30, 1000], ids=["whole", "in pieces"])
def test_a_run_over_two_channels(
    comm: MPI.Intracomm,
    link: ServerLink | WorkerLink,
    monkeypatch: pytest.MonkeyPatch,
    piece_bytes: int,
) -> None:
    monkeypatch.setattr(mailbox, "PIECE_BYTES", piece_bytes)
    specs = [a_spec(), a_spec(5003, options="aladdin period=2")]
    num_workers = comm.size - 1
    totals = [
        1000 + np.arange(spec.size, dtype=np.float32) % 7 + PUSHES * (PUSHES + 1) / 2
        for spec in specs
    ]
    if isinstance(link, ServerLink):
        loop = Loop(link)
        loop.run()
        assert [c.spec for c in link.channels] == specs
        assert loop.merged == [[PUSHES] * num_workers] * 2
        finals = loop.sums
    else:
        ends = []
        sent: list[int] = []
        for spec in specs:
            end, frame = link.open_channel(spec, initial(link.worker, spec))
            assert (frame.params == 1000.0 + np.arange(spec.size) % 7).all()
            end.on_sent = lambda times, notice: sent.append(notice.sequence)
            ends.append(end)
        for end in ends:
            replies = push_and_listen(end, link.worker, num_workers)
            assert [r.number for r in replies] == [1, 2, 3]
            assert [r.sequence for r in replies] == [2, 4, 6]
            assert all(r.alpha == 0.25 for r in replies)
            assert end.acknowledged == PUSHES
            assert end.last_notice is not None and end.last_notice.channel == end.index
            assert end.send_time_s > 0
            copy = end.fetch()
            own = copy.params[link.worker :: num_workers]
            assert (own == totals[end.index][link.worker :: num_workers]).all()
        assert sent == 2 * list(range(1, PUSHES + 1))
        threads: list[bool] = []
        finals = [frame.params for frame in link.close(lambda: threads.append(True))]
        assert threads == [True]
    for final, total in zip(finals, totals, strict=True):
        assert (final == total).all()


@pytest.mark.parametrize("slots", [1, 2])
def test_no_room_until_acknowledged(
    comm: MPI.Intracomm,
    link: ServerLink | WorkerLink,
    monkeypatch: pytest.MonkeyPatch,
    slots: int,
) -> None:
    if slots == 1:
        monkeypatch.setattr(channel, "ONE_SLOT_BYTES", 100)
    if isinstance(link, ServerLink):
        loop = Loop(link, hold=True)
        loop.run()
        assert loop.merged == [[slots + 1] * (comm.size - 1)]
    else:
        end, _ = link.open_channel(a_spec(), initial(link.worker, a_spec()))
        assert end.slots == slots
        for number in range(1, slots + 1):
            assert end.in_flight() == number - 1
            end.submit(Push(link.worker, number))
        end.wait_change(0.2)
        assert (end.in_flight(), end.acknowledged) == (slots, 0)
        link.tell(FULL, (1.0, 2.0))
        while end.in_flight() == slots:
            end.wait_change(0.1)
        end.submit(Push(link.worker, slots + 1))
        while end.in_flight():
            end.wait_change(0.1)
        link.close(lambda: None)


@pytest.mark.ranks(at_least=3)
def test_models_that_differ_are_named(comm: MPI.Intracomm, link: ServerLink | WorkerLink) -> None:
    spec = a_spec()
    odd_one = comm.size - 2
    other = (("conv.weight", "(8, 3) float32"), ("conv.bias", "(9,) float32"))
    cases = [
        (a_spec(entries=other), "parameter conv.bias (9,) float32 in place of conv.bias (8,)"),
        (a_spec(entries=spec.entries[:1]), "1 parameters in place of 2; .* is conv.bias"),
        (a_spec(buffers=(("norm.var", "(8,)"),)), "buffer norm.var (8,) in place of norm.mean"),
        (a_spec(options="downpour"), "runs 'downpour' and worker 0 'aladdin period=4'"),
        (a_spec(ranges=((0, 1001, 1),)), "groups its parameters in another way"),
    ]
    patterns = [f"worker {odd_one} .*{part}".replace("(", r"\(") for _, part in cases]
    patterns = [pattern.replace(")", r"\)") for pattern in patterns]
    if isinstance(link, ServerLink):
        loop = Loop(link)
        loop.run()
        for error, pattern in zip(loop.errors, patterns, strict=True):
            with pytest.raises(ModelError, match=pattern):
                raise error
            assert not error.silent
        assert loop.merged == [[PUSHES] * (comm.size - 1)]  # the channel that opened in the end
    else:
        for (changed, _), pattern in zip(cases, patterns, strict=True):
            mine = changed if link.worker == odd_one else spec
            with pytest.raises(ModelError, match=pattern) as caught:
                link.open_channel(mine, initial(link.worker, mine))
            assert caught.value.silent
        end, _ = link.open_channel(spec, initial(link.worker, spec))
        push_and_listen(end, link.worker, comm.size - 1)
        link.close(lambda: None)


def test_too_little_shared_memory_is_an_error_on_all_ranks(
    comm: MPI.Intracomm, link: ServerLink | WorkerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("left out: no /dev/shm")
    pattern = "needs 0 MiB of shared memory .* has 0 MiB free"
    if isinstance(link, ServerLink):
        full = SimpleNamespace(f_bavail=1, f_frsize=512)
        monkeypatch.setattr(channel.os, "statvfs", lambda path: full)
        loop = Loop(link)
        loop.run()
        with pytest.raises(ModelError, match=pattern):
            raise loop.errors[0]
    else:
        with pytest.raises(ModelError, match=pattern):
            link.open_channel(a_spec(), initial(link.worker, a_spec()))
        link.close(lambda: None)


def test_workers_exchange_bytes(comm: MPI.Intracomm, link: ServerLink | WorkerLink) -> None:
    if isinstance(link, ServerLink):
        Loop(link).run()
    else:
        workers = range(comm.size - 1)
        for size in (512, 4):
            found = link.exchange(b"worker %d" % link.worker, size)
            assert found == [(b"worker %d" % worker)[:size] for worker in workers]
        assert link.exchange(b"") == [b""] * len(workers)
        link.close(lambda: None)


def test_a_worker_that_is_busy_still_beats(
    comm: MPI.Intracomm, link: ServerLink | WorkerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(link, ServerLink):
        loop = Loop(link)
        loop.run()
        for worker in range(comm.size - 1):
            beats = [r for r in loop.requests if (r.kind, r.worker) == (RequestKind.BEAT, worker)]
            assert beats[-1].steps == 17
    else:
        monkeypatch.setattr(sender, "BEAT_S", 0.05)
        link.steps = 17
        time.sleep(1.5)  # computes, and says nothing
        link.close(lambda: None)
