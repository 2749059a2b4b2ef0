"""The links of workers where there is no server: messages, sums, farewells."""

from __future__ import annotations

import time
import traceback

import numpy as np
import pytest
from linking import a_spec, initial
from mpi4py import MPI

from aladdin_mpi.comm.peers import PeerChannel, PeerLink
from aladdin_mpi.core import kernels
from aladdin_mpi.messages import PeerHeader

pytestmark = pytest.mark.ranks(at_least=2)

MESSAGES = 12


def fail(error: BaseException) -> None:
    traceback.print_exception(error)
    MPI.COMM_WORLD.Abort(1)


@pytest.fixture
def link(comm: MPI.Intracomm) -> PeerLink:
    kernels.warm_up()
    return PeerLink(comm, fail)


def take_all(channel: PeerChannel, seen: dict[int, list[int]]) -> None:
    """Check and note what has come."""
    while (message := channel.take()) is not None:
        worker, number = message.header.worker, message.header.iteration
        assert message.header.sequence == number + 1
        assert (message.vector == 100 * worker + number).all()
        seen[worker].append(number)
        message.release()


@pytest.mark.parametrize("size", [7, 300_001], ids=["small", "large"])
def test_everybody_floods_everybody(comm: MPI.Intracomm, link: PeerLink, size: int) -> None:
    """Every message comes, whole and in order, also to one that takes nothing for a while."""
    channel, _ = link.open_channel(a_spec(size), initial(link.worker, a_spec(size)))
    channel.use_messages()
    seen: dict[int, list[int]] = {other: [] for other in link.others}
    made = dict.fromkeys(link.others, 0)
    lazy_until = time.monotonic() + (0.3 if link.worker == 0 else 0.0)
    while any(number < MESSAGES for number in made.values()):
        for other, number in made.items():

            def write(out: np.ndarray, value: int = 100 * link.worker + number) -> None:
                out[:] = value

            if number < MESSAGES and channel.try_send(
                other, write, PeerHeader(link.worker, number)
            ):
                made[other] += 1
        channel.wait_change(0.05)
        if time.monotonic() > lazy_until:
            take_all(channel, seen)
    channel.leave(MESSAGES)
    while not channel.all_ended():
        channel.wait_change(0.05)
        take_all(channel, seen)
    take_all(channel, seen)
    assert seen == {other: list(range(MESSAGES)) for other in link.others}
    link.close(lambda: None)


def test_a_late_message_holds_up_nobody_elses(comm: MPI.Intracomm, link: PeerLink) -> None:
    """What is whole is handed out before the older ones that are not, each worker's in order."""

    class Receive:
        def __init__(self, there: bool) -> None:
            self.there = there

        def Test(self) -> bool:
            return self.there

    spec = a_spec(7)
    channel, _ = link.open_channel(spec, initial(link.worker, spec))
    receives = [Receive(False), Receive(True), Receive(True), Receive(False)]
    for number, (source, receive) in enumerate(zip((5, 5, 6, 6), receives, strict=True)):
        frame = channel.layout.new_frame()
        frame.params[:] = 1.0
        frame.write_peer(PeerHeader(source, number, sequence=1))
        channel._receiving.append((source, frame, receive))

    def held() -> list[int]:
        channel._hold_arrived()
        numbers = [message.header.iteration for message in channel._held]
        channel._held.clear()
        return numbers

    assert link.ask(held) == [2]
    receives[0].there = True
    assert link.ask(held) == [0, 1]
    receives[3].there = True
    assert link.ask(held) == [3]
    channel.leave(0)
    link.close(lambda: None)
