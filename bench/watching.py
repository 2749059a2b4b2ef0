"""What being watched costs a run: 1,000 rows a second, watched for a while and not, in turn.

    python bench/watching.py --seconds 60

A loop of steps that are slept, 1 ms each, logs a row a step.  ``aladdin-mpi watch`` shows it in a
terminal of its own.  What is compared is the time between the ends of two steps.  Compare figures
of one run only.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click
import numpy as np

from aladdin_mpi.record.hdf5 import RankFile
from aladdin_mpi.record.reading import rank_path
from aladdin_mpi.record.recorder import Recorder

STEP_S = 0.001


class Loop(NamedTuple):
    """One loop: [ms] median and 99 % of a step, share of a core that its process needed, rows."""

    median_ms: float
    slow_ms: float
    cpu: float
    rows: int


def write(folder: Path, seconds: float) -> tuple[Loop, str]:
    """Log a row per step; what went wrong, if anything."""
    attributes = {
        "rank": 0, "worker": 0, "world_size": 1, "num_workers": 1, "role": "worker",
        "run": folder.name, "config": "algorithm: none",
    }  # fmt: skip
    said: list[str] = []
    file = RankFile(rank_path(folder, 0), attributes)
    ends = []
    with Recorder(file, report=said.append) as recorder:
        cpu, first = time.process_time(), time.monotonic()
        begin = end = due = first
        while end < first + seconds:
            due = max(due + STEP_S, end)
            time.sleep(max(0.0, due - time.monotonic()))
            end = time.monotonic()
            recorder.steps(
                (len(ends), 0, 0, begin, end - begin, 0.0, end - begin, *[0.0] * 4, np.nan, np.nan,
                 1.0, 0.1, 32, 0, 1, 0, 1),
            )  # fmt: skip
            begin = end
            ends.append(end)
        cpu = (time.process_time() - cpu) / seconds
    took_ms = 1e3 * np.diff(ends)
    if recorder.rows_lost:
        said.append(f"{recorder.rows_lost} rows lost")
    loop = Loop(median(took_ms), float(np.percentile(took_ms, 99)), cpu, len(ends))
    return loop, "; ".join(said)


class Screen:
    """``aladdin-mpi watch`` in a terminal."""

    def __init__(self, folder: Path) -> None:
        self._terminal, theirs = pty.openpty()
        line = [sys.executable, "-m", "aladdin_mpi", "watch", "--wait", str(folder)]
        self._process = subprocess.Popen(
            line, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
        )  # fmt: skip
        os.close(theirs)
        self._shown = b""
        self._thread = threading.Thread(target=self._drain)
        self._thread.start()

    def _drain(self) -> None:
        while True:
            try:
                data = os.read(self._terminal, 1 << 16)
            except OSError:  # closed at the other end
                return
            self._shown += data

    def wait_for_start(self) -> None:
        """Until it waits for the run's files."""
        assert self._process.stderr is not None
        self._process.stderr.readline()

    def end(self, rows: int) -> tuple[int, str]:
        """How many views it showed, and what went wrong: it ends by itself."""
        _, stderr = self._process.communicate(timeout=60)
        self._thread.join()
        os.close(self._terminal)
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._shown.decode(errors="replace"))
        wrong = [f"exit code {self._process.returncode}"] if self._process.returncode else []
        wrong += [stderr.decode().strip()] if stderr.strip() else []
        if f" {rows} iterations" not in text:
            wrong.append(f"it did not see all of {rows} rows")
        return text.count(" samples/s, ") + text.count(" on the whole"), "; ".join(wrong)


@click.command(help=__doc__)
@click.option("--seconds", default=60.0, show_default=True, help="Watched, and as long not.")
@click.option("--rounds", default=3, show_default=True, help="Into which that is split.")
def main(seconds: float, rounds: int) -> None:
    sys.setswitchinterval(1e-3)  # as in a run
    loops: dict[bool, list[Loop]] = {True: [], False: []}
    errors: list[str] = []
    views = 0
    with tempfile.TemporaryDirectory() as name:
        for number in range(2 * rounds):
            watched = number % 2 == 1
            folder = Path(name) / f"run{number}"
            screen = Screen(folder) if watched else None
            if screen is not None:
                screen.wait_for_start()
            loop, wrong = write(folder, seconds / rounds)
            loops[watched].append(loop)
            errors += [f"writer: {wrong}"] if wrong else []
            if screen is not None:
                seen, wrong = screen.end(loop.rows)
                views += seen
                errors += [f"watch: {wrong}"] if wrong else []
    for watched, kind in ((False, "not watched"), (True, "watched")):
        rows = sum(loop.rows for loop in loops[watched])
        cells = (median(loop[n] for loop in loops[watched]) for n in range(3))
        click.echo(
            "{:12} step: median {:6.3f} ms, 99 % {:6.3f} ms; CPU of the writer {:5.1%}".format(
                kind, *cells
            )
            + f"; {rows} rows, {rows / seconds:.0f}/s"
        )
    pairs = list(zip(loops[True], loops[False], strict=True))
    middle, slow = (median(a[n] / b[n] for a, b in pairs) for n in (0, 1))
    click.echo(f"watched / not: median × {middle:.3f}, 99 % × {slow:.3f}; {views} views shown")
    click.echo("errors: " + ("; ".join(errors) if errors else "none"))
    if errors:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
