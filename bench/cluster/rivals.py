"""The rivals, how each is set up on virtual hosts, and the best that links of a rate allow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["ALGORITHMS", "ALONE", "Algorithm", "closed_queue"]

FORWARD = 1 / 3
"""Share of the computing before the first gradient can be there (see ``worker.py``)."""
BUCKET_MB = 0.2
"""Of gradients: a sixth of the payload, as 25 MB are of a model of 150 MB."""
PAYLOAD = 1448 / 1514
"""Share of a full Ethernet frame that TCP carries for its user."""


def _one(workers: int, ratio: float) -> float:
    return 1.0


def _overlapped(workers: int, ratio: float) -> float:
    return max(1.0, _all_reduce(workers, ratio))


def _all_reduce(workers: int, ratio: float) -> float:
    return 2 * (workers - 1) / workers * ratio


def closed_queue(workers: int, computing: float, service: float, overlapped: bool) -> float:
    """How long a worker's cycle takes in which it computes, pushes, and waits for an answer.

    Mean value analysis (Reiser & Lavenberg 1980) of two stations, the server's link in and out,
    that serve all messages at once; ``service`` is the time of a message alone.  ``overlapped``:
    the push travels while the worker computes, the answer is asked for after both.
    """
    inside, outside, cycle = 0.0, 0.0, 0.0
    for number in range(1, workers + 1):
        push, answer = service * (1 + inside), service * (1 + outside)
        cycle = (max(computing, push) if overlapped else computing + push) + answer
        inside, outside = number * push / cycle, number * answer / cycle
    return cycle


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
    queue : callable or None
        ``queue(workers, ratio)``: the step, over the computing, of :func:`closed_queue`, where
        workers wait for the answers of a server.
    """

    options: dict[str, Any]
    serving: int = 0
    bound: Callable[[int, float], float] = _one
    begins: float = 0.0
    scaling: bool = False
    waits: bool = False
    period: int = 1
    queue: Callable[[int, float], float] | None = None


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
        {"algorithm": "asp"}, 1, bound=lambda n, ratio: max(1.0, n * ratio), scaling=True,
        queue=lambda n, ratio: closed_queue(n, 1.0, ratio / PAYLOAD, overlapped=False),
    ),
    "ad-psgd": Algorithm({"algorithm": "ad-psgd"}, scaling=True),
    "aladdin, 8 ranges": Algorithm({"algorithm": "aladdin", "max_shard_bytes": 160_000}, 1),
    "aladdin, paper preset": Algorithm({"algorithm": "aladdin", "preset": "paper"}, 1),
    "bsp": Algorithm(
        {"algorithm": "bsp"}, 1, bound=lambda n, ratio: 1 + (n + 1) * ratio, waits=True
    ),
    "easgd": Algorithm(
        {"algorithm": "easgd"}, 1, bound=lambda n, ratio: max(1.0, n * ratio / 2), period=2,
        queue=lambda n, ratio: closed_queue(n, 2.0, ratio / PAYLOAD, overlapped=True) / 2,
    ),
    "diloco": Algorithm(
        {"algorithm": "diloco"}, bound=lambda n, ratio: 1 + _all_reduce(n, ratio) / 50,
        waits=True, period=50,
    ),
}  # fmt: skip
