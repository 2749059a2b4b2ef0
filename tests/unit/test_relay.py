"""What a relay sends together, and sums that have the same bits whoever adds them up."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aladdin_mpi.algorithms import find
from aladdin_mpi.comm.routes import Routes
from aladdin_mpi.core.encoding import find as find_encoding
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.memory import needs
from aladdin_mpi.core.pairwise import add_pairwise, subtrees
from aladdin_mpi.core.snapshots import Snapshots
from aladdin_mpi.core.wire import Frame, FrameLayout
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.messages import Apply, ChannelSpec, Merge, Push, Reply, Send
from aladdin_mpi.runtime.expecting import Answered, GoingOn
from aladdin_mpi.runtime.globals import GlobalModel
from aladdin_mpi.runtime.options import check_merging, configure
from aladdin_mpi.runtime.relay import Gathering, RelayLoop, Waiting


def waits(worker: int, sequence: int = 1, **header: Any) -> Waiting:
    push = Push(worker, sequence, **{"active": 4, "iteration_s": 0.1, **header})
    return Waiting(FrameLayout(16).new_frame(), push, True)


def who(message: list[Waiting]) -> list[tuple[int, int]]:
    return [(one.push.worker, one.push.sequence) for one in message]


def test_what_is_there_goes_together() -> None:
    gathering = Gathering([0, 1, 2], 4, rounds=False, applies=True, expecting=GoingOn())
    for one in (waits(2), waits(0), waits(2, 2)):
        gathering.add(one, 0.0)
    assert who(gathering.take(1.0)) == [(2, 1), (0, 1), (2, 2)]
    assert gathering.take(1.0) == []


@pytest.mark.parametrize("other", [{"active": 3}, {"rates": (0.1,)}, {"cut": 1}], ids=str)
def test_what_the_server_treats_in_another_way_goes_apart(other: dict[str, Any]) -> None:
    gathering = Gathering([0, 1, 2], 4, rounds=False, applies=True, expecting=GoingOn())
    for one in (waits(0), waits(1, **other), waits(2), waits(1, 2), waits(2, 2, **other)):
        gathering.add(one, 0.0)
    assert who(gathering.take(1.0)) == [(0, 1), (2, 1)]
    assert who(gathering.take(1.0)) == [(1, 1), (2, 2)]
    assert who(gathering.take(1.0)) == [(1, 2)]


def test_a_message_waits_for_one_that_is_due_but_not_longer_than_the_last_one_took() -> None:
    gathering = Gathering([0, 1], 2, rounds=False, applies=True, expecting=GoingOn())
    gathering.expecting.merged(
        [waits(0).push, waits(1).push], now=10.0, message_s=0.15
    )  # both are due at 10.1
    gathering.add(waits(0, 2), 0.0)
    assert gathering.take(10.05) == [], "worker 1 is due"
    assert who(gathering.take(10.11)) == [(0, 2)], "it has not come in time"
    gathering.expecting.merged([waits(0).push, waits(1).push], now=20.0, message_s=0.05)
    gathering.add(waits(0, 3), 0.0)
    assert who(gathering.take(20.03)) == [(0, 3)], "it is due too late"
    gathering.expecting.merged([waits(0).push, waits(1).push], now=30.0, message_s=0.15)
    gathering.add(waits(1, 3, last=True), 0.0)
    gathering.add(waits(0, 4), 0.0)
    assert who(gathering.take(30.01)) == [(1, 3), (0, 4)], "there is nobody else"


def test_workers_that_wait_for_answers_come_together() -> None:
    expecting = Answered()
    gathering = Gathering([0, 1], 2, rounds=False, applies=True, expecting=expecting)
    gathering.add(waits(0), 10.0)
    assert who(gathering.take(10.0)) == [(0, 1)], "nothing is known of the others"
    expecting.sent([0], 10.0)
    gathering.add(waits(1), 10.05)
    assert who(gathering.take(10.05)) == [(1, 1)], "nor how long a message takes"
    expecting.sent([1], 10.05)
    expecting.answered(0, 10.2)  # a message and its answer take 0.2
    gathering.add(waits(0, 2), 10.3)  # it computes for 0.1
    assert who(gathering.take(10.3)) == [(0, 2)]
    expecting.sent([0], 10.3)
    expecting.answered(1, 10.35)  # 0.3
    gathering.add(waits(1, 2), 10.45)
    assert gathering.take(10.45) == [], "the other's answer is on its way"
    expecting.answered(0, 10.5)  # 0.2
    assert gathering.take(10.55) == [], "it computes"
    gathering.add(waits(0, 3), 10.6)
    assert who(gathering.take(10.6)) == [(1, 2), (0, 3)]
    expecting.sent([0, 1], 10.6)
    expecting.answered(0, 10.8)
    expecting.answered(1, 10.8)
    gathering.add(waits(1, 3), 10.9)
    assert gathering.take(10.9) == []
    assert who(gathering.take(10.926)) == [(1, 3)], "a quarter later than the last time"


def test_an_answer_that_does_not_come_or_long_computing_holds_nobody_up() -> None:
    expecting = Answered()
    gathering = Gathering([0, 1], 2, rounds=False, applies=True, expecting=expecting)
    for worker in (0, 1):
        gathering.add(waits(worker), 0.0)
    assert len(gathering.take(0.0)) == 2
    expecting.sent([0, 1], 0.0)
    expecting.answered(0, 1.0)
    expecting.answered(1, 1.0)
    for worker in (0, 1):
        gathering.add(waits(worker, 2), 1.4)
    assert len(gathering.take(1.4)) == 2
    expecting.sent([0, 1], 1.4)
    expecting.answered(0, 2.4)
    gathering.add(waits(0, 3), 2.8)
    assert gathering.take(2.8) == [] and gathering.take(3.1) == []
    assert who(gathering.take(3.2)) == [(0, 3)], "1.25 trips and 1.25 times computing after 1.4"
    gathering.add(waits(1, 3), 4.0)
    assert who(gathering.take(4.0)) == [(1, 3)]
    expecting.sent([1], 4.0)
    expecting.answered(1, 5.0)
    gathering.add(
        waits(1, 4), 7.0
    )  # it computes for twice as long as a message and its answer take
    assert len(gathering.take(7.0)) == 1
    expecting.sent([1], 7.0)
    expecting.answered(1, 8.0)
    gathering.add(waits(0, 4), 8.0)
    assert who(gathering.take(8.0)) == [(0, 4)]


def test_rounds_wait_for_all_that_train() -> None:
    gathering = Gathering([1, 2, 3], 4, rounds=True, applies=True, expecting=GoingOn())
    gathering.add(waits(3), 0.0)
    gathering.add(waits(1), 0.0)
    assert gathering.take(0.0) == []
    gathering.add(waits(2), 0.0)
    assert [who(gathering.take(0.0)) for _ in range(3)] == [[(1, 1)], [(2, 1), (3, 1)], []]
    gathering.add(waits(2, 2, iterations=0), 0.0)  # its gradient was not finite
    assert who(gathering.take(0.0)) == [(2, 2)], "nothing to add up"
    gathering.add(waits(1, 2, iterations=0, last=True), 0.0)
    assert who(gathering.take(0.0)) == [(1, 2)]
    gathering.add(waits(3, 2), 0.0)
    assert who(gathering.take(0.0)) == [(3, 2)], "all of this round have answered"
    for one in (waits(3, 3), waits(2, 3)):
        gathering.add(one, 0.0)
    assert who(gathering.take(0.0)) == [(2, 3), (3, 3)], "without the one that has left"


def test_a_round_of_which_nobody_has_a_gradient_is_over() -> None:
    gathering = Gathering([0, 1], 2, rounds=True, applies=True, expecting=GoingOn())
    for worker in (0, 1):
        gathering.add(waits(worker, iterations=0), 0.0)
        assert who(gathering.take(0.0)) == [(worker, 1)]
    gathering.add(waits(0, 2), 0.0)
    assert gathering.take(0.0) == []


@settings(deadline=None)  # the first call loads the kernels
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(
    st.just(n), st.lists(st.integers(0, 4), min_size=n, max_size=n)
)))  # fmt: skip
def test_any_sharing_of_workers_among_relays_gives_the_same_bits(
    case: tuple[int, list[int]],
) -> None:
    n, relay_of = case
    rng = np.random.default_rng(n)
    vectors = [
        (rng.standard_normal(48) * 10.0 ** rng.integers(-6, 6)).astype(np.float32) for _ in range(n)
    ]
    whole = np.zeros(48, np.float32)
    add_pairwise(whole, range(n), vectors)
    numbers, parts = [], []
    for relay in range(5):
        mine = [worker for worker in range(n) if relay_of[worker] == relay]
        groups = subtrees(mine, n)
        assert sorted(itertools.chain(*groups)) == mine
        for group in groups:
            part = np.zeros(48, np.float32)
            add_pairwise(part, group, [vectors[worker] for worker in group])
            numbers.append(group[-1])
            parts.append(part)
    together = np.zeros(48, np.float32)
    add_pairwise(together, numbers, parts)
    assert np.array_equal(together, whole)
    np.testing.assert_allclose(whole, np.sum(vectors, axis=0, dtype=np.float64), rtol=1e-3, atol=1)


def test_pairwise_by_hand() -> None:
    big, one = np.float32(2**24), np.float32(1)  # big + one rounds to big
    total = np.zeros(1, np.float32)
    add_pairwise(total, [0, 1, 2, 3], [np.full(1, v, np.float32) for v in (big, one, one, one)])
    assert total[0] == 2**24 + 2, "(big + 1) + (1 + 1)"
    total[0] = 0
    add_pairwise(total, [0, 2, 3], [np.full(1, v, np.float32) for v in (one, big, -big)])
    assert total[0] == 1, "1 + (big − big): 1 is alone below its node"


def test_groups_below_one_node() -> None:
    assert subtrees([4, 5, 6, 7], 8) == [[4, 5, 6, 7]]
    assert subtrees([3, 4, 5, 6], 8) == [[3], [4, 5], [6]]
    assert subtrees([4, 5, 6], 7) == [[4, 5, 6]], "there is no worker 7"
    assert subtrees([], 4) == []


def test_routes() -> None:
    routes = Routes((-1, 0, 0, 1, 1, 1, -1), rounds=True)
    assert (routes.relays, routes.largest, routes.workers_of(1)) == (2, 3, [3, 4, 5])
    assert routes.senders == [1, 7, 8, 9]
    assert routes.sender_of == [0, 2, 2, 3, 3, 3, 1]
    assert routes.most_groups() == 2
    assert Routes((-1, -1)).senders == [1, 2]


class Link:
    """A relay's link that keeps what is sent."""

    stop, over = 0, False

    def __init__(self, layout: FrameLayout, spec: ChannelSpec, workers: list[int]) -> None:
        self.index, self.spec, self.push_layout, self.size = 0, spec, layout, layout.size
        self.workers, self.channels = workers, [self]
        self.waiting: list[Any] = []
        self.sent: list[Frame] = []
        self.busy = False

    def arrivals(self) -> list[Any]:
        found, self.waiting = self.waiting, []
        return found

    def in_flight(self) -> int:
        return int(self.busy)

    def next_frame(self) -> Frame | None:
        return None if self.busy else self.push_layout.new_frame()

    def submit(self, frame: Frame, count: int) -> int:
        frame.write_merged(0, len(self.sent) + 1, count)
        self.sent.append(frame)
        self.busy = True
        return frame.raw.size

    def progress(self) -> bool:
        return True

    def tell(self, kind: Any) -> None: ...

    def close(self) -> None: ...

    def put(self, worker: int, values: Any, sequence: int = 1, **header: Any) -> None:
        class Arrival:
            frame = FrameLayout(self.size, self.push_layout.floats).new_frame()

        Arrival.frame.params[:] = values
        Arrival.frame.nonfinite = np.count_nonzero(~np.isfinite(Arrival.frame.params))
        Arrival.frame.floats[:] = 10.0 * worker
        Arrival.frame.write_push(Push(worker, sequence, **{"active": 2, **header}))
        self.waiting.append(Arrival)


class Rows:
    def add(self, table: str, row: Any) -> None: ...


SPEC = ChannelSpec((("x", "f4"),), (), ((0, 64, 0),), 64, 1, 0, "toy", 0.9, 0.0)


def relayed(wire: str, feedback: bool = True) -> tuple[Link, RelayLoop, GlobalModel]:
    """A relay of two workers, and a server's model with ALADDIN's rules."""
    spec = SPEC._replace(wire=wire)
    link = Link(FrameLayout(64, 1, 0, find_encoding(wire), parts=4), spec, [0, 1])
    row, config = find("aladdin"), configure("aladdin", {})
    assert row.server is not None
    model = GlobalModel(
        spec, FrameLayout(64, 1).new_frame(), row.server(config, 2), 2, lambda: None
    )
    return link, RelayLoop(link, 2, False, False, False, feedback, Rows()), model


def test_a_message_is_handled_as_the_pushes_in_it() -> None:
    link, loop, model = relayed("float32")
    link.put(0, 2.0, 1, iterations=4, samples=5, wants_reply=True)
    link.put(1, 4.0, 7, iterations=2, samples=6)
    loop.turn()
    handled, sends, passes = model.handle(link.sent)
    assert [(h.push.worker, h.push.sequence, h.push.samples) for h in handled] == [
        (0, 1, 5), (1, 7, 6),
    ]  # fmt: skip
    assert [h.frees for h in handled] == [None, (0, 1)], "the slot is free after the last one"
    assert (model.frame.params == 3.0).all(), "(2 + 4) / 2"
    assert model.frame.floats[0] == 5.0, "the mean of 0 and 10, of all workers"
    assert model.last_merged == [1, 7]
    assert list(sends) == [0]
    assert (passes[0].merged, passes[0].messages, model.version) == (2, 1, 2)


def test_what_is_not_finite_is_left_out_and_told() -> None:
    link, loop, model = relayed("float32")
    link.put(0, np.nan)
    link.put(1, 4.0)
    loop.turn()
    handled, _, _ = model.handle(link.sent)
    assert [h.nonfinite for h in handled] == [True, False]
    assert (model.frame.params == 2.0).all()


@pytest.mark.parametrize("wire", ["bfloat16", "topk:0.25"])
def test_what_a_narrow_message_leaves_out_comes_with_the_next(wire: str) -> None:
    link, loop, model = relayed(wire)
    values = np.linspace(-1, 1, 64, dtype=np.float32) / 3
    for sequence in range(1, 13):
        link.busy = False
        link.put(0, values if sequence == 1 else 0.0, sequence)
        loop.turn()
        model.handle(link.sent[-1:])
    np.testing.assert_allclose(model.frame.params, values / 2, atol=2e-6)


def test_gradients_of_one_message_are_applied_in_one_step() -> None:
    class Rules:
        def on_push(self, push: Push) -> list[Any]:
            return [Merge("sum", 1.0), Apply((0.1,), 0.5), Send(push.worker, 1.0)]

        def on_leave(self, worker: int) -> list[Any]:
            return []

    link, loop, _ = relayed("float32")
    model = GlobalModel(SPEC, FrameLayout(64, 1).new_frame(), Rules(), 2, lambda: None)
    link.put(0, 1.0, rates=(0.1,))
    link.put(1, 3.0, rates=(0.1,))
    loop.turn()
    _, sends, _ = model.handle(link.sent)
    np.testing.assert_allclose(model.frame.params, -0.1 * 0.5 * 4.0)
    assert sorted(sends) == [0, 1]


def test_a_reply_for_several_workers() -> None:
    frame = FrameLayout(16, parts=3).new_frame()
    replies = {4: Reply(1, 9, 3, 0.5), 2: Reply(6, 9, 8, 0.25, 7)}
    frame.write_replies(list(replies.items()))
    for worker, reply in replies.items():
        assert frame.read_reply(worker) == reply


@pytest.mark.parametrize(
    ("algorithm", "options", "wire", "message"),
    [
        ("sgp", {}, "float32", "--merge-on-node: --algorithm sgp has no server"),
        ("aladdin", {"push": "gradient"}, "float32", "--merge-on-node: .* use --push update"),
        ("aladdin", {"preset": "paper"}, "dgc:0.1", "--merge-on-node: --wire dgc:0.1 keeps"),
    ],
)
def test_where_nodes_cannot_merge(
    algorithm: str, options: dict[str, Any], wire: str, message: str
) -> None:
    check: Callable[[bool], bool] = partial(
        check_merging, find(algorithm), configure(algorithm, options), wire
    )
    assert check(False) is False
    with pytest.raises(ConfigError, match=re.compile(message)):
        check(True)


def test_memory_by_hand() -> None:
    plain = needs(100, 100, slots=2, senders=4)
    assert plain[:3] == (4 * 2 * 100 + (1 + 4 + 1) * 100, 0, (2 + 2 + 2 + 1 + 1) * 100)
    assert plain.server_window == 800
    large = needs(100, 100, slots=1, senders=1)
    assert (large.server, large.worker) == (100 + 2 * 100, 4 * 100)
    narrow = needs(50, 100, slots=1, senders=1)
    assert (narrow.server, narrow.worker) == (50 + 2 * 100, 100 + 50 + 4 * 100)
    relayed = needs(50, 100, slots=2, senders=2, relayed=4)
    assert (relayed.relay_window, relayed.relay) == (800, 800 + 2 * 50 + 6 * 100)
    assert relayed.worker == 2 * 100 + (4 + 1 + 1 + 1) * 100, "it stages float32"
    one = needs(50, 100, slots=1, senders=2, relayed=4)
    assert one.server == 2 * 50 + (1 + 2 + 1) * 100, "copies are not for relays"
    assert one.worker == 100 + (2 + 1 + 1) * 100, "the copy comes into the staging"


def test_learning_rates_matter_only_where_the_server_applies_them() -> None:
    gathering = Gathering([0, 1], 2, rounds=False, applies=False, expecting=GoingOn())
    for one in (waits(0, rates=(0.1,)), waits(1, rates=(0.2,))):
        gathering.add(one, 0.0)
    assert who(gathering.take(1.0)) == [(0, 1), (1, 1)]


def test_a_late_reply_names_the_oldest_or_the_newest() -> None:
    params = FlatParams([("x", x := torch.nn.Parameter(torch.zeros(4)))], [[x]])
    snapshots = Snapshots(params, 3)
    for sequence in range(1, 6):
        snapshots.lend()[:] = sequence
        snapshots.keep(sequence, sequence)
    assert snapshots.take(3) is None
    found = snapshots.take(4)
    assert found is not None and (found[0] == 4).all()
    assert snapshots.take(1) is None, "given up with those before 4"
