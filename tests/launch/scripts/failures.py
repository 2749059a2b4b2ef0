"""One way of failing each: ``failures.py <folder> <way>``."""

import math
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn

import aladdin_mpi as am
from aladdin_mpi.errors import launch_rank

folder, way = Path(sys.argv[1]), sys.argv[2]
if way == "early" and launch_rank() == 1:
    raise RuntimeError("before init")
options: dict[str, object] = {"out": folder / "run", "progress": "off"}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def start(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return am.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> float:
    optimizer.zero_grad()
    loss = (model(torch.randn(16, 4)) - 1).pow(2).mean() * scale
    loss.backward()
    optimizer.step()
    return loss.item()


def train(steps: int) -> None:
    model = net()
    optimizer = start(model)
    for _ in range(steps):
        step(model, optimizer)
        time.sleep(0.002)
    am.finish(model)


def raises() -> None:
    """One worker raises while the others train on."""
    model = net()
    optimizer = start(model)
    for number in range(100_000):
        step(model, optimizer)
        time.sleep(0.002)
        if am.rank() == 1 and number == 20:
            raise RuntimeError("this worker is broken")


def early() -> None:
    """One rank raises before am.init(), in which the others wait for it."""
    train(5)


def exits() -> None:
    """One worker leaves without a word."""
    model = net()
    optimizer = start(model)
    for number in range(100_000):
        step(model, optimizer)
        time.sleep(0.002)
        if am.rank() == 1 and number == 20:
            sys.exit(0)


def models() -> None:
    """Worker 1 has built another model."""
    start(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1 + am.rank())))


def refused() -> None:
    """What cannot work is refused with a reason; then a closure, which nobody catches."""
    bag = nn.EmbeddingBag(8, 4, sparse=True)
    frozen = nn.Linear(4, 1).requires_grad_(False)
    for what, attempt in {
        "LBFGS": lambda: am.DistributedOptimizer(torch.optim.LBFGS(net().parameters()), net()),
        "trainable": lambda: start(frozen),
        "sparse=False": lambda: start(bag),
        "SparseAdam": lambda: am.DistributedOptimizer(
            torch.optim.SparseAdam(net().parameters()), net()
        ),
        "takes a torch.optim.Optimizer": lambda: am.DistributedOptimizer(net(), net()),
        "does not have": lambda: am.DistributedOptimizer(
            torch.optim.SGD(net().parameters(), lr=1), net()
        ),
    }.items():
        try:
            attempt()
        except am.AladdinError as error:
            assert isinstance(error, TypeError), what
            assert what in str(error) and "\n" not in str(error), error
        else:
            raise AssertionError(f"not refused: {what}")
    optimizer = start(net())
    optimizer.step(lambda: 0.0)


def sparse() -> None:
    """A sparse gradient that no module tells of."""
    weight = nn.Parameter(torch.randn(8, 4))
    named = [("table", weight)]
    optimizer = am.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), named_parameters=named)
    nn.functional.embedding(torch.tensor([1, 2]), weight, sparse=True).sum().backward()
    optimizer.step()


def skip() -> None:
    """Steps with a NaN are thrown away, on one worker, and training goes on."""
    torch.manual_seed(0)
    model = net()
    optimizer = start(model)
    losses = []
    for number in range(60):
        bad = am.rank() == 1 and number in (10, 30)
        loss = step(model, optimizer, math.nan if bad else 1.0)
        losses.append(loss)
        time.sleep(0.005)  # a push of its own for every step
    am.finish(model)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    assert sum(map(math.isnan, losses)) <= 8, losses  # until the push that finds it
    assert losses[-1] < losses[0]


def stop() -> None:
    """A NaN ends the job."""
    model = net()
    optimizer = start(model)
    for number in range(100_000):
        step(model, optimizer, math.inf if am.rank() == 1 and number == 20 else 1.0)
        time.sleep(0.002)


def uneven() -> None:
    """Worker 1 has a tenth of the batches: it ends early, and nobody waits for anybody."""
    model = net()
    optimizer = start(model)
    began = time.monotonic()
    for _ in range(300 if am.rank() == 0 else 30):
        step(model, optimizer)
        time.sleep(0.005)
    (folder / f"trained-{am.rank()}").write_text(str(time.monotonic() - began))
    am.finish(model)
    (folder / f"model-{am.rank()}").write_text(str([p.tolist() for p in model.parameters()]))


def paced() -> None:
    """Train until a file tells to end, so that the test can stop processes meanwhile."""
    model = net()
    optimizer = start(model)
    (folder / f"trains-{launch_rank()}").touch()
    while not (folder / "end").exists():
        step(model, optimizer)
        time.sleep(0.02)
    am.finish(model)
    (folder / f"finished-{am.rank()}").touch()


OPTIONS: dict[str, dict[str, object]] = {
    "stop": {"on_nonfinite": "stop"},
    "paced": {"stall_s": 3.0},
    "unwritable": {"out": "/proc/nowhere/run"},
    "option": {"periode": 3},
    "period": {"period": 0},
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    (folder / f"pid-{launch_rank()}").write_text(str(os.getpid()))
    am.init(**{**options, **OPTIONS.get(way, {})})
    globals().get(way, lambda: train(10))()
