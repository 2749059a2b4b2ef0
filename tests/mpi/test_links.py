"""The links of workers and server: channels, pushes, replies, copies, farewells."""

from __future__ import annotations

import os
import time
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
from linking import FULL, PUSHES, Loop, a_spec, initial, push_and_listen
from mpi4py import MPI

from aladdin_mpi.comm import channel, mailbox, memory, thread
from aladdin_mpi.comm.receiver import ServerLink
from aladdin_mpi.comm.routes import Routes
from aladdin_mpi.comm.sender import WorkerLink
from aladdin_mpi.core import kernels
from aladdin_mpi.errors import ModelError
from aladdin_mpi.messages import Push, RequestKind

pytestmark = pytest.mark.ranks(at_least=2)


def fail(error: BaseException) -> None:
    traceback.print_exception(error)
    MPI.COMM_WORLD.Abort(1)


@pytest.fixture
def link(comm: MPI.Intracomm) -> ServerLink | WorkerLink:
    """This rank's link: rank 0 serves."""
    kernels.warm_up()  # replies are checked by one
    workers = list(range(1, comm.size))
    routes = Routes((-1,) * len(workers))
    group = comm.group.Incl(workers)
    among = comm.Create_group(group) if comm.rank else None
    if among is None:
        return ServerLink(comm, comm, workers, [], routes)
    return WorkerLink(comm, [0], [comm], comm.rank - 1, len(workers), fail, among, routes)


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


@pytest.mark.parametrize(
    ("lacks", "pattern"),
    [
        ("shared", r"0 MiB of shared memory are needed .* has 0 MiB free: enlarge it"),
        ("all", r"0 MiB are needed by the \d rank\(s\) on host .* and 0 MiB are available: put"),
    ],
)
def test_too_little_memory_is_an_error_on_all_ranks(
    comm: MPI.Intracomm, link: ServerLink | WorkerLink, monkeypatch: pytest.MonkeyPatch,
    lacks: str, pattern: str,
) -> None:  # fmt: skip
    if not os.path.isdir("/dev/shm"):
        pytest.skip("left out: no /dev/shm")
    if isinstance(link, ServerLink):
        full = SimpleNamespace(f_bavail=1, f_frsize=512)
        if lacks == "shared":
            monkeypatch.setattr(memory.os, "statvfs", lambda path: full)
        else:
            monkeypatch.setattr(memory, "available_bytes", lambda: 512)
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
        monkeypatch.setattr(thread, "BEAT_S", 0.05)
        link.steps = 17
        time.sleep(1.5)  # computes, and says nothing
        link.close(lambda: None)


def test_ranges_sent_ahead_and_ranges_abandoned(
    comm: MPI.Intracomm, link: ServerLink | WorkerLink
) -> None:
    """Pushes 1 to 4 add 1 to 4 everywhere; what was sent ahead and given up adds nothing."""
    spec = a_spec()
    if isinstance(link, ServerLink):
        loop = Loop(link)
        loop.run()
        expected = 1000 + np.arange(spec.size, dtype=np.float32) % 7 + 10 * (comm.size - 1)
        assert (loop.sums[0] == expected).all()
        return
    end, _ = link.open_channel(spec, initial(link.worker, spec))
    for number in range(1, 5):
        frame = end.next_frame()
        given_up = number % 2 == 0
        frame.params[:] = 99 if given_up else number
        end.send_range(600, spec.size)
        end.send_range(200, 600)
        if given_up:
            end.abandon()
            end.wait_change(0.01)
            if number == 4:  # and once more ahead
                frame.params[:] = number
                end.send_range(0, spec.size)
        if number == 3:  # the whole vector ahead
            end.send_range(0, 200)
        frame.params[:] = number
        end.submit(Push(link.worker, number))
        while end.in_flight():
            end.wait_change(0.1)
    link.close(lambda: None)
