"""Test accuracy in virtual time: ALADDIN, the paper's preset, synchronous SGD; links under load.

    python bench/simulation.py --csv docs/data/simulation.csv --seeds 3

Fashion-MNIST, a 784-128-10 perceptron, batch 64, 6 epochs of all workers together, learning rate =
base rate × workers, momentum 0.9 unless a row says otherwise (then the server's, too, where the
paper's preset has one).  Iterations take 100 ms with a normal spread of 5 %.  ``settings``: pushes
take 1 % of what the link could carry; replies are late in some rows.  ``overload``: the workers'
pushes share the server's link, which carries a part of them, and its replies the other direction;
local SGD, which waits for no link, averages once in as many iterations as a push then carries.
Pixels are normalised to mean 0 and deviation 1, or from 0 to 1 (``--pixels raw``).
Every run adds a line to the CSV file; one that is there is not made again, so the command can be
stopped and started at will.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

COMPUTE_S, PAYLOAD_BYTES = 0.1, 407_080.0
PIXELS = ("normalised", "raw")
FIELDS = (
    "pixels", "table", "row", "column", "seed", "accuracy", "per_push", "staleness", "reply_age",
    "thrown_away", "seconds",
)  # fmt: skip

ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "synchronous": ("arsgd", {"backend": "mpi"}),
    "paper, α from nπ": ("aladdin", {"preset": "paper"}),
    "paper, α from c̃": ("aladdin", {"preset": "paper", "alpha": "count"}),
    "ours": ("aladdin", {}),
    "ours, no lag compensation": ("aladdin", {"lag_compensation": False}),
    "two, equal steps": ("aladdin", {"in_flight": "2", "staleness_aware": False}),
    "one, equal steps": ("aladdin", {"in_flight": "1", "staleness_aware": False}),
    "8 ranges, equal steps": ("aladdin", {"staleness_aware": False}),
    "ours, 8 ranges": ("aladdin", {}),
    "local SGD, as rarely": ("localsgd", {}),
}


@dataclass(frozen=True)
class Case:
    """A cell of a table."""

    table: str
    row: str
    column: str
    base_lr: float
    workers: int = 8
    momentum: float = 0.9
    overload: float = 0.01
    late: float = 0.0
    slow: dict[int, float] = field(default_factory=dict)
    ranges: int = 1
    options: dict[str, Any] = field(default_factory=dict)


def cases() -> Iterator[Case]:
    """All cells."""
    all_four = list(ALGORITHMS)[:4]
    for lr in (0.01, 0.0025):
        for column in all_four:
            yield Case("settings", f"n=8, base η {lr}", column, lr)
    for overload in (2, 8, 0.4, 20, 5, 10):
        for lr in (0.0025, 0.01):
            row = f"base η {lr}, overload {overload:g}"
            for column in ("ours", "two, equal steps", "one, equal steps"):
                yield Case("overload", row, column, lr, overload=overload)
            for column in ("ours, 8 ranges", "8 ranges, equal steps"):
                yield Case("overload", row, column, lr, overload=overload, ranges=8)
            if overload > 1:
                often = {"period": int(overload)}
                yield Case("overload", row, "local SGD, as rarely", lr, options=often)
    for period in (1, 2, 4, 8, 16):
        for column in ("ours", "ours, 8 ranges"):
            for overload in (0.4, 8):
                yield Case(
                    "period", f"base η 0.01, overload {overload:g}, period {period}", column, 0.01,
                    overload=overload, ranges=8 if "ranges" in column else 1,
                    options={"period": period},
                )  # fmt: skip
    for lr in (0.02, 0.1):
        for column in all_four:
            yield Case("settings", f"n=8, no momentum, base η {lr}", column, lr, momentum=0.0)
    for column in ("synchronous", "ours"):
        yield Case("settings", "n=32, base η 0.0025", column, 0.0025, workers=32)
    row = "n=8, base η 0.0025, one worker ×100 slower"
    yield Case("settings", row, "ours", 0.0025, slow={0: 100.0})
    for n in (8, 32):
        for column in ("ours", "ours, no lag compensation"):
            row = f"n={n}, base η 0.0025, replies 2.3 iterations late"
            yield Case("settings", row, column, 0.0025, workers=n, late=2.3)


def trained(case: Case, seed: int, pixels: str, bundle: Any) -> dict[str, Any]:
    """One run."""
    from aladdin_mpi.algorithms import find
    from aladdin_mpi.core.schedule import Schedule
    from aladdin_mpi.simulation.replicas import Task
    from aladdin_mpi.simulation.setting import FRAMING_BYTES, Setting
    from aladdin_mpi.simulation.training import train
    from aladdin_mpi.workload.models import build_model

    name, options = ALGORITHMS[case.column]
    options = {**options, **case.options}
    if options.get("preset") == "paper":
        options = {**options, "server_momentum": case.momentum}
    rate = case.workers * (PAYLOAD_BYTES + FRAMING_BYTES) / (case.overload * COMPUTE_S)
    setting = Setting(
        case.workers, COMPUTE_S, PAYLOAD_BYTES, rate, distribution="normal", spread=0.05,
        slow=case.slow, reply_latency_s=case.late * COMPUTE_S, merge_bytes_per_s=1e12, seed=seed,
        shards=case.ranges,
    )  # fmt: skip

    def build() -> Any:
        return build_model("mlp", bundle.input_shape, bundle.num_classes, seed)

    task = Task(
        build, bundle.train, bundle.test, 64, 6.0, Schedule(case.base_lr, case.workers),
        case.momentum, seed=seed,
    )  # fmt: skip
    began = time.process_time()
    algorithm = find(name)
    found = train(setting, algorithm, algorithm.config(**options), task)
    outcome = found.outcome
    values = (
        pixels, case.table, case.row, case.column, seed, found.evaluations[-1].accuracy,
        outcome.iterations_per_push, outcome.staleness, outcome.reply_age, found.thrown_away,
        round(time.process_time() - began, 1),
    )  # fmt: skip
    return dict(zip(FIELDS, values, strict=True))


EARLIER: dict[tuple[str, str], float] = {
    ("n=8, base η 0.01", "synchronous"): 0.8838,
    ("n=8, base η 0.01", "paper, α from nπ"): 0.5196,
    ("n=8, base η 0.01", "paper, α from c̃"): 0.8259,
    ("n=8, base η 0.01", "ours"): 0.8782,
    ("n=8, base η 0.0025", "synchronous"): 0.8632,
    ("n=8, base η 0.0025", "paper, α from nπ"): 0.8184,
    ("n=8, base η 0.0025", "paper, α from c̃"): 0.8529,
    ("n=8, base η 0.0025", "ours"): 0.8643,
    ("n=8, no momentum, base η 0.02", "synchronous"): 0.8604,
    ("n=8, no momentum, base η 0.02", "paper, α from nπ"): 0.8651,
    ("n=8, no momentum, base η 0.02", "paper, α from c̃"): 0.8646,
    ("n=8, no momentum, base η 0.02", "ours"): 0.8550,
    ("n=8, no momentum, base η 0.1", "synchronous"): 0.8463,
    ("n=8, no momentum, base η 0.1", "paper, α from nπ"): 0.5630,
    ("n=8, no momentum, base η 0.1", "paper, α from c̃"): 0.7707,
    ("n=8, no momentum, base η 0.1", "ours"): 0.8457,
    ("n=32, base η 0.0025", "synchronous"): 0.8573,
    ("n=32, base η 0.0025", "ours"): 0.8516,
    ("n=8, base η 0.0025, one worker ×100 slower", "ours"): 0.8641,
    ("n=8, base η 0.0025, replies 2.3 iterations late", "ours"): 0.8622,
    ("n=8, base η 0.0025, replies 2.3 iterations late", "ours, no lag compensation"): 0.8533,
    ("n=32, base η 0.0025, replies 2.3 iterations late", "ours"): 0.8465,
    ("n=32, base η 0.0025, replies 2.3 iterations late", "ours, no lag compensation"): 0.8092,
    ("base η 0.0025, overload 0.4", "two, equal steps"): 0.8636,
    ("base η 0.01, overload 0.4", "two, equal steps"): 0.8780,
    ("base η 0.0025, overload 2", "two, equal steps"): 0.8640,
    ("base η 0.0025, overload 2", "one, equal steps"): 0.8635,
    ("base η 0.01, overload 2", "two, equal steps"): 0.8717,
    ("base η 0.01, overload 2", "one, equal steps"): 0.8765,
    ("base η 0.0025, overload 8", "two, equal steps"): 0.8577,
    ("base η 0.0025, overload 8", "one, equal steps"): 0.8570,
    ("base η 0.01, overload 8", "two, equal steps"): 0.8519,
    ("base η 0.01, overload 8", "one, equal steps"): 0.8557,
    ("base η 0.0025, overload 20", "two, equal steps"): 0.8566,
    ("base η 0.0025, overload 20", "one, equal steps"): 0.8571,
    ("base η 0.01, overload 20", "two, equal steps"): 0.8381,
    ("base η 0.01, overload 20", "one, equal steps"): 0.8494,
}
"""Of an independent simulation with one seed, by which the default was chosen."""


def show(rows: list[dict[str, Any]]) -> None:
    """Tables in Markdown: mean and deviation over seeds, number of seeds, the earlier figure."""
    for table in ("settings", "overload", "period"):
        chosen = [case for case in cases() if case.table == table]
        columns = list(dict.fromkeys(case.column for case in chosen))
        click.echo(f"\n| {table} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
        for name in dict.fromkeys(case.row for case in chosen):
            cells = [_cell(rows, name, column) for column in columns]
            click.echo(f"| {name} | {' | '.join(cells)} |")


def _cell(rows: list[dict[str, Any]], name: str, column: str) -> str:
    found = [float(r["accuracy"]) for r in rows if (r["row"], r["column"]) == (name, column)]
    earlier = EARLIER.get((name, column))
    text = "–"
    if found:
        spread = f" ± {statistics.stdev(found):.4f}" if len(found) > 1 else ""
        text = f"{statistics.mean(found):.4f}{spread}, {len(found)}"
    return text + (f" [{earlier:.4f}]" if earlier else "")


@click.command(help=__doc__.split("\n")[0])
@click.option("--csv", "path", type=click.Path(path_type=Path), required=True)
@click.option("--seeds", default=1, show_default=True, help="Of data order, model and times.")
@click.option(
    "--only", default="", help="Rows and columns that hold this text: 'η 0.01, overload'."
)
@click.option("--pixels", type=click.Choice(PIXELS), default="normalised", show_default=True)
@click.option("--only-show", is_flag=True, help="Print the tables of what is there.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Of Fashion-MNIST.")
def main(
    path: Path, seeds: int, only: str, pixels: str, only_show: bool, data_dir: Path | None
) -> None:
    from aladdin_mpi.workload.data import ArrayDataset, load_dataset

    rows: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    if only_show:
        show([row for row in rows if row["pixels"] == pixels])
        return
    done = {(r["pixels"], r["table"], r["row"], r["column"], int(r["seed"])) for r in rows}
    bundle = load_dataset("fashion-mnist", data_dir, 0)
    parts = []
    for part in (bundle.train, bundle.test):
        x, y = part.__getitems__(range(len(part)))  # normalised once, not per batch
        parts.append(ArrayDataset((x - x.min()) / (x.max() - x.min()) if pixels == "raw" else x, y))
    bundle = replace(bundle, train=parts[0], test=parts[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        for case in cases():
            if only not in f"{case.row}, {case.column}":
                continue
            if (pixels, case.table, case.row, case.column, seed) in done:
                continue
            row = trained(case, seed, pixels, bundle)
            rows.append(row)
            new = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.DictWriter(file, FIELDS)
                if new:
                    writer.writeheader()
                writer.writerow(row)
            click.echo(f"{case.row}, {case.column}, seed {seed}: {row['accuracy']:.4f}")
    show([row for row in rows if row["pixels"] == pixels])


if __name__ == "__main__":
    main()
