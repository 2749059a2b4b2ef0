"""Ranges of gradients that are announced during the backward pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.ready import Range, ReadyRanges


class Watched:
    """Three layers, each a range of its own; notes what is announced, and what had come by then."""

    def __init__(self, passes: int = 1) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(3)))
        self.params = FlatParams(
            self.model.named_parameters(), [list(self.model.parameters())], passes
        )
        self.copy = self.params.new_vector()
        self.announced: list[Range] = []
        self.ready = ReadyRanges(self.params, self.note, range_bytes=1024)

    def note(self, part: Range) -> None:
        self.params.copy_gradients(self.copy, part.first, part.last)
        self.announced.append(part)

    def backward(self) -> None:
        self.model(torch.ones(2, 16)).sum().backward()

    def gradients(self) -> np.ndarray:
        total = self.params.new_vector()
        self.params.add_gradients(total)
        return total


def test_ranges_cover_the_vector_from_its_end() -> None:
    watched = Watched()
    stops = [watched.params.size] + [part.start for part in watched.ready.ranges]
    assert [part.stop for part in watched.ready.ranges] == stops[:-1]
    assert stops[-1] == 0
    assert len(watched.ready.ranges) == 3


def test_a_range_leaves_while_earlier_layers_still_compute() -> None:
    watched = Watched()
    seen: list[int] = []
    first = watched.model[0]
    first.register_full_backward_hook(lambda *_: seen.append(len(watched.announced)))
    watched.model(torch.ones(2, 16, requires_grad=True)).sum().backward()
    assert seen and seen[0] >= 1
    assert watched.announced == list(watched.ready.ranges)
    assert np.array_equal(watched.copy, watched.gradients())
    assert not watched.ready.changed


def test_what_backward_does_not_reach_is_completed_at_the_step() -> None:
    watched = Watched()
    watched.model[1].weight.requires_grad_(False)
    watched.model[1].weight.grad = None
    watched.backward()
    assert len(watched.announced) == 1, "in order: the middle one is missing"
    watched.ready.complete()
    assert len(watched.announced) == 3
    assert np.array_equal(watched.copy, watched.gradients())


def test_clipping_is_noticed() -> None:
    watched = Watched()
    watched.backward()
    torch.nn.utils.clip_grad_norm_(watched.model.parameters(), 0.1)
    assert watched.ready.changed
    watched.ready.reset()
    assert not watched.ready.changed


def test_accumulation_that_was_not_announced_is_noticed() -> None:
    watched = Watched()
    watched.backward()
    watched.backward()
    assert watched.ready.changed


@pytest.mark.parametrize("passes", [2, 3])
def test_accumulation_that_was_announced_waits_for_the_last_pass(passes: int) -> None:
    watched = Watched(passes)
    for _ in range(passes - 1):
        watched.backward()
        assert not watched.announced
    watched.backward()
    assert len(watched.announced) == 3
    assert not watched.ready.changed
    assert np.array_equal(watched.copy, watched.gradients())


def test_each_step_starts_anew() -> None:
    watched = Watched()
    for _ in range(3):
        watched.announced.clear()
        watched.model.zero_grad()
        watched.backward()
        assert len(watched.announced) == 3
        watched.ready.reset()
