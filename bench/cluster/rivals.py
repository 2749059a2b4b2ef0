"""The rivals, how each is set up on virtual hosts, and the best that links of a rate allow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["ALGORITHMS", "ALONE", "Algorithm"]

FORWARD = 1 / 3
"""Share of the computing before the first gradient can be there (see ``worker.py``)."""
BUCKET_MB = 0.2
"""Of gradients: a sixth of the payload, as 25 MB are of a model of 150 MB."""


def _one(workers: int, ratio: float) -> float:
    return 1.0


def _overlapped(workers: int, ratio: float) -> float:
    return max(1.0, _all_reduce(workers, ratio))


def _all_reduce(workers: int, ratio: float) -> float:
    return 2 * (workers - 1) / workers * ratio


@dataclass(frozen=True)
class Algorithm:
    """How it is run.

    Attributes
    ----------
    options : dict
        For ``init()``.
    serving : int
        Servers.
    bound : callable
        ``bound(workers, ratio)``: the shortest step that links allow, over the computing; ratio is
        payload / (rate × computing).
    begins : float
        Share of the computing before which nothing can travel.
    scaling : bool
        Run with fewer workers and with a slow one, too.
    waits : bool
        All wait for the slowest worker.
    period : int
        Steps between two exchanges.
    """

    options: dict[str, Any]
    serving: int = 0
    bound: Callable[[int, float], float] = _one
    begins: float = 0.0
    scaling: bool = False
    waits: bool = False
    period: int = 1


ALONE = "pushes off"
ALGORITHMS = {
    "aladdin": Algorithm({"algorithm": "aladdin"}, 1, scaling=True),
    ALONE: Algorithm({"algorithm": "aladdin", "push": "none"}, 1, scaling=True),
    "arsgd, DDP": Algorithm(
        {"algorithm": "arsgd", "backend": "ddp", "bucket_mb": BUCKET_MB},
        bound=_overlapped, begins=FORWARD, scaling=True, waits=True,
    ),
    "arsgd, Horovod": Algorithm(
        {"algorithm": "arsgd", "backend": "horovod", "bucket_mb": BUCKET_MB},
        bound=_overlapped, begins=FORWARD, scaling=True, waits=True,
    ),
    "sgp": Algorithm(
        {"algorithm": "sgp"}, bound=lambda n, ratio: max(1.0, ratio * (n > 1)), scaling=True,
        waits=True,
    ),
    "asp": Algorithm(
        {"algorithm": "asp"}, 1, bound=lambda n, ratio: max(1.0, n * ratio), scaling=True
    ),
    "ad-psgd": Algorithm({"algorithm": "ad-psgd"}, scaling=True),
    "aladdin, 8 ranges": Algorithm({"algorithm": "aladdin", "max_shard_bytes": 160_000}, 1),
    "aladdin, paper preset": Algorithm({"algorithm": "aladdin", "preset": "paper"}, 1),
    "bsp": Algorithm(
        {"algorithm": "bsp"}, 1, bound=lambda n, ratio: 1 + (n + 1) * ratio, waits=True
    ),
    "easgd": Algorithm(
        {"algorithm": "easgd"}, 1, bound=lambda n, ratio: max(1.0, n * ratio / 2), period=2
    ),
    "diloco": Algorithm(
        {"algorithm": "diloco"}, bound=lambda n, ratio: 1 + _all_reduce(n, ratio) / 50,
        waits=True, period=50,
    ),
}  # fmt: skip
