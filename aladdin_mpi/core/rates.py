"""Learning rates of an optimizer, changed for one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["scaled"]


@contextmanager
def scaled(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Inside, every learning rate is ``factor`` times what it was; then it is again what it was."""
    rates: list[tuple[dict[str, Any], Any]] = []
    if factor != 1:
        rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for group, rate in rates:
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in rates:
            group["lr"] = rate
