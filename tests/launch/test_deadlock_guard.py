"""The rules of tests/mpi: ranks fail together, and a test that blocks ends the whole job."""

import shutil
import sys
from pathlib import Path

import pytest
from launching import CompletedRun, mpirun

CONFTEST = Path(__file__).resolve().parents[1] / "mpi" / "conftest.py"

TESTS = """
import pytest
from mpi4py import MPI
RANK = MPI.COMM_WORLD.rank

def test_good(comm):
    assert comm.allreduce(1) == comm.size

def test_one_rank_fails():
    assert RANK != 1, "planted"

@pytest.fixture
def broken():
    if RANK == 1:
        raise ValueError("planted in a fixture")

def test_fixture(broken):
    pass

def test_one_rank_skips():
    if RANK == 0:
        pytest.skip("left out: planted")

def test_together(together):
    def step():
        if RANK == 1:
            raise KeyError("planted")
        return RANK
    with pytest.raises((KeyError, pytest.fail.Exception)):
        together(step)
    assert together(lambda: 5) == 5

@pytest.mark.ranks(at_least=3)
def test_three():
    pass

def test_last(comm, shared_path):
    (shared_path / str(RANK)).touch()
    comm.Barrier()
    assert len(list(shared_path.iterdir())) == comm.size
"""

BLOCKED = """
from mpi4py import MPI

def test_blocked():
    if {condition}:
        raise ValueError("planted")
    MPI.COMM_WORLD.recv(source=0, tag=7)
"""


def run_tests(folder: Path, text: str, **env: str) -> CompletedRun:
    shutil.copy(CONFTEST, folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    ranks\n    timeout\n")
    (folder / "test_planted.py").write_text(text)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_planted.py"]
    return mpirun(2, argv, timeout=60, env=env, check=False, cwd=folder)


def test_ranks_fail_together_and_go_on(tmp_path: Path) -> None:
    run = run_tests(tmp_path, TESTS)
    assert run.returncode != 0
    assert "2 failed, 3 passed, 1 deselected, 1 error" in run.stdout
    report = run.stdout.split("report of rank 1")[0]
    assert "rank 1: Traceback" in report
    assert "AssertionError: planted" in report
    assert "ValueError: planted in a fixture" in report


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("MPI.COMM_WORLD.rank == 1", "ValueError: planted"),
        ("False", "test_blocked has not ended after 4 s"),
    ],
    ids=["a failed rank leaves another waiting", "all ranks wait"],
)
def test_a_blocked_test_ends_the_job(tmp_path: Path, condition: str, expected: str) -> None:
    run = run_tests(
        tmp_path,
        BLOCKED.format(condition=condition),
        ALADDIN_MPI_TEST_LIMIT="4",
        ALADDIN_MPI_TEST_GRACE="1",
    )
    assert run.returncode != 0
    assert expected in run.stderr
    assert "in test_blocked" in run.stderr
