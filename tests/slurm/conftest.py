"""One cluster for all tests of this folder, or the reason why there can be none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import require
import virtual_hosts
from cluster import NEEDED_PROGRAMS, SYSTEM_PATH, SlurmCluster

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = """#!{python} -IS
# Takes the place of aladdin-mpi: says where it runs and what it sees. With STAND_IN=wait it waits
# for a signal first, as a training would, and ends with 75; a job that was requeued ends at once.
import json, os, signal, socket, sys, time

def first(*names):
    return int(next(os.environ[name] for name in names if name in os.environ))

caught = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: caught.append(signal.Signals(number).name))
rank = first("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
restart = os.environ.get("SLURM_RESTART_COUNT", "0")
seen = dict(
    rank=rank, node=socket.gethostname(), cpus=sorted(os.sched_getaffinity(0)),
    gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""), arguments=sys.argv[1:],
)
job = os.environ.get("SLURM_HET_JOB_ID") or os.environ["SLURM_JOB_ID"]
path = f"{folder}/{{job}}-{{restart}}-{{rank}}"
with open(path + ".new", "w") as file:
    json.dump(seen, file)
os.rename(path + ".new", path + ".json")
if os.environ.get("STAND_IN") == "wait" and restart == "0":
    end = time.monotonic() + 60
    while not caught and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)  # the checkpoint
    sys.exit(75)
"""


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A running cluster of four nodes: h1 without GPUs, the others with two each."""
    require.root()
    os.environ["PATH"] = SYSTEM_PATH
    require.program(*virtual_hosts.NEEDED_PROGRAMS, *NEEDED_PROGRAMS)
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--mount", "true"], capture_output=True, check=False
    )
    if tried.returncode:
        require.left_out("may not make namespaces (unshare); in a container: --privileged")
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the PATH of jobs: it has aladdin-mpi, if the environment has none."""
    folder = tmp_path_factory.mktemp("programs")
    own = Path(sys.executable).with_name("aladdin-mpi")
    if not own.exists() and shutil.which("aladdin-mpi") is None:
        program = folder / "aladdin-mpi"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m aladdin_mpi "$@"\n')
        program.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program in aladdin-mpi's place, and with what it has said."""
    folder = tmp_path_factory.mktemp("stand-in")
    program = folder / "aladdin-mpi"
    program.write_text(STAND_IN.format(python=sys.executable, folder=folder))
    program.chmod(0o755)
    return folder
