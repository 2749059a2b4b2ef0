"""Every script of ``slurm/`` trains, with only its top edited; and ``aladdin-mpi slurm``.

GPUs are pretended, so that the training itself is on CPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import launching
import pytest
import require
from cluster import Job, SlurmCluster
from scripts import SMALL, said, write

pytestmark = pytest.mark.timeout(180)

LIMIT_S = 90
ALADDIN = f"({SMALL} --algorithm aladdin)"
ONE_TASK = {"ntasks-per-node": 1, "cpus-per-task": 1}


def run(
    slurm: SlurmCluster,
    folder: Path,
    programs: Path,
    name: str,
    options: Mapping[str, Any],
    variables: Mapping[str, str],
) -> tuple[str, Job, str]:
    """Submit a script and wait for its end; return number, job and output."""
    slurm.settle()
    number = slurm.submit(write(folder, name, options, variables, programs))
    ended = slurm.wait(number, LIMIT_S)
    return number, ended, "".join(path.read_text() for path in folder.glob(f"{name}*.out"))


def hosts_of(folder: Path) -> list[str]:
    """Return where the ranks of a run were, as their logs have it."""
    hosts = []
    for path in sorted(folder.glob("rank*.h5")):
        with h5py.File(path) as file:
            hosts.append(str(file.attrs["host"]))
    return hosts


def serving(folder: Path) -> list[int]:
    """Return which ranks were servers."""
    found = []
    for path in sorted(folder.glob("rank*.h5")):
        with h5py.File(path) as file:
            if file.attrs["role"] == "server":
                found.append(int(file.attrs["rank"]))
    return found


@pytest.mark.parametrize(
    ("launcher", "nodes", "servers"), [("srun", 4, "servers 2"), ("mpirun", 3, "one server")]
)
def test_cpu(
    slurm: SlurmCluster, tmp_path: Path, programs: Path, launcher: str, nodes: int, servers: str
) -> None:
    several = servers == "servers 2"
    more = " --servers 2 --server-placement spread" if several else ""
    training = f"({SMALL} --algorithm aladdin{more})"
    variables = {"TRAINING": training, "OUT": "run", "LAUNCHER": launcher}
    options = {"nodes": nodes, **ONE_TASK}
    _, job, output = run(slurm, tmp_path, programs, "train_cpu", options, variables)
    assert job.state == "COMPLETED", output
    assert (tmp_path / "run" / "model.pt").exists()
    assert len(set(hosts_of(tmp_path / "run"))) == nodes
    assert serving(tmp_path / "run") == ([0, 2] if several else [0])


def test_gpu(slurm: SlurmCluster, tmp_path: Path, programs: Path) -> None:
    options = {"nodes": 2, "ntasks-per-node": 2, "gpus-per-node": 1, "cpus-per-task": 1}
    variables = {"TRAINING": ALADDIN, "OUT": "run", "UCX_TLS": "all"}
    require.cores(2)
    _, job, output = run(slurm, tmp_path, programs, "train_gpu_ib", options, variables)
    assert job.state == "COMPLETED", output
    assert (tmp_path / "run" / "model.pt").exists()
    server, beside, other = hosts_of(tmp_path / "run")
    assert server == beside != other


def test_hetjob(slurm: SlurmCluster, tmp_path: Path, programs: Path) -> None:
    options = {
        "partition": ("cpu", "gpu"), "nodes": (1, 2), "ntasks-per-node": (1, 1),
        "cpus-per-task": (1, 1), "gpus-per-node": 1,
    }  # fmt: skip
    variables = {"TRAINING": ALADDIN, "OUT": "run", "UCX_TLS": "all"}
    _, job, output = run(slurm, tmp_path, programs, "train_hetjob", options, variables)
    assert job.state == "COMPLETED", output
    assert (tmp_path / "run" / "model.pt").exists()
    server, *workers = hosts_of(tmp_path / "run")
    assert server == "h1", "rank 0, the server, on the CPU node"
    assert len(set(workers) - {server}) == 2


def test_sweep(slurm: SlurmCluster, tmp_path: Path, programs: Path) -> None:
    """Six runs; two ranks each, and one after the other, so that two cores are enough."""
    lines = ["aladdin 2 0 -", "aladdin 2 1 -", "asp 2 0 -", "bsp 2 0 0:2"]
    lines += ["localsgd 2 0 -", "gosgd 2 0 1:2"]
    (tmp_path / "table.txt").write_text("# comment\n\n" + "\n".join(lines) + "\n")
    options = {"array": "1-6%2", "ntasks": 2, "cpus-per-task": 1}
    variables = {"TABLE": "table.txt", "TRAINING": f"({SMALL})", "OUT": "runs", "CPU_BIND": "none"}
    number = slurm.submit(write(tmp_path, "sweep", options, variables, programs))
    jobs = [slurm.wait(f"{number}_{i}", LIMIT_S) for i in range(1, 7)]
    outputs = {path.name: path.read_text() for path in tmp_path.glob("sweep-*.out")}
    assert [job.state for job in jobs] == ["COMPLETED"] * 6, outputs
    models = sorted(path.parent.name for path in (tmp_path / "runs").glob("*/model.pt"))
    assert models == sorted(
        "{}-ranks{}-seed{}-slow{}".format(*line.replace(":", "x").split()) for line in lines
    )


def test_links(slurm: SlurmCluster, tmp_path: Path, programs: Path) -> None:
    bench = Path(__file__).resolve().parents[2] / "bench" / "mailbox.py"
    variables = {"BENCH": str(bench), "OPTIONS": "(--sizes 65536 --rounds 1)", "OUT": "tables"}
    options = {"nodes": 2, **ONE_TASK}
    _, job, output = run(slurm, tmp_path, programs, "bench_links", options, variables)
    assert job.state == "COMPLETED", output
    (table,) = (tmp_path / "tables").iterdir()
    assert table.suffix == ".csv" and f"{table.stem} to h" in output


WRONG = {"mpich": "none", "openmpi": "pmi2"}
"""Types of srun's --mpi with which an MPI believes that every task is alone."""


def test_a_wrong_type_of_mpi_is_one_line(
    slurm: SlurmCluster, tmp_path: Path, programs: Path
) -> None:
    variables = {"TRAINING": ALADDIN, "OUT": "run", "MPI_TYPE": WRONG[launching.family()]}
    _, job, output = run(
        slurm, tmp_path, programs, "train_cpu", {"nodes": 3, **ONE_TASK}, variables
    )
    assert (job.state, job.exit_code) == ("FAILED", "2:0"), output
    lines = [line for line in output.splitlines() if line.startswith("aladdin-mpi: error:")]
    assert len(lines) == 1, output
    assert "3 processes" in lines[0] and "srun --mpi=list" in lines[0]
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


def aladdin_slurm(
    slurm: SlurmCluster, *arguments: str, cwd: Path, path: str = ""
) -> tuple[int, str, str]:
    """Call ``aladdin-mpi slurm`` on a node; ``path`` comes first on its PATH."""
    env = {"PATH": f"{path}:{slurm.environment()['PATH']}"} if path else {}
    command = [sys.executable, "-m", "aladdin_mpi", "slurm", *arguments]
    done = slurm.call(*command, check=False, env=env, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


def test_the_command_submits(slurm: SlurmCluster, tmp_path: Path, stand_in: Path) -> None:
    arguments = ["--nodes", "2", "--tasks-per-node", "1", "--cpus-per-task", "1", "--time", "5"]
    arguments += ["--mpi", launching.family(), "--submit", "--", "--algorithm", "asp", "--lr", "1"]
    slurm.settle()
    status, number, errors = aladdin_slurm(slurm, *arguments, cwd=tmp_path, path=str(stand_in))
    assert (status, errors) == (0, "")
    assert slurm.wait(number.strip(), 30).state == "COMPLETED"
    tasks = said(stand_in, number.strip())
    assert len({task["node"] for task in tasks}) == 2
    assert tasks[0]["arguments"][-4:] == ["--algorithm", "asp", "--lr", "1"]
    assert (tmp_path / f"aladdin-{number.strip()}.out").exists()


def test_a_refusal_is_one_line(slurm: SlurmCluster, tmp_path: Path) -> None:
    arguments = ["--partition", "none-such", "--submit"]
    status, printed, errors = aladdin_slurm(slurm, *arguments, cwd=tmp_path)
    assert (status, printed) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith("aladdin-mpi: error: --submit: sbatch refuses")
    assert "partition" in line
