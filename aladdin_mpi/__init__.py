"""Data-parallel training in which no worker ever waits.

>>> import aladdin_mpi as am
>>> am.init(algorithm="aladdin", period=4)
>>> optimizer = am.DistributedOptimizer(optimizer, model)
>>> loader = am.partition(loader)
>>> ...                                   # the training loop as it was
>>> am.finish(model)

Importing the package loads neither MPI nor torch; the first call does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aladdin_mpi._version import __version__
from aladdin_mpi.errors import AladdinError, launched_together
from aladdin_mpi.runtime.crash import guard

if TYPE_CHECKING:
    from aladdin_mpi.runtime.session import (
        DistributedOptimizer,
        agree,
        device,
        finish,
        global_parameters,
        init,
        iteration,
        local_rank,
        log,
        log_evaluation,
        partition,
        rank,
        run_folder,
        samples,
        should_stop,
        size,
        split,
        stop,
        world_rank,
    )

__all__ = [
    "AladdinError",
    "DistributedOptimizer",
    "__version__",
    "agree",
    "device",
    "finish",
    "global_parameters",
    "init",
    "iteration",
    "local_rank",
    "log",
    "log_evaluation",
    "partition",
    "rank",
    "run_folder",
    "samples",
    "should_stop",
    "size",
    "split",
    "stop",
    "world_rank",
]

if launched_together():  # from here on a rank that fails ends the job, also before init()
    guard.install()


def __getattr__(name: str) -> Any:
    if name in __all__:
        from aladdin_mpi.runtime import session

        return getattr(session, name)
    raise AttributeError(f"module 'aladdin_mpi' has no attribute '{name}'")
