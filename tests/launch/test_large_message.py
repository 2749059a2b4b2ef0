"""Messages above the 2^31 bytes that some libraries cannot put or send at once."""

import shutil
import sys
from pathlib import Path

import pytest
from launching import mpirun
from require import left_out

SCRIPTS = Path(__file__).parent / "scripts"
TESTS = Path(__file__).parents[1]
NEEDS_GIB, SHARED_GIB = 8, 3
LIMIT_S = 240


def free_gib() -> float:
    """[GiB] memory that can still be used."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    return 0.0


@pytest.mark.timeout(LIMIT_S + 20)
def test_a_message_of_more_than_2_gib() -> None:
    if free_gib() < NEEDS_GIB:
        left_out(f"needs {NEEDS_GIB} GiB of free memory")
    if shutil.disk_usage("/dev/shm").free < SHARED_GIB << 30:
        left_out(f"needs {SHARED_GIB} GiB of /dev/shm")
    argv = [sys.executable, "-m", "mpi4py", SCRIPTS / "large_message.py"]
    run = mpirun(2, argv, timeout=LIMIT_S, env={"PYTHONPATH": str(TESTS)})
    assert "messages [1, 2]" in run.stdout
    assert "and back" in run.stdout
