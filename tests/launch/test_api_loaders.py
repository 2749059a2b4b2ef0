"""DataLoader worker processes under MPI, and the example scripts."""

import difflib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment, mpirun

pytestmark = pytest.mark.timeout(300)

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 280


@pytest.mark.first_mpi
def test_loader_processes(tmp_path: Path) -> None:
    """All samples are seen in an epoch, and both start methods work."""
    mpirun(3, [sys.executable, SCRIPTS / "loaders.py", tmp_path], timeout=LIMIT_S, cwd=tmp_path)
    workers = [json.loads((tmp_path / f"worker-{i}.json").read_text()) for i in range(2)]
    total = 0
    for feature in ("by_default", "spawn"):
        one, other = (worker[feature] for worker in workers)
        assert one["digest"] == other["digest"]
        assert one["batches"] == other["batches"] == 8  # 60 of 120 samples, by 8
        for seen in (one["seen"], other["seen"]):
            assert len(set(seen)) == len(seen)  # nobody takes a sample twice in an epoch
        assert one["seen"] != other["seen"]
        total += len(one["seen"]) + len(other["seen"])
    # what the first epoch had too much, because a worker heard of the other's samples late, counts
    # for the second one, which may begin before
    assert total >= 2 * 120


@pytest.mark.first_mpi
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    argv = [sys.executable, SCRIPTS / "unguarded.py", tmp_path / "run"]
    run = mpirun(3, argv, timeout=LIMIT_S, check=False, cwd=tmp_path)
    assert run.returncode != 0
    assert "Traceback" not in run.stderr, run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("aladdin-mpi: error:")]
    assert len(lines) == 1, run.stderr
    assert "put its code under if __name__ == '__main__':" in lines[0]


@pytest.mark.first_mpi
def test_a_loader_that_was_not_partitioned_cannot_start_a_second_job(tmp_path: Path) -> None:
    """The processes of a plain loader import an unguarded script: they say what is wrong."""
    argv = [sys.executable, SCRIPTS / "unguarded.py", tmp_path / "run", "plain"]
    run = mpirun(3, argv, timeout=LIMIT_S, check=False, cwd=tmp_path)
    assert run.returncode != 0
    assert "aladdin_mpi.init() was called in a DataLoader worker process" in run.stderr


def accuracy(output: str) -> float:
    found = re.findall(r"^test accuracy ([\d.]+)$", output, re.MULTILINE)
    assert len(found) == 1, output  # one rank prints
    return float(found[0])


@pytest.mark.first_mpi
def test_example_alone_and_distributed(tmp_path: Path) -> None:
    """The plain script and its twin both learn."""
    run = subprocess.run(
        [sys.executable, EXAMPLES / "digits_plain.py"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert accuracy(run.stdout) >= 0.9  # a tenth by chance
    (tmp_path / "digits.pt").unlink()
    twin = mpirun(
        3, [sys.executable, EXAMPLES / "digits_aladdin.py"], timeout=LIMIT_S, cwd=tmp_path
    )
    assert accuracy(twin.stdout) >= 0.9
    assert (tmp_path / "digits.pt").exists()


def test_the_twin_has_only_a_few_lines_more() -> None:
    """Apart from indentation: an import, four calls, and that one rank prints and saves."""
    plain, twin = (
        [line.strip() for line in (EXAMPLES / name).read_text().splitlines() if line.strip()]
        for name in ("digits_plain.py", "digits_aladdin.py")
    )
    changed = [line for line in difflib.ndiff(plain, twin) if line[0] in "+-?"]
    assert changed == [
        "+ import aladdin_mpi as am",
        '+ am.init(algorithm="aladdin", period=4)',
        "+ optimizer = am.DistributedOptimizer(optimizer, model)",
        "+ loader = am.partition(loader)",
        "+ am.finish(model)",
        "+ if am.rank() == 0:",
    ]
