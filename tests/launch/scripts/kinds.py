"""Kinds of parameters and optimizers: groups, frozen, tied, strided, other dtypes, buffers."""

import copy
import sys
from pathlib import Path

import torch
from harness import Found, falls, fit, run
from torch import nn

import aladdin_mpi as am

STEPS = 20


class Two(nn.Module):
    """Two parameters that get their gradients by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((3,), 5.0 + am.rank()))
        self.b = nn.Parameter(torch.full((5,), -2.0 + am.rank()))


def parameter_groups() -> Found:
    """Each group moves with its own rate: worker i's gradient is i + 1, and the mean counts."""
    model = Two()
    groups = [{"params": [model.a], "lr": 1.0}, {"params": [model.b], "lr": 0.25}]
    optimizer = am.DistributedOptimizer(torch.optim.SGD(groups), model)
    assert model.a.tolist() == [5.0] * 3, "all workers start from worker 0's values"
    assert model.b.tolist() == [-2.0] * 5
    for _ in range(STEPS):
        model.a.grad = torch.full_like(model.a, am.rank() + 1.0)
        model.b.grad = torch.full_like(model.b, 2 * (am.rank() + 1.0))
        optimizer.step()

    def after() -> None:  # only float32's rounding of the mixes is left
        torch.testing.assert_close(model.a, torch.full((3,), 5.0 - STEPS * 1.5), atol=1e-3, rtol=0)
        torch.testing.assert_close(
            model.b, torch.full((5,), -2.0 - STEPS * 0.75), atol=1e-3, rtol=0
        )

    return Found([model], after)


def frozen() -> Found:
    """A frozen layer neither moves nor travels; it stays as each worker has made it."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    model[0].requires_grad_(False)
    before = copy.deepcopy(model[0].state_dict())
    optimizer = am.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    fit(model, optimizer)

    def after() -> None:
        for name, value in model[0].state_dict().items():
            assert torch.equal(value, before[name]), name

    return Found([model[2]], after)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 8, bias=False)
        self.decode = nn.Linear(8, 8)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(torch.tanh(self.encode(x)))


def tied() -> Found:
    """Shared weights stay shared."""
    model = Tied()
    optimizer = am.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2), model)
    x = torch.randn(64, 8)
    fit(model, optimizer, 40, x, x)

    def after() -> None:
        assert model.decode.weight is model.encode.weight
        assert torch.equal(model.state_dict()["encode.weight"], model.state_dict()["decode.weight"])

    return Found([model], after)


def channels_last() -> Found:
    """Strides and, on worker 0, values are as they were."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    ).to(memory_format=torch.channels_last)
    weight = model[0].weight
    stride, values = weight.stride(), weight.detach().clone()
    assert not weight.is_contiguous()
    optimizer = am.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert weight.stride() == stride
    assert am.rank() != 0 or torch.equal(weight, values)
    x = torch.randn(16, 3, 8, 8).to(memory_format=torch.channels_last)
    fit(model, optimizer, 30, x, torch.ones(16, 3))

    def after() -> None:
        assert weight.stride() == stride
        assert weight.is_contiguous(memory_format=torch.channels_last)

    return Found([model], after)


def bfloat16() -> Found:
    """A bfloat16 model learns and stays one."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(torch.bfloat16)
    optimizer = am.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    fit(model, optimizer)
    return Found([model])


def float64() -> Found:
    """The same for float64."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    optimizer = am.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    fit(model, optimizer)
    return Found([model])


def mixed_dtypes() -> Found:
    """One optimizer over float32 and bfloat16."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3).to(torch.bfloat16))
    optimizer = am.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), model)
    x = torch.randn(64, 8)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model[1](model[0](x).to(torch.bfloat16)).float() - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    falls(losses)
    return Found([model])


def batch_norm() -> Found:
    """Running statistics reach the global model: values by the mean, counters by the maximum."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = am.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
    fit(model, optimizer, 20 if am.rank() == 0 else 31)

    def after() -> None:
        norm = model[1]
        assert norm.num_batches_tracked.item() == 31, norm.num_batches_tracked
        assert (norm.running_mean != 0).all()
        assert (norm.running_var != 1).all() and (norm.running_var > 0).all()

    return Found([model], after)


def two_models() -> Found:
    """Two models with two optimizers, in the way of a GAN."""
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    judge = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    make = am.DistributedOptimizer(torch.optim.Adam(maker.parameters(), lr=1e-3), maker)
    tell = am.DistributedOptimizer(torch.optim.Adam(judge.parameters(), lr=1e-3), judge)
    loss = nn.BCEWithLogitsLoss()
    yes, no = torch.ones(32, 1), torch.zeros(32, 1)
    before = [p.detach().clone() for p in [*maker.parameters(), *judge.parameters()]]
    for _ in range(20):
        fake = maker(torch.randn(32, 4))
        tell.zero_grad()
        (loss(judge(torch.randn(32, 2) + 2), yes) + loss(judge(fake.detach()), no)).backward()
        tell.step()
        make.zero_grad()
        loss(judge(fake), yes).backward()
        make.step()
    changed = [*maker.parameters(), *judge.parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(before, changed, strict=True))
    return Found([maker, judge])


def optimizers() -> Found:
    """The object stays an optimizer of its class, and its state goes out and in."""
    models = []
    for make, options in (
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.02}),
        (torch.optim.AdamW, {"lr": 0.02}),
        (torch.optim.RMSprop, {"lr": 0.01}),
    ):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        plain = make(model.parameters(), **options)
        optimizer = am.DistributedOptimizer(plain, named_parameters=model.named_parameters())
        assert optimizer is plain and isinstance(optimizer, make)
        assert type(optimizer).__name__ == make.__name__
        fit(model, optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        assert state["state"] and state["param_groups"][0]["lr"] == options["lr"]
        optimizer.load_state_dict(state)
        again = optimizer.state_dict()
        assert again["param_groups"] == state["param_groups"]
        for index, values in state["state"].items():
            for name, value in values.items():
                same = again["state"][index][name]
                assert torch.equal(same, value) if torch.is_tensor(value) else same == value, name
        optimizer.step()
        models.append(model)
    return Found(models)


FEATURES = [
    parameter_groups, frozen, tied, channels_last, bfloat16, float64, mixed_dtypes, batch_norm,
    two_models, optimizers,
]  # fmt: skip

if __name__ == "__main__":
    am.init(out=sys.argv[1], progress="off", count_leavers=False, staleness_aware=False)
    run(FEATURES, Path(sys.argv[1]))
