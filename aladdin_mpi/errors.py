"""The exceptions of aladdin_mpi.

Every error that a user can cause is a child of :class:`AladdinError` and of the built-in
exception that fits it, carries one line that names the option, its value, what is allowed and
what to do, and is shown without a traceback.
"""

from __future__ import annotations

import os

__all__ = [
    "AladdinError",
    "CheckpointError",
    "CommunicationError",
    "ConfigError",
    "DataError",
    "LaunchError",
    "ModelError",
    "NonFiniteError",
    "RecordError",
    "launch_rank",
    "launched_together",
]


class AladdinError(Exception):
    """Base of all errors of this package.

    Attributes
    ----------
    silent : bool
        Another rank raises the same error and prints it.
    """

    silent = False


class ConfigError(AladdinError, ValueError):
    """An option has a value that is not allowed."""


class LaunchError(AladdinError, RuntimeError):
    """The job was started in a way that cannot work (one rank, a launcher of another MPI)."""


class DataError(AladdinError, FileNotFoundError):
    """A data set is missing or cannot be read."""


class ModelError(AladdinError, TypeError):
    """The model, its parameters or its optimizer cannot be trained this way."""


class NonFiniteError(AladdinError, ArithmeticError):
    """A NaN or an infinity appeared and the policy is to stop."""


class CommunicationError(AladdinError, RuntimeError):
    """The other side broke the protocol or has gone."""


class CheckpointError(AladdinError, OSError):
    """A checkpoint cannot be written, read or used for this run."""


class RecordError(AladdinError, OSError):
    """The log file of a rank cannot be created or written."""


def launch_rank() -> int:
    """This process's rank as its launcher tells it, before MPI is initialized; 0 without a
    launcher.

    It decides which process prints an error that all of them have.
    """
    for variable in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"):
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    return 0


def launched_together() -> bool:
    """A launcher has started this process as one of several ranks."""
    for variable in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable]) > 1
    return False
