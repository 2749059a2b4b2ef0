"""A launcher that belongs to another MPI starts processes that each believe to be alone."""

import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment

pytestmark = pytest.mark.timeout(120)

SCRIPT = "import sys, aladdin_mpi as am; am.init(out=sys.argv[1], progress='off')"


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"},
    ],
)
def test_singletons_are_detected(tmp_path: Path, variables: dict[str, str]) -> None:
    """All find it, and one says so."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "run"],
        env=environment(variables),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("aladdin-mpi: error:")]
    if variables["SLURM_PROCID"] != "0":
        assert lines == [], run.stderr
        return
    assert len(lines) == 1, run.stderr
    assert "srun started 4 processes" in lines[0] and "the launcher belongs to another" in lines[0]
    assert not (tmp_path / "run").exists()
