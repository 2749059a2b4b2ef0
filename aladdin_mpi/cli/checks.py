"""The checks of ``aladdin-mpi doctor`` that a process makes by itself.

Whatever could hang or crash, MPI above all, runs in a process of its own with a time limit.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from aladdin_mpi._version import __version__
from aladdin_mpi.cli import machine
from aladdin_mpi.cli.children import answers, module, run
from aladdin_mpi.cli.findings import Finding, Level
from aladdin_mpi.cli.judging import (
    judge_folder,
    judge_gpus,
    judge_horovod,
    judge_mpi,
)
from aladdin_mpi.cli.launchers import family, judge_slurm
from aladdin_mpi.cli.machine import stale_files

__all__ = ["Finding", "Level", "alone", "basic", "judge_mpi", "stale_files"]

_IMPORT = "import importlib; m = importlib.import_module({!r}); print(m.__version__)"
_TORCH = """
import json, torch
print(json.dumps({"version": torch.__version__, "gpus": []}), flush=True)
n = torch.cuda.device_count() if torch.cuda.is_available() else 0
names = [torch.cuda.get_device_name(i) for i in range(n)]
print(json.dumps({"version": torch.__version__, "gpus": names}))
"""
INSTALL_MPI = "pip install mpi4py and, where there is no MPI, mpich (or load the cluster's module)"


def basic(left_s: Callable[[], float], out: Path | None, gpus: list[str]) -> Iterator[Finding]:
    """What needs no MPI; ``left_s()`` is how long [s] the next check may take, ``gpus`` is filled
    with the names of the GPUs that torch sees.
    """
    yield Finding(Level.OK, "aladdin_mpi", __version__, same=__version__)
    yield machine.python()
    yield _torch(left_s(), gpus)
    for name in ("numba", "h5py"):
        yield _package(name, left_s())
    yield judge_horovod(*answers(module("comm.probe", "horovod"), left_s()))
    yield from machine.shared_memory()
    yield machine.cores()
    yield machine.settings()
    yield machine.network(left_s())
    if out is not None:
        yield judge_folder(*answers(module("record.filesystem", str(out)), left_s()))


def alone(timeout_s: float, out: Path | None) -> Iterator[Finding]:
    """All checks of a process without a launcher."""
    seen: list[str] = []
    yield from basic(lambda: timeout_s, out, seen)
    probed, problem = answers(module("comm.probe", "alone"), timeout_s)
    if not probed:
        yield Finding(Level.ERROR, "MPI", problem or "nothing found", INSTALL_MPI)
        yield judge_gpus(seen, None)
        return
    yield Finding(Level.OK, "mpi4py", probed["mpi4py"])
    yield from judge_mpi(probed, problem)
    yield _mpiexec(probed["library"], timeout_s)
    yield judge_gpus(seen, probed.get("cuda"))
    yield from judge_slurm(os.environ, probed["library"])


def _torch(timeout_s: float, gpus: list[str]) -> Finding:
    found, problem = answers([sys.executable, "-c", _TORCH], timeout_s)
    if not found:
        return Finding(Level.ERROR, "torch", problem or "no answer", "pip install torch")
    version = found["version"]
    if problem:
        advice = "look at nvidia-smi; CUDA_VISIBLE_DEVICES= hides the GPUs"
        return Finding(Level.ERROR, "torch", f"{version}, GPUs: {problem}", advice, version)
    gpus += found["gpus"]
    return Finding(Level.OK, "torch", version, same=version)


def _package(name: str, timeout_s: float) -> Finding:
    lines, problem = run([sys.executable, "-c", _IMPORT.format(name)], timeout_s)
    if problem:
        return Finding(Level.ERROR, name, problem, f"pip install {name}")
    return Finding(Level.OK, name, lines[-1], same=lines[-1])


def _mpiexec(library: str, timeout_s: float) -> Finding:
    mine = family(library)
    beside = Path(sys.executable).parent / "mpiexec"
    found = shutil.which("mpiexec")
    advice = f"put the mpiexec of {mine} on PATH"
    if beside.exists():
        advice = f"use {beside}, or put its folder first on PATH"
    if found is None:
        return Finding(Level.WARNING, "mpiexec", "not on PATH", advice)
    lines, problem = run([found, "--version"], timeout_s)
    theirs = family(" ".join(lines))
    if problem or theirs == "unknown":
        return Finding(
            Level.WARNING, "mpiexec", f"{found}: {problem or 'of an unknown MPI'}", advice
        )
    if theirs != mine:
        text = f"{found} is of {theirs}, mpi4py uses {mine}: every rank would be alone"
        return Finding(Level.WARNING, "mpiexec", text, advice)
    return Finding(Level.OK, "mpiexec", f"{found} ({theirs})")
