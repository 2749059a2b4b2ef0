"""Which server holds what, and a range of the vector as a vector of its own."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.shards import Shard, by_layer, by_memory, spread_over
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.runtime.sharded import Sharding

pytestmark = pytest.mark.timeout(60)


@given(st.integers(1, 5000), st.integers(1, 16), st.integers(0, 4096))
def test_memory_wise_ranges_are_equal_aligned_and_without_gaps(units, servers, max_bytes):
    ranges = by_memory(16 * units, servers, max_bytes)
    assert ranges[0].start == 0 and ranges[-1].stop == 16 * units
    assert all(a.stop == b.start for a, b in pairwise(ranges))
    sizes = [r.stop - r.start for r in ranges]
    assert all(size > 0 and size % 16 == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= 16
    if max_bytes >= 64:
        assert 4 * max(sizes) <= max_bytes
    holders = [r.server for r in ranges]
    assert holders == sorted(holders)
    assert set(holders) == set(range(min(servers, units)))
    if units >= len(ranges) == servers * holders.count(0):
        assert {holders.count(s) for s in range(servers)} == {holders.count(0)}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 6))
def test_layer_wise_ranges_keep_layers_whole(sizes, servers):
    layers = [16 * size for size in sizes]
    ranges = by_layer(layers, servers)
    ends = np.cumsum(layers).tolist()
    assert ranges[0].start == 0 and ranges[-1].stop == ends[-1]
    assert {r.stop for r in ranges} <= set(ends)
    assert len(ranges) == min(servers, len(layers))
    largest = max(r.stop - r.start for r in ranges)
    assert largest >= max(max(layers), ends[-1] / servers)


def test_a_layer_that_dominates_makes_layer_wise_shares_unequal():
    vgg = [16 * n for n in (1, 4, 8, 200, 10)]
    assert [r.stop - r.start for r in by_layer(vgg, 3)] == [16 * 13, 16 * 200, 16 * 10]
    assert len({r.stop - r.start for r in by_memory(sum(vgg), 4)}) <= 2


@pytest.mark.parametrize("by", ["memory", "layer"])
def test_too_many_servers_for_a_model_are_one_line(by):
    model = torch.nn.Linear(4, 4)
    params = FlatParams(model.named_parameters(), [list(model.parameters())])
    with pytest.raises(ConfigError, match=r"--servers 3: the model has only 2 .* use at most 2"):
        Sharding(3, by=by).ranges(params)


def network(dtype=torch.float32):
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32, 5)
    )
    return model.to(dtype).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_shards_are_the_same_memory_and_gradients_as_the_whole(count, dtype):
    model = network(dtype)
    groups = [list(model[0].parameters()), list(model[3].parameters())]
    whole = FlatParams(model.named_parameters(), groups)
    shards = [Shard(whole, r.start, r.stop) for r in by_memory(whole.size, count)]
    model(torch.randn(2, 3, 4, 4).to(dtype)).square().sum().backward()
    model[3].bias.grad = None
    expected = whole.new_vector()
    whole.add_gradients(expected)
    parts = [shard.new_vector() for shard in shards]
    for shard, part in zip(shards, parts, strict=True):
        shard.add_gradients(part)
    assert np.array_equal(np.concatenate(parts), expected)
    assert np.array_equal(np.concatenate([s.gathered() for s in shards]), whole.gathered())
    ranges = [
        (a, b, g)
        for s, at in zip(shards, by_memory(whole.size, count), strict=True)
        for a, b, g in ((a + at.start, b + at.start, g) for a, b, g in s.group_ranges())
    ]
    assert [g for a, b, g in ranges for _ in range(a, b)] == [
        g for a, b, g in whole.group_ranges() for _ in range(a, b)
    ]  # fmt: skip
    target = np.full(shards[1].size, 2.0, np.float32)
    before = whole.gathered().copy()
    shards[1].mix(0.5, target, None)
    after, r = whole.gathered(), by_memory(whole.size, count)[1]
    np.testing.assert_allclose(after[r.start : r.stop], before[r.start : r.stop] / 2 + 1, rtol=1e-2)
    assert np.array_equal(np.delete(after, np.s_[r.start : r.stop]),
                          np.delete(before, np.s_[r.start : r.stop]))  # fmt: skip


def test_gradients_in_another_order_of_memory_are_put_right():
    model = torch.nn.Linear(8, 8, bias=False)
    whole = FlatParams(model.named_parameters(), [list(model.parameters())])
    model.weight.grad = torch.arange(64.0).view(8, 8).t()
    shard = Shard(whole, 16, 48)
    total = shard.new_vector()
    shard.add_gradients(total)
    assert np.array_equal(total, model.weight.grad.contiguous().view(-1)[16:48].numpy())


@pytest.mark.parametrize(
    ("nodes", "servers", "chosen"),
    [
        ([[0, 1, 2, 3]], 2, (0, 1)),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], 2, (0, 4)),
        ([[0, 1], [2, 3], [4, 5]], 3, (0, 2, 4)),
        ([[0, 1, 2], [3, 4, 5]], 3, (0, 1, 3)),
        ([[0, 2], [1, 3]], 2, (0, 1)),
    ],
)
def test_servers_spread_over_nodes_begin_with_rank_0(nodes, servers, chosen):
    assert spread_over(nodes, servers) == chosen
