"""Turns of ranges on a full link: how many are on their way, and who is next."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aladdin_mpi.core.turns import Turns


class Link:
    """Carries ``per_step`` ranges in a step, one after the other."""

    def __init__(self, count: int, per_step: float) -> None:
        self.turns, self.per_step = Turns(count), per_step
        self.queue: list[int] = []
        self.pushed = np.zeros(count, dtype=int)
        self.waited = np.zeros(count, dtype=int)
        self.room = 0.0
        self.idle = self.steps = 0
        self.under_way: list[int] = []

    def step(self) -> None:
        flying = [k in self.queue for k in range(len(self.pushed))]
        self.turns.begin(flying)
        self.waited += 1
        for k, busy in enumerate(flying):
            if self.turns.has(k):
                assert not busy
                self.queue.append(k)
                self.pushed[k] += 1
                self.waited[k] = 0
        self.under_way.append(len(self.queue))
        self.room += self.per_step
        while self.queue and self.room >= 1:
            self.queue.pop(0)
            self.room -= 1
        if not self.queue:
            self.idle += self.room >= 1
            self.room = min(self.room, 1.0)


def test_all_ranges_go_in_every_step_of_a_fast_link() -> None:
    turns = Turns(8)
    for _ in range(20):
        turns.begin([False] * 8)
        assert all(turns.has(k) for k in range(8))


@pytest.mark.parametrize("per_step", [0.25, 0.5, 1.0, 2.0, 3.0])
def test_on_a_slow_link_few_are_under_way_and_it_stays_full(per_step: float) -> None:
    link = Link(8, per_step)
    for _ in range(40):
        link.step()
    link.under_way.clear()
    before = link.pushed.sum()
    for _ in range(200):
        link.step()
    assert np.mean(link.under_way) <= per_step + 2
    assert link.pushed.sum() - before >= 0.9 * 200 * per_step - 1


@given(st.integers(1, 12), st.lists(st.floats(0.05, 14.0), min_size=50, max_size=120))
def test_every_range_has_its_turn_whatever_the_link_does(count: int, rates: list[float]) -> None:
    link = Link(count, 1.0)
    for link.per_step in rates:
        link.step()
        longest = int(link.waited.max())
        assert longest <= count * max(1.0, 1 / min(rates)) + 2 * count


def test_the_one_that_waited_longest_is_next() -> None:
    link = Link(4, 1.0)
    for _ in range(60):
        link.step()
    order = []
    for _ in range(8):
        before = link.pushed.copy()
        link.step()
        order += np.flatnonzero(link.pushed - before).tolist()
    assert [a for a, b in zip(order, order[4:], strict=False) if a != b] == []
