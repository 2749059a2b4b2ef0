"""Training loops: accumulation, mixed precision, schedules, compilation, logging, stopping."""

import shutil
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import Found, data, falls, fit, run
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import aladdin_mpi as am

STEPS = 20


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)


def ranks() -> Found:
    """Workers are counted, not processes."""
    assert am.size() == 2
    assert am.rank() in (0, 1)
    assert am.world_rank() == am.rank() + 1
    assert am.local_rank() == am.rank()
    assert am.run_folder() == Path(sys.argv[1]).absolute()
    return Found([], values={"rank": am.rank()})


def accumulation_and_clipping() -> Found:
    """Four backward passes make one step, of at most the clipped length."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = am.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model, backward_passes_per_step=4
    )
    start = model.weight.detach().clone()
    direction = torch.eye(4)[am.rank()]  # the gradient of each worker lies along its own axis
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(4):
            model(direction).backward()
        assert model.weight.grad.norm() == 4
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    def after() -> None:
        expected = start - STEPS * 0.5 / 2 * torch.tensor([[1.0, 1.0, 0.0, 0.0]])
        torch.testing.assert_close(model.weight.detach(), expected, atol=1e-3, rtol=0)

    return Found([model], after)


def mixed_precision() -> Found:
    """Autocast and GradScaler on the CPU; an overflow skips the step."""
    model = net()
    optimizer = am.DistributedOptimizer(sgd(model), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    x, y = data()
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        overflow = step == 7 and am.rank() == 1
        scaler.scale(loss * float("inf") if overflow else loss).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        if overflow:
            assert scaler.get_scale() == 8.0, "GradScaler has seen the overflow"
            same = zip(before, model.parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in same), "and has skipped the step"
        losses.append(loss.item())
    falls(losses)
    assert scaler.get_scale() == (8.0 if am.rank() == 1 else 16.0)
    return Found([model])


def schedules() -> Found:
    """A schedule made before or after drives the rate, and torch sees steps in the right order."""
    models = []
    for early in (True, False):
        model = net()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer = sgd(model)
            if early:
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
                optimizer = am.DistributedOptimizer(optimizer, model)
            else:
                optimizer = am.DistributedOptimizer(optimizer, model)
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
            x, y = data()
            losses = []
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
        falls(losses)
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
        models.append(model)
    return Found(models)


class Stream(IterableDataset):
    """Samples without an end that anybody knows; more of them on worker 1."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x, y = data(80 if am.rank() == 0 else 160)
        return iter(list(zip(x, y, strict=True)))


def stream() -> Found:
    """A data set without a length passes through, and ends when it ends."""
    model = net()
    optimizer = am.DistributedOptimizer(sgd(model), model)
    losses = []
    for x, y in am.partition(DataLoader(Stream(), batch_size=4)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    falls(losses)
    return Found([model], values={"batches": len(losses)})


def compiled() -> Found:
    """A compiled model, its running statistics included."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    compiler = shutil.which("g++") and header.exists()
    backend = "inductor" if compiler and am.rank() == 0 else "aot_eager"  # the former is slow
    faster = torch.compile(model, backend=backend)
    optimizer = am.DistributedOptimizer(sgd(model), model)
    x, y = data()
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(faster(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    falls(losses)
    assert (model[1].running_mean != 0).all()
    return Found([model], values={"backend": backend})


def global_parameters() -> Found:
    """Inside, the model is the server's; afterwards the local one is back to the bit."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = am.DistributedOptimizer(sgd(model), model)
    fit(model, optimizer, 10)
    with torch.no_grad():
        model[2].bias.add_(100.0 * (am.rank() + 1))  # not pushed yet
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with am.global_parameters(model) as info:
        assert info.version > 0 and info.fetch_s >= 0
        assert (model[2].bias < 50).all()
        model(torch.full((4, 8), 7.0))  # changes the running statistics
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    with torch.no_grad():
        model[2].bias.sub_(100.0 * (am.rank() + 1))
    optimizer.step()
    return Found([model])


def logging() -> Found:
    """What the loop reports is written; the test looks into the files."""
    model = net()
    optimizer = am.DistributedOptimizer(sgd(model, 0.125), model)
    for step in range(5):
        model[0].weight.grad = torch.zeros_like(model[0].weight)
        am.log(loss=torch.tensor(0.5 + step), wobble=2.0 * step)
        optimizer.step()
    am.log_evaluation(1.5, 0.25, 0.75, 0.1)
    return Found([model])


def stopping() -> Found:
    """One worker asks, all see it, and loaders end."""
    model = net()
    optimizer = am.DistributedOptimizer(sgd(model), model)
    assert not am.should_stop()
    limit = time.monotonic() + 30
    step = 0
    while not am.should_stop():
        fit(model, optimizer, 10) if step == 0 else optimizer.step()
        step += 1
        if am.rank() == 1 and step == 3:
            am.stop()
        assert time.monotonic() < limit, "the wish to stop did not arrive"
        time.sleep(0.001)
    assert list(am.partition(DataLoader(TensorDataset(torch.zeros(8))))) == []
    return Found([model])


FEATURES = [
    ranks, accumulation_and_clipping, mixed_precision, schedules, stream, compiled,
    global_parameters, logging, stopping,
]  # fmt: skip

if __name__ == "__main__":
    am.init(out=sys.argv[1], progress="off", count_leavers=False, staleness_aware=False)
    run(FEATURES, Path(sys.argv[1]))
