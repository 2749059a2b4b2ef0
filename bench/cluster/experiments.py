"""The paper's experiments about time, on virtual hosts: ALADDIN, its rivals, links and stragglers.

    python bench/cluster/experiments.py links --rounds 3      # Figs. 2, 5; Table 3, Fig. 6
    python bench/cluster/experiments.py settings --rounds 3   # Figs. 7, 8: what each setting costs
    python bench/cluster/experiments.py report                # tables and figures of what is there
    python bench/cluster/experiments.py quick                 # a few minutes: does all of it work

As root, on an otherwise idle machine, with an environment that has MPICH or Open MPI (it is the one
that is used) and Horovod.  Every rank has a host of its own; all hosts share this machine's cores.
*Computing is emulated*: it is slept, layer by layer (``worker.py``), messages and links are real.

A link's rate follows from ratio = payload / (rate × computing).  All algorithms have their turn in
a round before the next round begins.  A job that is in the CSV file is not made again, so the
command can be stopped and started at will; the runs' logs stay in ``--out``.
"""

from __future__ import annotations

import csv
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests"), str(ROOT / "tests" / "cluster")]

import launching  # noqa: E402
import reporting  # noqa: E402
from jobs import Phase, Seen, Setting, run  # noqa: E402
from rivals import ALGORITHMS, Algorithm  # noqa: E402
from virtual_hosts import NEEDED_PROGRAMS, end_orderly  # noqa: E402

RATIOS = (0.25, 0.7, 2.0)
SLOW_RATIO, SLOW = 0.7, (2.0, 10.0, 100.0)
KEYS = ("mpi", "experiment", "algorithm", "workers", "ratio", "slow", "round")
SECONDS = 8.0
"""Of a phase at least."""


@dataclass(frozen=True)
class Job:
    """An algorithm with so many workers, through its phases; ``name`` is the algorithm's."""

    experiment: str
    name: str
    algorithm: Algorithm
    workers: int
    phases: tuple[Phase, ...]
    extra: dict[str, Any] = field(default_factory=dict)


def phase(algorithm: Algorithm, workers: int, ratio: float, slow: float, compute_s: float) -> Phase:
    """Long enough for six steps of the best that the links allow, and a whole period."""
    step_s = compute_s * algorithm.bound(workers, ratio)
    seconds = max(SECONDS, 6 * step_s, 2 * algorithm.period * step_s)
    return Phase(ratio, slow, min(seconds, 40.0), max(3.0, 1.5 * step_s))


def links(compute_s: float) -> Iterator[Job]:
    """Ratios and slow workers with 8 workers, ratios with 4, 2 and 1."""
    for workers in (8, 4, 2, 1):
        for name, algorithm in ALGORITHMS.items():
            if workers != 8 and not algorithm.scaling:
                continue
            points = [(ratio, 1.0) for ratio in RATIOS]
            if workers == 8 and algorithm.scaling:
                points += [(SLOW_RATIO, slow) for slow in SLOW]
            phases = tuple(phase(algorithm, workers, *point, compute_s) for point in points)
            yield Job("links", name, algorithm, workers, phases)


def settings(compute_s: float) -> Iterator[Job]:
    """ALADDIN on full links: the period, and each improvement off in turn."""
    base = ALGORITHMS["aladdin"]
    ablation = {
        "1 off: gradients pushed": {"push": "gradient"},
        "2 off: waits for its slot": {"coalesce": False},
        "3 off: no lag compensation": {"lag_compensation": False},
        "4 off: replies overlap": {"one_outstanding": False},
        "self-updates only": {"replies": False},
    }
    for name, extra in {f"period {p}": {"period": p} for p in (1, 2, 4, 8, 16)}.items():
        phases = (phase(base, 8, 0.25, 1.0, compute_s), phase(base, 8, 2.0, 1.0, compute_s))
        yield Job("settings", name, base, 8, phases, extra)
    for name, extra in ablation.items():
        phases = (phase(base, 8, 0.25, 1.0, compute_s), phase(base, 8, 2.0, 1.0, compute_s))
        yield Job("settings", name, base, 8, phases, extra)


def quick(compute_s: float) -> Iterator[Job]:
    """ALADDIN, AR-SGD and SGP with 1 and 4 workers."""
    for workers in (4, 1):
        for name in ("aladdin", "arsgd, DDP", "sgp"):
            algorithm = ALGORITHMS[name]
            phases = (
                phase(algorithm, workers, 0.25, 1.0, compute_s),
                phase(algorithm, workers, 2.0, 1.0, compute_s),
            )
            yield Job("quick", name, algorithm, workers, phases)


class Table:
    """Rows of phases in a CSV file, by job."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))

    def has(self, job: Job, mpi: str, number: int) -> bool:
        """A job is there as a whole or not at all."""
        mine = (mpi, job.experiment, job.name, str(job.workers), str(number))
        names = ("mpi", "experiment", "algorithm", "workers", "round")
        return any(tuple(row[name] for name in names) == mine for row in self.rows)

    def add(self, job: Job, mpi: str, number: int, seen: Sequence[Seen]) -> None:
        for part, values in zip(job.phases, seen, strict=True):
            key = (mpi, job.experiment, job.name, job.workers, part.ratio, part.slow, number)
            row = dict(zip(KEYS, map(str, key), strict=True))
            row |= {name: f"{value:.5g}" for name, value in values._asdict().items()}
            self.rows.append(row)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".new")
        with draft.open("w", newline="") as file:
            writer = csv.DictWriter(file, (*KEYS, *Seen._fields))
            writer.writeheader()
            writer.writerows(self.rows)
        draft.replace(self._path)


def make(
    jobs: Sequence[Job], rounds: int, megabytes: float, compute_ms: float, out: Path, path: Path
) -> Table:
    """Make what is missing."""
    missing = [name for name in NEEDED_PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        raise click.ClickException(f"needs root, and iproute2 (missing: {missing or 'nothing'})")
    table, mpi = Table(path), launching.family()
    click.echo(f"{mpi}; computing of {compute_ms:g} ms is emulated; {megabytes:g} MB")
    for number in range(rounds):
        for job in jobs:
            if table.has(job, mpi, number):
                continue
            folder = out / f"{job.experiment}-{job.workers}-{job.name}-{number}".replace(" ", "_")
            shutil.rmtree(folder, ignore_errors=True)
            options = {**job.algorithm.options, **job.extra}
            setting = Setting(options, job.algorithm.serving, job.workers, megabytes, compute_ms)
            try:
                seen = run(setting, job.phases, folder)
            except AssertionError as error:
                click.echo(f"round {number}, {job.workers} x {job.name}: FAILED: {error}", err=True)
                continue
            table.add(job, mpi, number, seen)
            for part, values in zip(job.phases, seen, strict=True):
                click.echo(
                    f"round {number}, {job.workers} x {job.name}, ratio {part.ratio:g}, slow "
                    f"{part.slow:g}: step {values.step_ms:.1f} ms, {values.steps_per_s:.2f} "
                    f"steps/s, link {values.in_share:.2f} in {values.out_share:.2f} out, idle "
                    f"{values.idle:.2f}"
                )
    return table


@click.group(help=__doc__)
def main() -> None:
    end_orderly()


def common(function: Any) -> Any:
    """Options of all experiments."""
    for option in (
        click.option("--megabytes", default=1.25, show_default=True, help="Of the parameters."),
        click.option("--compute-ms", default=200.0, show_default=True, help="Slept per step."),
        click.option(
            "--out", type=click.Path(path_type=Path), default="runs/cluster", show_default=True,
            help="Folder of the runs.",
        ),
        click.option(
            "--csv", "path", type=click.Path(path_type=Path), show_default=True,
            default=ROOT / "docs" / "data" / "links.csv", help="Where figures are kept.",
        ),
        click.option("--only", default="", help="Algorithms or settings, separated by ';'."),
    ):  # fmt: skip
        function = option(function)
    return function


def chosen(jobs: Iterator[Job], only: str) -> list[Job]:
    names = [name.strip() for name in only.split(";") if name.strip()]
    return [job for job in jobs if not names or job.name in names]


@main.command("links")
@click.option("--rounds", default=3, show_default=True)
@click.option("--workers", "counts", multiple=True, type=int, help="With so many only.")
@common
def links_command(
    rounds: int, counts: tuple[int, ...], megabytes: float, compute_ms: float, out: Path,
    path: Path, only: str,
) -> None:  # fmt: skip
    """Every algorithm at three ratios; speed-up; one slow worker."""
    jobs = chosen(links(compute_ms / 1e3), only)
    jobs = [job for job in jobs if not counts or job.workers in counts]
    reporting.links(make(jobs, rounds, megabytes, compute_ms, out, path).rows)


@main.command("settings")
@click.option("--rounds", default=3, show_default=True)
@common
def settings_command(
    rounds: int, megabytes: float, compute_ms: float, out: Path, path: Path, only: str
) -> None:
    """ALADDIN's period, and each improvement off."""
    jobs = chosen(settings(compute_ms / 1e3), only)
    reporting.settings(make(jobs, rounds, megabytes, compute_ms, out, path).rows)


@main.command("quick")
@click.option("--out", type=click.Path(path_type=Path), default="runs/quick", show_default=True)
def quick_command(out: Path) -> None:
    """ALADDIN, AR-SGD and SGP with 1 and 4 workers, once; fails if a job does."""
    jobs = list(quick(0.2))
    shutil.rmtree(out, ignore_errors=True)
    table = make(jobs, 1, 1.25, 200.0, out, out / "quick.csv")
    reporting.quick(table.rows)
    made = {(row["algorithm"], row["workers"]) for row in table.rows}
    if len(made) < len(jobs):
        raise click.ClickException(f"{len(jobs) - len(made)} of {len(jobs)} jobs failed")


@main.command("report")
@common
def report_command(path: Path, **unused: object) -> None:
    """Print the tables, and draw the figures beside the CSV file."""
    rows = Table(path).rows
    reporting.links(rows)
    reporting.settings(rows)
    reporting.figures(rows, path.parent)


if __name__ == "__main__":
    main()
