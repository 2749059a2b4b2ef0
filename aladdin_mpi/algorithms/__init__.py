"""The algorithms: one file each, one line in the registry."""

from __future__ import annotations

from aladdin_mpi.algorithms import aladdin
from aladdin_mpi.algorithms.base import Algorithm
from aladdin_mpi.errors import ConfigError

__all__ = ["REGISTRY", "find"]

REGISTRY: dict[str, Algorithm] = {module.ALGORITHM.name: module.ALGORITHM for module in (aladdin,)}


def find(name: str) -> Algorithm:
    """The algorithm called ``name``; :class:`ConfigError` where there is none."""
    if name not in REGISTRY:
        raise ConfigError(f"--algorithm {name}: unknown; choose from {', '.join(sorted(REGISTRY))}")
    return REGISTRY[name]
