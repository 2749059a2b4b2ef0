"""A state in the plain values and tensors that a checkpoint holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["clone", "from_plain", "restore_rng", "rng_state", "to_plain"]


def clone(value: Any) -> Any:
    """A copy whose tensors nobody else changes, in the memory of the host."""
    if torch.is_tensor(value):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: clone(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(clone(part) for part in value)
    return value


def to_plain(value: Any) -> Any:
    """Arrays as tensors, NumPy's numbers as Python's; copies."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: to_plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_plain(part) for part in value)
    return value


def from_plain(value: Any) -> Any:
    """The opposite: tensors as arrays."""
    if torch.is_tensor(value):
        return value.numpy()
    if isinstance(value, dict):
        return {key: from_plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(from_plain(part) for part in value)
    return value


def rng_state() -> dict[str, Any]:
    """Of Python, NumPy and torch."""
    drawn: Any = np.random.get_state()  # noqa: NPY002 - users draw from it
    name, keys, position, has_gauss, gauss = drawn
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Go on with the numbers that would have come next."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
