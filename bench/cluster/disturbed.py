"""What a stopped or slow rank does to the others, and how full a link gets, on virtual hosts.

    python bench/cluster/disturbed.py --csv cluster.csv

Run it as root with the interpreter of an environment that has MPICH or Open MPI: it measures that
one.  First a server and three workers with 200 Mb/s links train on 1 MB of parameters while a rank
is stopped, slowed or cut off, one after the other (see ``tests/cluster/disturbances.py``); figures
are those of the *other* workers.  Then four workers push 8 MB over 1 Gb/s links, undisturbed.
Compute is emulated by sleeping, so a core that the sender burns does not lengthen a step by itself;
all ranks share this machine's cores all the same, and steps get longer when these are busy.  Where
``longest_during_ms`` is far above the median, compare it with ``server_gap_during_ms``: a machine
that stands still shows in both.
"""

from __future__ import annotations

import csv
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

import click
import numpy as np

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "cluster")]

import launching  # noqa: E402
from disturbances import (  # noqa: E402
    SCENARIOS,
    SERVER,
    Logs,
    Window,
    disturbed_run,
    plain_run,
)  # fmt: skip
from virtual_hosts import NEEDED_PROGRAMS  # noqa: E402

Row = dict[str, str | float]
DISTURBED = [
    "step_before_ms", "step_during_ms", "step_after_ms", "longest_during_ms",
    "server_gap_during_ms", "blocked_s",
    "coalesced_before", "coalesced_during", "merges_before_per_s", "merges_during_per_s",
    "merges_after_per_s",
]  # fmt: skip
PLAIN = ["step_ms", "step_p90_ms", "blocked_s", "into_server_mb_per_s", "coalesced"]


def steps_of_others(logs: Logs, window: Window) -> np.ndarray:
    """The steps of all workers to whom nothing was done."""
    return np.concatenate([logs.steps_in(worker, window) for worker in logs.others(window)])


def median_ms(steps: np.ndarray) -> float:
    """Median duration of steps."""
    return float(np.median(steps["step_s"])) * 1e3


def disturbed_rows(folder: Path, workers: int, rate: str, seconds: float) -> list[Row]:
    """One row per scenario."""
    windows = disturbed_run(folder, workers=workers, rate=rate, seconds=seconds, quiet_s=seconds)
    logs = Logs(folder, workers)
    expected = logs.expected()
    if any((np.rint(logs.final(worker)) != expected).any() for worker in logs.workers):
        raise click.ClickException("the final model is wrong")
    rows: list[Row] = []
    for window in windows:
        before, after = window.before(seconds - 1), window.after(seconds - 1)
        quiet, during, then = (steps_of_others(logs, w) for w in (before, window, after))
        rows.append({
            "scenario": window.name,
            "step_before_ms": median_ms(quiet),
            "step_during_ms": median_ms(during),
            "step_after_ms": median_ms(then),
            "longest_during_ms": float(during["step_s"].max()) * 1e3,
            "server_gap_during_ms": logs.server_gap_s(window) * 1e3,
            "blocked_s": float(during["blocked_s"].sum()),
            "coalesced_before": float(quiet["coalesced"].mean()),
            "coalesced_during": float(during["coalesced"].mean()),
            "merges_before_per_s": logs.merges_per_s(before),
            "merges_during_per_s": logs.merges_per_s(window),
            "merges_after_per_s": logs.merges_per_s(after),
        })  # fmt: skip
    return rows


def plain_row(
    folder: Path, workers: int, rate: str, megabytes: float, compute_ms: float, seconds: float
) -> Row:
    """Undisturbed training with large pushes."""
    window = plain_run(
        folder, workers=workers, rate=rate, parameters=round(megabytes * 1e6 / 4),
        compute_ms=compute_ms, seconds=seconds,
    )  # fmt: skip
    logs = Logs(folder, workers)
    assert window.victim == SERVER  # so all workers count
    steps = steps_of_others(logs, window)
    return {
        "scenario": f"{workers} workers push {megabytes:g} MB over {rate}",
        "step_ms": median_ms(steps),
        "step_p90_ms": float(np.percentile(steps["step_s"], 90)) * 1e3,
        "blocked_s": float(steps["blocked_s"].sum()),
        "into_server_mb_per_s": logs.bytes_per_s(window) / 1e6,
        "coalesced": float(steps["coalesced"].mean()),
    }


def show(rows: list[Row], columns: list[str]) -> None:
    """Print a table, a line per column: names are long, scenarios few."""
    width = max(len(column) for column in columns)
    for row in rows:
        click.echo(f"\n{row['scenario']}")
        for column in columns:
            value = float(row.get(column, math.nan))
            digits = 3 if column in ("blocked_s",) or column.startswith("coalesced") else 1
            click.echo(f"  {column:<{width}} {value:10.{digits}f}")


@click.command(help=__doc__.split("\n")[0])
@click.option("--seconds", default=5.0, show_default=True, help="Length of a disturbance.")
@click.option("--rate", default="200mbit", show_default=True, help="Links of the disturbed job.")
@click.option("--workers", default=4, show_default=True, help="Workers that push large updates.")
@click.option("--megabytes", default=8.0, show_default=True, help="Size of these updates.")
@click.option("--fast-rate", default="1gbit", show_default=True, help="Links of these workers.")
@click.option("--compute-ms", default=100.0, show_default=True, help="Their emulated compute.")
@click.option("--fast-seconds", default=15.0, show_default=True, help="How long that is measured.")
@click.option("--only", type=click.Choice(["disturbed", "pushes"]), help="One of the two parts.")
@click.option("--csv", "path", type=click.Path(path_type=Path), help="Write the figures here too.")
def main(
    seconds: float, rate: str, workers: int, megabytes: float, fast_rate: str, compute_ms: float,
    fast_seconds: float, only: str | None, path: Path | None,
) -> None:  # fmt: skip
    missing = [name for name in NEEDED_PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        raise click.ClickException(f"needs root, and iproute2 (missing: {missing or 'nothing'})")
    mpi = launching.family()
    click.echo(f"{mpi}; compute is emulated; {os.cpu_count()} cores for all ranks together")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="aladdin-cluster-") as folder:
        if only != "pushes":
            disturbed = disturbed_rows(Path(folder) / "disturbed", 3, rate, seconds)
            assert len(disturbed) == len(SCENARIOS)
            show(disturbed, DISTURBED)
            rows += disturbed
        if only != "disturbed":
            plain = plain_row(
                Path(folder) / "pushes", workers, fast_rate, megabytes, compute_ms, fast_seconds
            )
            show([plain], PLAIN)
            rows.append(plain)
    if path is not None:
        with open(path, "w", newline="") as file:
            columns = ["mpi", "scenario", *dict.fromkeys([*DISTURBED, *PLAIN])]
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows({"mpi": mpi, **row} for row in rows)


if __name__ == "__main__":
    main()
