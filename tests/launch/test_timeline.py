"""The timeline of real runs: everything that was pushed arrives at a merge."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tracing
from launching import environment, mpirun

pytestmark = pytest.mark.timeout(200)


def run(folder: Path, algorithm: str) -> list[tracing.Event]:
    argv = [
        sys.executable, "-m", "aladdin_mpi", "train", "--dataset", "digits", "--epochs", "2",
        "--algorithm", algorithm, "--out", folder,
    ]  # fmt: skip
    mpirun(3, argv, timeout=120)
    line = [sys.executable, "-m", "aladdin_mpi", "timeline", str(folder)]
    shown = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stderr) == (0, ""), shown.stderr
    return tracing.load(folder / "trace.json")


@pytest.mark.first_mpi
def test_of_a_run_with_a_server(tmp_path: Path) -> None:
    events = run(tmp_path / "run", "aladdin")
    transfers = [e for e in tracing.slices(events, "push") if "sequence" in e.get("args", {})]
    pushes = tracing.arrows(events, "push")
    assert len(transfers) == len(pushes) > 10
    assert all(merge["name"].startswith("merge") for _, merge in pushes)
    replies = tracing.arrows(events, "reply")
    assert replies and all(mix["name"] == "mix" for _, mix in replies)


@pytest.mark.first_mpi
def test_of_a_run_without_one(tmp_path: Path) -> None:
    events = run(tmp_path / "run", "sgp")
    messages = tracing.arrows(events, "message")
    assert len(messages) == len(tracing.slices(events, "message to")) > 10
