"""Twenty steps of a real network on n workers, and on one with the joined batch.

    joined.py ALGORITHM [NAME=VALUE ...]

Worker 0 prints the largest difference of a parameter, relative to the largest change of one.
"""

from __future__ import annotations

import sys

import torch

import aladdin_mpi as am

BATCH, STEPS = 8, 20


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(),
        torch.nn.Linear(64, 5),
    )  # fmt: skip


def batch(step: int, workers: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(workers * BATCH, 20, generator=generator)
    return x, torch.randint(0, 5, (workers * BATCH,), generator=generator)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: object, y: object) -> None:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def main(algorithm: str, *given: str) -> None:
    options = dict(text.split("=") for text in given)
    momentum = float(options.pop("momentum", 0.0))
    extra = int(options.pop("extra", 0))  # steps that the last worker makes beyond the others
    am.init(algorithm, progress="off", out=options.pop("out"), **options)
    model, n = network(), am.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    optimizer = am.DistributedOptimizer(optimizer, model)
    for k in range(STEPS):
        x, y = batch(k, n)
        own = slice(am.rank() * BATCH, (am.rank() + 1) * BATCH)
        step(model, optimizer, x[own], y[own])
    if am.rank() == n - 1:
        for k in range(extra):
            x, y = batch(STEPS + k, 1)
            step(model, optimizer, x, y)
    am.finish(model)
    x, y = batch(0, 1)
    torch.nn.functional.cross_entropy(model(x), y).backward()  # the model is a plain one again
    if am.rank() == 0:
        single = network()
        start = [p.detach().clone() for p in single.parameters()]
        optimizer = torch.optim.SGD(single.parameters(), lr=0.1, momentum=momentum)
        for k in range(STEPS):
            step(single, optimizer, *batch(k, n))
        for k in range(extra):
            step(single, optimizer, *batch(STEPS + k, 1))
        change = max(
            float((p - s).abs().max()) for p, s in zip(single.parameters(), start, strict=True)
        )
        difference = max(
            float((p - q).abs().max())
            for p, q in zip(single.parameters(), model.parameters(), strict=True)
        )
        print(f"difference {difference / change:.3e}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
