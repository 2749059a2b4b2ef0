"""Jobs that fail: in seconds, with the reason first, and with nothing left hanging."""

import sys
from pathlib import Path

import numpy as np
import pytest
from launching import CompletedRun, mpirun

from aladdin_mpi.record.reading import open_rank_file, rank_path
from aladdin_mpi.record.schema import EventKind

pytestmark = pytest.mark.timeout(180)

SCRIPT = Path(__file__).parent / "scripts" / "failures.py"
LIMIT_S = 120
"""A hang, not slowness, must fail these tests: importing torch on a busy machine takes long."""


def job(folder: Path, way: str, ranks: int = 3, **env: str) -> CompletedRun:
    """Run a script that may fail."""
    argv = [sys.executable, SCRIPT, folder, way]
    return mpirun(ranks, argv, timeout=LIMIT_S, check=False, cwd=folder, env=env)


def the_error(run: CompletedRun) -> str:
    """The one line that tells a user what was wrong."""
    assert run.returncode != 0, run.stderr
    assert "Traceback" not in run.stderr, run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("aladdin-mpi: error:")]
    assert len(lines) == 1, run.stderr
    return lines[0]


def events(folder: Path, rank: int, kind: EventKind) -> np.ndarray:
    with open_rank_file(rank_path(folder / "run", rank)) as file:
        table = file["events"][:]
    return table[table["kind"] == kind]


def test_a_rank_that_raises(tmp_path: Path) -> None:
    run = job(tmp_path, "raises")
    assert run.returncode != 0
    lines = run.stderr.splitlines()
    assert lines[0] == "rank 2 (worker 1):", run.stderr
    assert lines[1].startswith("Traceback"), run.stderr
    assert "RuntimeError: this worker is broken" in lines
    assert run.stderr.count("Traceback") == 1, run.stderr


def test_a_rank_that_raises_before_init(tmp_path: Path) -> None:
    run = job(tmp_path, "early")
    assert run.returncode != 0
    assert "RuntimeError: before init" in run.stderr


def test_exit_without_finish(tmp_path: Path) -> None:
    line = the_error(job(tmp_path, "exits"))
    assert "rank 2 (worker 1):" in line and "without aladdin_mpi.finish()" in line


@pytest.mark.first_mpi
def test_different_models(tmp_path: Path) -> None:
    line = the_error(job(tmp_path, "models"))
    assert "worker 1 has another model than worker 0" in line
    assert "parameter 1.weight float32[2, 8] in place of 1.weight float32[1, 8]" in line


@pytest.mark.first_mpi
def test_refused_optimizers_and_a_closure(tmp_path: Path) -> None:
    assert "step(closure) is not supported" in the_error(job(tmp_path, "refused"))


@pytest.mark.first_mpi
def test_sparse_gradients(tmp_path: Path) -> None:
    assert "parameter table has a sparse gradient" in the_error(job(tmp_path, "sparse"))


@pytest.mark.first_mpi
def test_unwritable_folder(tmp_path: Path) -> None:
    line = the_error(job(tmp_path, "unwritable"))
    assert "--out /proc/nowhere/run: cannot be written" in line


@pytest.mark.first_mpi
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("option", "--periode: is no option of --algorithm aladdin"),
        ("period", "--period 0: must be at least"),
    ],
)
def test_wrong_options(tmp_path: Path, way: str, words: str) -> None:
    assert words in the_error(job(tmp_path, way))


def test_one_rank_only(tmp_path: Path) -> None:
    line = the_error(job(tmp_path, "alone", ranks=1))
    assert "1 rank(s), but a server and at least one worker are needed" in line


@pytest.mark.first_mpi
def test_nan_is_skipped(tmp_path: Path) -> None:
    run = job(tmp_path, "skip")
    assert run.returncode == 0, run.stderr
    assert "rank 2 (worker 1): iteration 1" in run.stderr and "thrown away" in run.stderr
    assert len(events(tmp_path, 2, EventKind.NONFINITE_PUSH)) == 2
    for rank in (0, 1):
        assert len(events(tmp_path, rank, EventKind.NONFINITE_PUSH)) == 0


@pytest.mark.first_mpi
def test_nan_stops(tmp_path: Path) -> None:
    line = the_error(job(tmp_path, "stop"))
    assert "rank 2 (worker 1): iteration 2" in line and "training has diverged" in line


@pytest.mark.first_mpi
def test_uneven_data(tmp_path: Path) -> None:
    """The worker with more data goes on alone after the other has ended, at its own pace."""
    run = job(tmp_path, "uneven")
    assert run.returncode == 0, run.stderr
    with open_rank_file(rank_path(tmp_path / "run", 1)) as file:
        steps = file["steps"][:]
        other_left = events(tmp_path, 0, EventKind.LEAVE)
    assert len(steps) == 300
    assert steps["blocked_s"].max() == 0
    assert other_left["worker"].tolist() == [1, 0]
    short, long = (float((tmp_path / f"trained-{worker}").read_text()) for worker in (1, 0))
    assert short < long
    models = [(tmp_path / f"model-{worker}").read_text() for worker in (0, 1)]
    assert models[0] == models[1]
