"""Test accuracy of ALADDIN against single-process SGD with the same global batch, by real training.

    python bench/accuracy.py --out runs/accuracy

Fashion-MNIST, a small CNN, 4 workers with 64 samples a batch each, 3 epochs, paired seeds.  First
the best learning rate of single-process SGD (batch 256) on a grid, by seed 0; then, at that rate,
SGD with all seeds, ALADDIN, the paper's preset, ALADDIN with each improvement off in turn, and with
each way to send fewer bytes (``--wire``); then pushed gradients without and with deep gradient
compression; then ResNet-20 with batch norm; then every algorithm (``algorithms.py``).  Every run
adds a line to ``accuracy.csv`` or ``algorithms.csv``; a run that is there is not made again, so the
command can be stopped and started at will.
"""

from __future__ import annotations

import csv
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import algorithms
from launching import mpirun

WORKERS, BATCH = 4, 64
GRID = (0.01, 0.02, 0.05, 0.1, 0.2)
BEST = 0.05
"""What the grid gave, where it is not run."""

FIELDS = (
    "model", "name", "lr", "seed", "epochs", "accuracy", "loss", "seconds", "per_push",
    "push_bytes",
)  # fmt: skip
ABLATION = {
    "aladdin": (),
    "paper preset": ("--preset", "paper"),
    "1 off: gradients pushed": ("--push", "gradient"),
    "2 off: waits for its slot": ("--no-coalesce",),
    "3 off: no lag compensation": ("--no-lag-compensation",),
    "4 off: replies overlap": ("--no-one-outstanding",),
    "5 off: leavers count": ("--no-count-leavers",),
    "self-updates only": ("--no-replies",),
}

WIRES = {
    f"wire {wire}": ("--wire", wire) for wire in ("bfloat16", "float16", "topk:0.1", "topk:0.01")
}

GRADIENTS = {
    "bsp": ("--algorithm", "bsp"),
    "asp": ("--algorithm", "asp"),
    "paper preset": ("--preset", "paper"),
}
DGC = GRADIENTS | {
    f"{name}, {wire}": (*GRADIENTS[name], "--wire", wire)
    for wire in ("dgc:0.1:234", "dgc:0.01:234")  # 234 iterations of a worker are an epoch
    for name in GRADIENTS
}


class Result(NamedTuple):
    """A row of the table; ``per_push`` is iterations per push, 1 without coalescing, and
    ``push_bytes`` the mean of what a push put [bytes].
    """

    model: str
    name: str
    lr: float
    seed: int
    epochs: int
    accuracy: float
    loss: float
    seconds: float
    per_push: float
    push_bytes: float = math.nan


class Table:
    """The results so far, kept in a CSV file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Result] = []
        if path.exists():
            with path.open(newline="") as file:
                for r in csv.DictReader(file):
                    self.rows.append(
                        Result(
                            r["model"], r["name"], float(r["lr"]), int(r["seed"]),
                            int(r["epochs"]), float(r["accuracy"]), float(r["loss"]),
                            float(r["seconds"]), float(r["per_push"]),
                            float(r.get("push_bytes") or "nan"),
                        )
                    )  # fmt: skip

    def find(self, model: str, name: str, lr: float, seed: int) -> Result | None:
        for row in self.rows:
            if (row.model, row.name, row.lr, row.seed) == (model, name, lr, seed):
                return row
        return None

    def add(self, row: Result) -> None:
        self.rows.append(row)
        with self.path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(FIELDS)
            writer.writerows(self.rows)

    def mean(self, model: str, name: str, lr: float) -> tuple[float, float, int]:
        """Mean accuracy, its deviation over seeds, and how many."""
        found = [r.accuracy for r in self.rows if (r.model, r.name, r.lr) == (model, name, lr)]
        deviation = statistics.stdev(found) if len(found) > 1 else 0.0
        return (statistics.mean(found) if found else float("nan")), deviation, len(found)


def batches(length: int, size: int, epoch: int, seed: int) -> Iterator[np.ndarray]:
    order = np.random.default_rng([seed, epoch]).permutation(length)
    for start in range(0, length, size):
        yield order[start : start + size]


def single(model_name: str, lr: float, seed: int, epochs: int) -> Result:
    """Plain SGD with momentum in this process, on the joined batch."""
    import torch

    from aladdin_mpi.workload.data import load_dataset
    from aladdin_mpi.workload.models import build_model

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = load_dataset("fashion-mnist", None, seed)
    model = build_model(model_name, data.input_shape, data.num_classes, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    start = time.monotonic()
    for epoch in range(epochs):
        model.train()
        for index in batches(len(data.train), WORKERS * BATCH, epoch, seed):
            x, y = data.train.__getitems__(index.tolist())
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    seconds = time.monotonic() - start
    model.eval()
    right, loss = 0, 0.0
    with torch.no_grad():
        for first in range(0, len(data.test), 1000):
            part = range(first, min(first + 1000, len(data.test)))
            x, y = data.test.__getitems__(list(part))
            out = model(x)
            right += int((out.argmax(1) == y).sum())
            loss += float(torch.nn.functional.cross_entropy(out, y, reduction="sum"))
    accuracy = right / len(data.test)
    return Result(
        model_name,
        "single process",
        lr,
        seed,
        epochs,
        accuracy,
        loss / len(data.test),
        seconds,
        1.0,
    )


def distributed(
    model: str, name: str, options: tuple[str, ...], lr: float, seed: int, epochs: int, out: Path
) -> Result:
    """One run of the command line, with a server and 4 workers."""
    from aladdin_mpi.record.reading import open_rank_file, rank_path

    folder = out / f"{model}-{name.replace(' ', '_').replace(':', '')}-{lr}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    run = mpirun(
        WORKERS + 1,
        [
            sys.executable, "-m", "aladdin_mpi", "train", "--dataset", "fashion-mnist", "--model",
            model, "--algorithm", "aladdin", "--epochs", str(epochs), "--batch-size", str(BATCH),
            "--lr", str(lr), "--momentum", "0.9", "--weight-decay", "1e-4", "--seed", str(seed),
            "--eval-every", "0", "--progress", "off", "--out", str(folder), *options,
        ],
        timeout=1800,
    )  # fmt: skip
    del run
    with open_rank_file(rank_path(folder, 1)) as file:
        last = file["evals"][-1]
    iterations = pushes = nbytes = 0
    seconds = 0.0
    for rank in range(1, WORKERS + 1):
        with open_rank_file(rank_path(folder, rank)) as file:
            steps = file["steps"][:]
            nbytes += int(file["sends"][:]["bytes"].sum())
        iterations += len(steps)
        pushes += int((steps["iterations_in_push"] > 0).sum())
        seconds = max(seconds, float(steps["step_s"].sum()))
    return Result(
        model, name, lr, seed, epochs, float(last["accuracy"]), float(last["loss"]), seconds,
        iterations / max(pushes, 1), nbytes / max(pushes, 1),
    )  # fmt: skip


def report(table: Table, seeds: list[int], best: float) -> None:
    """Print the tables of the results page."""
    click.echo("\n| single process, batch 256: η | test accuracy |\n|---|---|")
    for lr in GRID:
        mean, deviation, count = table.mean("cnn", "single process", lr)
        if count:
            click.echo(f"| {lr} | {mean:.4f} ± {deviation:.4f} (n={count}) |")
    base = table.mean("cnn", "single process", best)[0]
    click.echo(f"\n| at η = {best} | test accuracy | points to single process | iterations/push |")
    click.echo("|---|---|---|---|")
    for name in (*ABLATION, *WIRES, *(name for name in DGC if name not in ABLATION)):
        mean, deviation, count = table.mean("cnn", name, best)
        if count:
            rows = [r for r in table.rows if (r.model, r.name, r.lr) == ("cnn", name, best)]
            per_push = statistics.mean(r.per_push for r in rows)
            click.echo(
                f"| {name} | {mean:.4f} ± {deviation:.4f} (n={count}) | {100 * (mean - base):+.2f} "
                f"| {per_push:.2f} |"
            )
    click.echo(f"\n| gradients at η = {best} | bytes of a push over float32's | test accuracy |")
    click.echo("|---|---|---|")
    for name in DGC:
        mean, deviation, count = table.mean("cnn", name, best)
        sizes = {
            one: [r.push_bytes for r in table.rows if (r.model, r.name, r.lr) == ("cnn", one, best)]
            for one in (name, "bsp")
        }
        if count and sizes["bsp"]:
            whole = statistics.mean(sizes["bsp"])
            share = 1.0 if name in GRADIENTS else statistics.mean(sizes[name]) / whole
            click.echo(f"| {name} | {share:.3f} | {mean:.4f} ± {deviation:.4f} (n={count}) |")
    for row in table.rows:
        if row.model == "resnet20":
            click.echo(f"\nResNet-20, {row.name}, seed {row.seed}: {row.accuracy:.4f}")


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/accuracy"))
@click.option("--seeds", type=int, default=3, show_default=True)
@click.option("--epochs", type=int, default=3, show_default=True)
@click.option(
    "--only", multiple=True,
    type=click.Choice(["grid", "ablation", "wires", "dgc", "resnet", "algorithms", "report"]),
)  # fmt: skip
def main(out: Path, seeds: int, epochs: int, only: tuple[str, ...]) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    out.mkdir(parents=True, exist_ok=True)
    table = Table(out / "accuracy.csv")
    chosen = only or ("grid", "ablation", "wires", "dgc", "resnet", "algorithms", "report")
    numbers = list(range(seeds))

    def alone(lr: float, seed: int) -> None:
        if table.find("cnn", "single process", lr, seed) is None:
            table.add(single("cnn", lr, seed, epochs))
            click.echo(table.rows[-1])

    if "grid" in chosen:
        for lr in GRID:
            alone(lr, 0)
    first = {
        row.lr: row.accuracy for row in table.rows if row.name == "single process" and not row.seed
    }
    best = max(first, key=lambda lr: first[lr], default=BEST)
    if "grid" in chosen:
        for seed in numbers:
            alone(best, seed)
    variants = (ABLATION if "ablation" in chosen else {}) | (WIRES if "wires" in chosen else {})
    variants |= DGC if "dgc" in chosen else {}
    for name, options in variants.items():
        for seed in numbers:
            if table.find("cnn", name, best, seed) is None:
                table.add(distributed("cnn", name, options, best, seed, epochs, out))
                click.echo(table.rows[-1])
    if "resnet" in chosen and table.find("resnet20", "aladdin", 0.1, 0) is None:
        table.add(distributed("resnet20", "aladdin", (), 0.1, 0, 2, out))
        click.echo(table.rows[-1])
    if "algorithms" in chosen:
        algorithms.report(algorithms.run_all(out, seeds, epochs, best), out)
    if "report" in chosen:
        report(table, numbers, best)


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as problem:
        sys.exit(f"bench/accuracy.py: {problem}")
