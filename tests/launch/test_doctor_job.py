"""``aladdin-mpi doctor`` as a job of two ranks."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from launching import environment, mpirun

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(200)
def test_doctor_of_two_ranks(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "aladdin_mpi", "doctor", "--out", tmp_path]
    run = mpirun(2, argv, timeout=180, cwd=ROOT)
    lines = [click.unstyle(line) for line in run.stdout.splitlines()]
    found = {line.split(":")[0].split(maxsplit=1)[1]: line for line in lines}
    assert len(found) == len(lines), run.stdout  # rank 0 prints, and the ranks are alike
    assert "2 ranks" in found["launcher"]
    for what in ("torch", "MPI library", "MPI windows", "output folder", "aladdin_mpi"):
        assert found[what].startswith("ok "), found[what]
    assert "MPI progress" in found and "cores per rank" in found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(200)
def test_doctor_of_singletons() -> None:
    """As under a wrong ``srun --mpi``: one of those that are alone says so, all exit with 1."""
    for rank in ("0", "3"):
        run = subprocess.run(
            [sys.executable, "-m", "aladdin_mpi", "doctor"],
            env=environment({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": rank}),
            cwd=ROOT, capture_output=True, text=True, timeout=90,
        )  # fmt: skip
        assert run.returncode == 1, run.stdout + run.stderr
        said = "error    launcher: srun started 4 processes" in run.stdout
        assert said == (rank == "0"), run.stdout
        assert bool(run.stdout) == said
