"""What logging costs a training: one row, and the share of a step.

    python bench/recording.py --rounds 9 --csv recording.csv

Steps of 50 ms and 5 ms of real computing run with logging on and off in turn; medians over the
rounds.  Compare figures of one run only.  On a busy machine the difference of two loops is noise;
"its rows and their writing" adds up what was measured directly.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click
import numpy as np

from aladdin_mpi.record import schema
from aladdin_mpi.record.hdf5 import RankFile
from aladdin_mpi.record.reading import rank_path
from aladdin_mpi.record.recorder import NullRecorder, Recorder

STEP = (5, 0, 1, 1234.5, *[0.1] * 9, 2.3, 0.01, 64, 0, 1, 3, 0)
SEND = (5, 0, 1234.5, 0.1, 0.1, 0.1, 1 << 20, 1, 64, 1, 3, 99, -1)
MIX = (1234.5, 0, 5, 99, 0.8, 2, 0, -1)
EVENT = (1234.5, 4, 1, 5.0, b"rank 3 (worker 2) is silent")
KINDS = ("off", "swmr", "flush")
NUMBERS = count()


def recorder(folder: Path, kind: str) -> NullRecorder:
    if kind == "off":
        return NullRecorder()
    return Recorder(RankFile(rank_path(folder, next(NUMBERS)), swmr=kind == "swmr"))


def row_us(folder: Path, kind: str, table: str, row: schema.Row, rows: int = 5000) -> float:
    """[us] one row, median over batches of 100, with the thread writing meanwhile."""
    with recorder(folder, kind) as target:
        push: Callable[[schema.Row], None] = getattr(target, table)
        times = []
        for _ in range(rows // 100):
            begin = time.perf_counter()
            for _ in range(100):
                push(row)
            times.append((time.perf_counter() - begin) / 100)
    return median(times) * 1e6


def calibrate(matrix: np.ndarray, step_s: float) -> int:
    trials = []
    for _ in range(9):  # the best of them: others may be at work on this machine
        begin = time.perf_counter()
        for _ in range(30):
            matrix @ matrix
        trials.append((time.perf_counter() - begin) / 30)
    return max(1, round(step_s / min(trials)))


class Loop(NamedTuple):
    """One loop: [s] per step by the clock (median) and of CPU (all threads), [1] of a core."""

    step_s: float
    cpu_s: float
    writer: float


def loop(folder: Path, kind: str, matrix: np.ndarray, products: int, length_s: float) -> Loop:
    """Compute, and log a step, a push and now and then a mix."""
    times: list[float] = []
    writer: list[float] = [0.0]
    with recorder(folder, kind) as target:
        target.every(lambda: writer.append(time.thread_time()))  # of the housekeeping thread
        cpu = time.process_time()
        first = begin = time.perf_counter()
        while begin < first + length_s:
            for _ in range(products):
                matrix @ matrix
            target.steps(STEP)
            target.sends(SEND)
            if len(times) % 4 == 0:
                target.mixes(MIX)
            now = time.perf_counter()
            times.append(now - begin)
            begin = now
        cpu = time.process_time() - cpu
    return Loop(median(times), cpu / len(times), writer[-1] / length_s)


def pauses_us(folder: Path, kind: str, rows: int, batches: int = 40) -> tuple[float, float]:
    """[us] the writing of a batch, and all pauses of a thread that never leaves the interpreter.

    With ``kind`` "off" the batch is a sleep of 1 ms: what the machine does to that thread anyway.
    """
    gaps: list[float] = []
    stop = threading.Event()

    def spin() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            now = time.perf_counter()
            if now - last > 20e-6:
                gaps.append(now - last)
            last = now

    batch = np.zeros(rows, schema.STEPS.dtype), np.zeros(rows, schema.SENDS.dtype)
    writing, pauses = [], []
    with RankFile(rank_path(folder, next(NUMBERS)), swmr=kind == "swmr") as file:
        spinner = threading.Thread(target=spin)
        spinner.start()
        for _ in range(batches):
            time.sleep(0.01)
            gaps.clear()
            begin = time.perf_counter()
            if kind == "off":
                time.sleep(0.001)
            else:
                file.append("steps", batch[0])
                file.append("sends", batch[1])
                file.flush()
            writing.append(time.perf_counter() - begin)
            time.sleep(0.005)  # the last pause is noted when it is over
            pauses.append(sum(gaps))
        stop.set()
        spinner.join()
    return median(writing) * 1e6, median(pauses) * 1e6


@click.command(help=__doc__)
@click.option("--rounds", default=7, show_default=True, help="Rounds of off, swmr, flush.")
@click.option("--length", default=2.0, show_default=True, help="[s] of each loop.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Where to write.")
@click.option("--csv", type=click.Path(dir_okay=False, path_type=Path), help="Also write a CSV.")
def main(rounds: int, length: float, folder: Path | None, csv: Path | None) -> None:
    sys.setswitchinterval(1e-3)  # as in a run
    lines: list[tuple[str, str, str, float]] = []

    def note(what: str, mode: str, unit: str, value: float) -> None:
        lines.append((what, mode, unit, value))
        click.echo(f"{what:44} {mode:6} {value:10.3f} {unit}")

    with tempfile.TemporaryDirectory(dir=folder) as name:
        here = Path(name)
        cost: dict[tuple[str, str], float] = {}
        for table, row in (("steps", STEP), ("sends", SEND), ("mixes", MIX), ("events", EVENT)):
            for kind in KINDS:
                cost[table, kind] = row_us(here, kind, table, row)
                note(f"one row of {table}", kind, "us", cost[table, kind])
        for rows in (10, 1000):
            for kind in KINDS:
                writing, pauses = pauses_us(here, kind, rows)
                note(f"a batch of 2 x {rows} rows", kind, "us", writing)
                note("   pauses of a busy thread beside it", kind, "us", pauses)
        matrix = np.ones((128, 128), np.float32)
        for step_s in (0.05, 0.005):
            products = calibrate(matrix, step_s)
            loops: dict[str, list[Loop]] = {kind: [] for kind in KINDS}
            for turn in range(rounds):
                for kind in KINDS[turn % 3 :] + KINDS[: turn % 3]:
                    loops[kind].append(loop(here, kind, matrix, products, length))
            for kind in KINDS:
                pairs = list(zip(loops[kind], loops["off"], strict=True))
                text = f"step of {step_s * 1e3:g} ms"
                note(f"{text}: clock", kind, "ms", median(a.step_s for a, _ in pairs) * 1e3)
                note(f"{text}: CPU", kind, "ms", median(a.cpu_s for a, _ in pairs) * 1e3)
                if kind != "off":
                    clock = median(a.step_s / b.step_s for a, b in pairs) - 1
                    cpu = median(a.cpu_s / b.cpu_s for a, b in pairs) - 1
                    note(f"{text}: clock against off", kind, "%", clock * 100)
                    note(f"{text}: CPU against off", kind, "%", cpu * 100)
                writer = median(a.writer for a, _ in pairs)
                note(f"{text}: housekeeping thread", kind, "% core", writer * 100)
                rows_us = cost["steps", kind] + cost["sends", kind] + cost["mixes", kind] / 4
                note(
                    f"{text}: its rows and their writing",
                    kind,
                    "%",
                    rows_us / step_s / 1e4 + writer * 100,
                )
    if csv is not None:
        text = "".join(f"{what.strip()},{mode},{unit},{v:.6g}\n" for what, mode, unit, v in lines)
        csv.write_text("what,mode,unit,value\n" + text)


if __name__ == "__main__":
    main()
