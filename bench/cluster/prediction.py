"""What the simulator, told by a run of 2 workers, predicts for 4 and 8, beside what they do.

    python bench/cluster/prediction.py --rounds 1

As root, on virtual hosts; computing is emulated, links are real.  A link's rate follows from the
overload that 8 workers would make: their pushes over what the server's link carries.  For each, 2
workers run, ``aladdin-mpi simulate --from-run`` reads their log and predicts step, iterations per
push and staleness of 4 and 8 workers, which then run, too.  A run whose log is in ``--out`` is not
made again.
"""

from __future__ import annotations

import csv
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import click

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests"), str(ROOT / "tests" / "cluster")]

from jobs import Phase, Setting, run  # noqa: E402
from virtual_hosts import end_orderly  # noqa: E402

CALIBRATED, PREDICTED, OVERLOADS = 2, (4, 8), (0.5, 2.0, 8.0)
NAMES = ("step_s", "iterations_per_push", "staleness")
FIELDS = ("round", "overload", "workers", *(f"{n}_{k}" for n in NAMES for k in ("real", "virtual")))


def measured(folder: Path) -> dict[str, float]:
    """Of a run."""
    from aladdin_mpi.cli.calibrate import calibrate

    found = calibrate(folder).measured
    return {name: float(getattr(found, name)) for name in NAMES}


def predicted(folder: Path) -> dict[int, dict[str, float]]:
    """By number of workers, from a run's log."""
    argv = [sys.executable, "-m", "aladdin_mpi", "simulate", "--from-run", str(folder)]
    argv += ["--workers", ",".join(map(str, PREDICTED)), "--algorithm", "aladdin", "--json"]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    rows = json.loads(done.stdout)["outcomes"]
    return {row["workers"]: row for row in rows if row["algorithm"] == "aladdin"}


def report(rows: list[dict[str, float]]) -> None:
    """Medians over rounds."""
    click.echo(
        "| overload of 8 | workers | step, ms: real, predicted | iterations a push | staleness |\n"
        "|---|---|---|---|---|"
    )
    for overload in OVERLOADS:
        for workers in PREDICTED:
            found = [r for r in rows if (r["overload"], r["workers"]) == (overload, workers)]
            if not found:
                continue
            cells = []
            for name in NAMES:
                unit = 1e3 if name == "step_s" else 1
                real, virtual = (
                    statistics.median(unit * r[f"{name}_{kind}"] for r in found)
                    for kind in ("real", "virtual")
                )
                cells.append(f"{real:.4g}, {virtual:.4g} ({virtual / real - 1:+.1%})")
            click.echo(f"| {overload:g} | {workers} | {' | '.join(cells)} |")


@click.command(help=__doc__)
@click.option("--rounds", default=1, show_default=True)
@click.option("--megabytes", default=1.25, show_default=True)
@click.option("--compute-ms", default=200.0, show_default=True)
@click.option("--seconds", default=25.0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default="runs/prediction")
@click.option(
    "--csv", "path", type=click.Path(path_type=Path), show_default=True,
    default=ROOT / "docs" / "data" / "prediction.csv",
)  # fmt: skip
def main(
    rounds: int, megabytes: float, compute_ms: float, seconds: float, out: Path, path: Path
) -> None:
    end_orderly()
    rows = []
    for number in range(rounds):
        for overload in OVERLOADS:
            phase = Phase(overload / 8, seconds=seconds)
            said: dict[int, dict[str, float]] = {}
            for workers in (CALIBRATED, *PREDICTED):
                folder = out / f"{overload:g}-{workers}-{number}"
                if not (folder / "control" / "end").exists():
                    shutil.rmtree(folder, ignore_errors=True)
                    options = {"algorithm": "aladdin"}
                    run(Setting(options, 1, workers, megabytes, compute_ms), [phase], folder)
                if workers == CALIBRATED:
                    said = predicted(folder / "run")
                    continue
                real, virtual = measured(folder / "run"), said[workers]
                row = {"round": number, "overload": overload, "workers": workers}
                row |= {f"{name}_real": real[name] for name in NAMES}
                row |= {f"{name}_virtual": virtual[name] for name in NAMES}
                rows.append(row)
                click.echo(row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    report(rows)


if __name__ == "__main__":
    main()
