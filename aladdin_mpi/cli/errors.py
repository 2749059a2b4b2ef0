"""The one place where a user's mistake becomes a line on the terminal and an exit code.

Before MPI is initialised nothing connects the ranks of a job: all make the same mistake, and the
first one prints it.  Afterwards the session's exception hook prints it and ends the job.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click

from aladdin_mpi.errors import AladdinError, ConfigError, launch_rank

__all__ = ["USER_ERROR", "launcher_value", "run", "single_host", "writing"]

USER_ERROR = 2
"""Exit code of a user's mistake."""

INTERRUPTED = 130

_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_TASKS_PER_NODE")


def run(command: Callable[[], object]) -> None:
    """Call ``command``; print a user's mistake as one line and leave with exit code 2.

    Parameters
    ----------
    command : callable
        What it returns is not used.

    Raises
    ------
    SystemExit
        After a mistake, and after an interruption.
    AladdinError
        When MPI has been initialised: the session's exception hook handles it.

    Notes
    -----
    In a job, the first rank prints.  A :class:`HostError` is also printed by the first rank of each
    further host, for it may be true there only.
    """
    try:
        command()
    except click.exceptions.Exit as error:
        raise SystemExit(error.exit_code) from None
    except click.Abort:
        raise SystemExit(INTERRUPTED) from None
    except click.ClickException as error:
        _leave(error.format_message())
    except AladdinError as error:
        if _mpi_is_running():
            raise
        from aladdin_mpi.config import HostError  # pydantic would slow every --help down

        _leave(str(error), isinstance(error, HostError))


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turn the system's refusal to write a file that an option names into a user's mistake."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: cannot be written ({error.strerror}); name a place that can"
        ) from None


def launcher_value(
    names: tuple[str, ...], default: int, environ: Mapping[str, str] = os.environ
) -> int:
    """The first of these variables of a launcher that holds a number."""
    for name in names:
        digits = environ.get(name, "").partition("(")[0]  # Slurm: tasks per node 4(x2)
        if digits.isdecimal():
            return int(digits)
    return default


def single_host(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether all ranks of this job see the same files for certain: they run on one host."""
    size = launcher_value(_SIZE, 1, environ)
    return size == 1 or launcher_value(_LOCAL_SIZE, 0, environ) == size


def _leave(message: str, once_per_host: bool = False) -> None:
    rank = launch_rank()
    line = " ".join(message.split())
    if rank == 0:
        print(f"aladdin-mpi: error: {line}", file=sys.stderr, flush=True)
    elif once_per_host and launcher_value(_LOCAL_RANK, 1) == 0:
        where = f"rank {rank} on {platform.node()}"
        print(f"aladdin-mpi: error: {where}: {line}", file=sys.stderr, flush=True)
    raise SystemExit(USER_ERROR)


def _mpi_is_running() -> bool:
    """Looks without importing: a mistake must not initialise MPI."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
