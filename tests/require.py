"""What a test needs beyond Python: where it is missing, the test is left out and says why.

With ``ALADDIN_REQUIRE=all`` in the environment nothing may be left out: the test fails instead.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import shutil
from typing import NoReturn

import pytest

PREFIX = "left out: "
NO_GPU = "no GPU"
PACKAGES = {
    "cc": "gcc", "ip": "iproute2", "tc": "iproute2", "munged": "munge",
    "sbatch": "slurm-client", "scontrol": "slurm-client",
}  # fmt: skip
"""Debian's package of a program, where its name is another one."""


def left_out(reason: str) -> NoReturn:
    """Skip the running test, or fail it when nothing may be left out."""
    __tracebackhide__ = True
    if os.environ.get("ALADDIN_REQUIRE") == "all":
        pytest.fail(f"{PREFIX}{reason} (ALADDIN_REQUIRE=all)", pytrace=False)
    pytest.skip(PREFIX + reason)


def program(*names: str) -> None:
    """Go on only if all these programs are on the PATH."""
    __tracebackhide__ = True
    for name in names:
        if shutil.which(name) is None:
            left_out(f"no {name} (apt-get install {PACKAGES.get(name, name)})")


def horovod() -> None:
    """Go on only if Horovod is there, with the MPI of this environment."""
    __tracebackhide__ = True
    if reason := no_horovod():
        left_out(f"{reason} (make horovod)")


@functools.cache
def no_horovod() -> str:
    """Return why Horovod cannot be used here; nothing if it can."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it lacks
            module = importlib.import_module("horovod.torch")
    except ModuleNotFoundError as error:
        return "no Horovod" if error.name == "horovod" else f"Horovod lacks {error.name}"
    except ImportError as error:
        return f"Horovod was not built for this MPI or torch: {str(error).partition(chr(10))[0]}"
    return "" if hasattr(module, "init") else "Horovod was built without its extension for torch"


def root() -> None:
    """Go on only as root."""
    __tracebackhide__ = True
    if os.geteuid() != 0:
        left_out("needs root")


def gpu() -> None:
    """Go on only where torch sees a GPU; a lack of hardware is no failure, whatever is required."""
    __tracebackhide__ = True
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        pytest.skip(f"{PREFIX}{NO_GPU} (torch.cuda.is_available() is false)")


def cores(number: int) -> None:
    """Go on only where this process may use so many cores."""
    __tracebackhide__ = True
    if len(os.sched_getaffinity(0)) < number:
        left_out(f"needs {number} cores")
