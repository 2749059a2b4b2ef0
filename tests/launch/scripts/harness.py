"""What the scripts of these tests share: many small trainings in one job, compared afterwards.

A feature is a function that makes a model and an optimizer, trains a few steps, and asserts what
one worker can see.  It returns the models whose parameters must be equal on all workers at the
end, and perhaps a check for then.  Every worker writes what it found to ``worker-<index>.json``.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import aladdin_mpi as am


@dataclass
class Found:
    """What a feature leaves for the end of the job."""

    models: list[nn.Module]
    after: Callable[[], None] = lambda: None
    values: dict[str, object] = field(default_factory=dict)
    compared: bool = True
    """Whether the models' state must be the same on all workers (frozen parts do not travel)."""


def digest(models: list[nn.Module]) -> str:
    """A hash of all values of the models, and of their kinds."""
    total = hashlib.sha256()
    for model in models:
        for name, tensor in model.state_dict().items():
            assert bool(torch.isfinite(tensor).all()), f"{name} is not finite"
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def run(features: list[Callable[[], Found]], folder: Path) -> None:
    """Go through the features, finish together, and write what was found."""
    found: dict[str, Found] = {}
    for feature in features:
        if am.rank() == 0:
            print("feature", feature.__name__, file=sys.stderr, flush=True)
        torch.manual_seed(100 + am.rank())  # the workers' models begin differently
        found[feature.__name__] = feature()
    am.finish(*(model for each in found.values() for model in each.models))
    report: dict[str, dict[str, object]] = {}
    for name, each in found.items():
        each.after()
        report[name] = {**each.values, "digest": digest(each.models) if each.compared else ""}
    Path(folder, f"worker-{am.rank()}.json").write_text(json.dumps(report))


def data(samples: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of a linear relation, of which each worker has its own."""
    generator = torch.Generator().manual_seed(am.rank())
    x = torch.randn(samples, 8, generator=generator)
    y = x @ torch.linspace(-1, 1, 24).reshape(8, 3)
    return x, y


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 30,
    x: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
) -> list[float]:
    """Train on one batch; the loss must fall."""
    if x is None or y is None:
        x, y = data()
        x, y = (part.to(next(model.parameters()).dtype) for part in (x, y))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    falls(losses)
    return losses


def falls(losses: list[float]) -> None:
    """Assert that the last losses lie below the first, and that all are finite."""
    assert all(map(math.isfinite, losses)), losses
    assert sum(losses[-3:]) / 3 < 0.9 * losses[0], losses
