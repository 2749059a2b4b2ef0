"""The helper that starts MPI programs: sizes, exit statuses, and nothing left after a time-out."""

import os
import sys
import time
from pathlib import Path

import pytest
from launching import RunFailed, environment, mpirun

SIZE = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
total = comm.allreduce(comm.rank)
if comm.rank == 0:
    print("size", comm.size, "total", total)
"""

FAIL = """
import sys
from mpi4py import MPI
print("rank", MPI.COMM_WORLD.rank, "fails", file=sys.stderr, flush=True)
MPI.COMM_WORLD.Barrier()
sys.exit(3)
"""

HANG = """
import os, subprocess, sys, time
from pathlib import Path
from mpi4py import MPI
comm = MPI.COMM_WORLD
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
Path(sys.argv[1], f"{os.getpid()}").touch()
Path(sys.argv[1], f"{child.pid}").touch()
comm.Barrier()
print("all started", flush=True)
time.sleep(600)
"""


def write(folder: Path, text: str) -> list[str]:
    program = folder / "program.py"
    program.write_text(text)
    return [sys.executable, str(program)]


def is_alive(pid: int) -> bool:
    try:
        state = Path("/proc", str(pid), "stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.parametrize("n", [1, 2, 5])
def test_world_size(tmp_path: Path, n: int) -> None:
    run = mpirun(n, write(tmp_path, SIZE), timeout=60)
    assert f"size {n} total {n * (n - 1) // 2}" in run.stdout
    assert run.returncode == 0
    assert 0 < run.seconds < 60


def test_exit_status_propagates(tmp_path: Path) -> None:
    argv = write(tmp_path, FAIL)
    run = mpirun(2, argv, timeout=60, check=False)
    assert run.returncode != 0
    assert "rank 1 fails" in run.stderr
    with pytest.raises(RunFailed, match="exit status") as failed:
        mpirun(2, argv, timeout=60)
    assert not failed.value.timed_out


def test_time_out_leaves_nothing_running(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    with pytest.raises(RunFailed, match="not ended") as failed:
        mpirun(3, [*write(tmp_path, HANG), pids], timeout=8)
    assert failed.value.timed_out
    assert "all started" in failed.value.run.stdout
    started = [int(path.name) for path in pids.iterdir()]
    assert len(started) == 6
    limit = time.monotonic() + 10  # a killed process needs a moment to be gone
    while any(map(is_alive, started)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert [pid for pid in started if is_alive(pid)] == []


def test_environment_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "7")
    monkeypatch.setenv("UNWANTED", "1")
    assert "PMI_RANK" not in environment()
    argv = write(tmp_path, "import os; print([os.environ.get(k) for k in ('WANTED', 'UNWANTED')])")
    run = mpirun(1, argv, timeout=60, env={"WANTED": "yes", "UNWANTED": None}, cwd=tmp_path)
    assert "['yes', None]" in run.stdout
    assert os.environ["UNWANTED"] == "1"
