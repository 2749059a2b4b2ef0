"""Processes that are stopped for a while are named, with what they were doing, and then go on."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Started, command, environment

pytestmark = pytest.mark.timeout(240)

SCRIPT = Path(__file__).parent / "scripts" / "failures.py"
STALL_S = 3.0
"""As the script sets it."""


def until(what: Callable[[], object], started: Started, err: Path, limit_s: float = 90) -> None:
    """Wait for something to be true."""
    limit = time.monotonic() + limit_s
    while not what():
        assert started.process.poll() is None, err.read_text()
        assert time.monotonic() < limit, err.read_text()
        time.sleep(0.1)


def test_stopped_worker_and_stopped_server_are_named(tmp_path: Path) -> None:
    err = tmp_path / "err"
    argv = command(3, [sys.executable, SCRIPT, tmp_path, "paced"])

    def said(text: str) -> Callable[[], object]:
        return lambda: text in err.read_text()

    def pid(rank: int) -> int:
        return int((tmp_path / f"pid-{rank}").read_text())

    with err.open("w") as stream:
        with Started(argv, env=environment(), cwd=tmp_path, stderr=stream) as started:
            trains = [tmp_path / f"trains-{rank}" for rank in (1, 2)]
            until(lambda: all(path.exists() for path in trains), started, err)
            time.sleep(2)
            os.kill(pid(2), signal.SIGSTOP)
            try:
                until(said("rank 0 (server): worker 1 has "), started, err, 30)
                time.sleep(1)
            finally:
                os.kill(pid(2), signal.SIGCONT)
            until(said("worker 1 goes on after"), started, err, 30)
            os.kill(pid(0), signal.SIGSTOP)
            try:
                for rank in (1, 2):
                    words = f"rank {rank} (worker {rank - 1}): the server (rank 0) has said nothing"
                    until(said(words), started, err, 30)
            finally:
                os.kill(pid(0), signal.SIGCONT)
            for rank in (1, 2):
                words = f"rank {rank} (worker {rank - 1}): the server (rank 0) goes on after"
                until(said(words), started, err, 30)
            time.sleep(1)
            (tmp_path / "end").touch()
            assert started.wait(60) == 0, err.read_text()
    assert (tmp_path / "finished-0").exists() and (tmp_path / "finished-1").exists()
    named = [line for line in err.read_text().splitlines() if ": worker 1 has " in line]
    assert any(
        line.endswith(f"phase '{phase}'") for line in named for phase in ("compute", "step")
    ), named
