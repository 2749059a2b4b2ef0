"""Learning rates that are changed for one step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from aladdin_mpi.algorithms.ranges import ShardedWorker
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.rates import scaled
from aladdin_mpi.core.shards import by_memory


def optimizer_of(*rates):
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in rates]
    return torch.optim.SGD(
        [{"params": [w], "lr": lr} for w, lr in zip(weights, rates, strict=True)], lr=1.0
    )


def test_rates_of_all_groups_are_scaled_inside_and_restored_after():
    tensor = torch.tensor(0.5)
    optimizer = optimizer_of(0.1, tensor)
    with scaled(optimizer, 0.5):
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.05, 0.25]
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[1]["lr"] is tensor and float(tensor) == 0.5


def test_rates_are_restored_where_the_step_fails():
    optimizer = optimizer_of(0.1)
    with pytest.raises(RuntimeError), scaled(optimizer, 0.5):
        raise RuntimeError
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_an_optimizer_without_rates_is_left_alone():
    optimizer = optimizer_of(0.1)
    del optimizer.param_groups[0]["lr"]
    with scaled(optimizer, 0.5):
        assert "lr" not in optimizer.param_groups[0]
    assert "lr" not in optimizer.param_groups[0]


def test_ranges_step_once_with_the_mean_of_their_rates():
    weight = torch.nn.Parameter(torch.zeros(64))
    params = FlatParams([("weight", weight)], [[weight]])
    asked = iter([1.0, 0.5, 0.75, 0.25])

    class Asking:
        def step(self, params, local_update, port, iteration):
            local_update(next(asked))

    ports = SimpleNamespace(ports=[SimpleNamespace() for _ in range(4)])
    worker = ShardedWorker(lambda shard: Asking(), params, by_memory(64, 1, 64), False)
    rates = []
    worker.step(params, rates.append, ports, 0)
    assert rates == [0.625]
