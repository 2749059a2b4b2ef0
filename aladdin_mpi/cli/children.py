"""Processes that ``aladdin-mpi doctor`` starts for what could hang or crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["answers", "module", "run"]

PACKAGE_FOLDER = Path(__file__).resolve().parents[2]
LAUNCHER_VARIABLES = (
    "PMI_",
    "PMIX_",
    "OMPI_COMM_",
    "OMPI_UNIVERSE",
    "PRTE_LAUNCHED",
    "MPI_LOCAL",
    "SLURM_",
    "HYDI_",
)
"""Without these a child of a rank is not taken for that rank."""


def module(name: str, *args: str) -> list[str]:
    """The command line that runs a module of this package in this Python."""
    return [sys.executable, "-m", f"aladdin_mpi.{name}", *args]


def run(argv: list[str], timeout_s: float) -> tuple[list[str], str]:
    """Lines of the standard output, and what went wrong, or an empty text."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    paths = [str(PACKAGE_FOLDER), environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    try:
        done = subprocess.run(
            argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=timeout_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        text = out.decode(errors="replace") if isinstance(out, bytes) else out
        return text.splitlines(), f"no answer within {timeout_s:.3g} s"
    except OSError as error:
        return [], str(error.strerror)
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return lines, ""
    last = [line.strip() for line in done.stderr.splitlines() if line.strip()][-1:]
    return lines, last[0] if last else f"exit status {done.returncode}"


def answers(argv: list[str], timeout_s: float) -> tuple[dict[str, Any], str]:
    """The last JSON object that a child printed (empty: none), and what went wrong."""
    lines, problem = run(argv, timeout_s)
    objects = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return objects[-1] if objects else {}, problem
