"""``bench/hotpath.py``: what it counts is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launching import environment

BENCH = Path(__file__).resolve().parents[2] / "bench"

SCRIPT = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
import hotpath
hotpath.watch_server(hotpath.Measured(hotpath.Path("unused"), False), 0)
hotpath.watch_worker()
"""


def test_every_function_that_it_wraps_exists() -> None:
    """In a process of its own, whose classes stay wrapped."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment(), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
