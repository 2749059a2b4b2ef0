"""The algorithms: one file each, one line in the registry."""

from __future__ import annotations

import importlib

from aladdin_mpi.algorithms import (
    adpsgd,
    aladdin,
    arsgd,
    asp,
    bsp,
    diloco,
    dpsgd,
    dssp,
    easgd,
    gosgd,
    localsgd,
    sgp,
    shat,
    ssp,
)
from aladdin_mpi.algorithms.base import Algorithm
from aladdin_mpi.errors import ConfigError

__all__ = ["REGISTRY", "find"]

_MODULES = (
    aladdin, shat, bsp, asp, ssp, dssp, easgd, arsgd, localsgd, gosgd, dpsgd, adpsgd, sgp, diloco,
)  # fmt: skip

REGISTRY: dict[str, Algorithm] = {module.ALGORITHM.name: module.ALGORITHM for module in _MODULES}


def find(name: str) -> Algorithm:
    """The algorithm called ``name``, or a user's own, ``package.module:ATTRIBUTE``.

    Raises
    ------
    ConfigError
    """
    if name in REGISTRY:
        return REGISTRY[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"--algorithm {name}: unknown; choose from {', '.join(sorted(REGISTRY))}, or name your "
            "own as package.module:ATTRIBUTE"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"--algorithm {name}: cannot be loaded ({error}); is it on PYTHONPATH?"
        ) from None
    if not isinstance(found, Algorithm):
        raise ConfigError(f"--algorithm {name}: is a {type(found).__name__}, not an Algorithm")
    return found
