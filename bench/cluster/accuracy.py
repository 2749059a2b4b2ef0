"""Test accuracy against time and epochs on virtual hosts (the paper's Table 2 and Fig. 4).

    python bench/cluster/accuracy.py --only arsgd --lr 0.04   # and others: the best learning rate
    python bench/cluster/accuracy.py --seeds 5
    python bench/cluster/accuracy.py --report

As root.  Fashion-MNIST, a 784-128-10 perceptron, 8 workers of 64 samples, momentum 0.9; *gradients
are real*, every step is padded to a fixed length by sleeping, messages and links are real.  The
learning rate is the best one of synchronous SGD.  Global parameters are kept by checkpoints on the
way and evaluated afterwards, which disturbs nothing.  A synchronous run makes the same steps
whatever the links: it is made without them, and its time is its steps times the step that
``experiments.py links`` has measured at that ratio.  Every run adds rows to the CSV file; one that
is there is not made again.
"""

from __future__ import annotations

import csv
import itertools
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests"), str(ROOT / "tests" / "cluster")]

import launching  # noqa: E402
from learner import BATCH, DATASET, MODEL  # noqa: E402
from virtual_hosts import VirtualHosts, end_orderly  # noqa: E402

WORKERS, EPOCHS, STEP_S = 8, 6, 0.06
PAYLOAD_MB = 0.40708
CUT = 25
"""Iterations between two copies of the global parameters."""
FIELDS = ("name", "ratio", "seed", "lr", "epoch", "seconds", "accuracy", "late")


@dataclass(frozen=True)
class Rival:
    """An algorithm; ``synchronous`` ones run without links and without padding.  Servers have hosts
    of their own, or are spread over the workers' hosts and share their links.
    """

    options: dict[str, Any]
    serving: int = 0
    synchronous: bool = False
    ratios: Sequence[float] = (2.0,)
    epochs: int = EPOCHS

    @property
    def ranks_per_host(self) -> list[int]:
        if "server_placement" not in self.options:
            return [1] * (WORKERS + self.serving)
        return [1 + (k % (WORKERS // self.serving) == 0) for k in range(WORKERS)]

    @property
    def servers(self) -> Sequence[int]:
        """Their ranks."""
        from aladdin_mpi.core.shards import spread_over

        if "server_placement" not in self.options:
            return range(self.serving)
        rank = itertools.count()
        hosts = [[next(rank) for _ in range(count)] for count in self.ranks_per_host]
        return spread_over(hosts, self.serving)


SPREAD = {"algorithm": "aladdin", "servers": 4, "server_placement": "spread"}
SPREAD_RANGES = {**SPREAD, "max_shard_bytes": 12_800}
RIVALS = {
    "aladdin": Rival({"algorithm": "aladdin"}, 1, ratios=(2.0, 0.05)),
    "aladdin, 14 epochs": Rival({"algorithm": "aladdin"}, 1, epochs=14),
    "aladdin, 4 servers on the workers' hosts": Rival(SPREAD, 4),
    "aladdin, 4 servers on the workers' hosts, 14 epochs": Rival(SPREAD, 4, epochs=14),
    "aladdin, 4 servers on the workers' hosts, 8 ranges": Rival(SPREAD_RANGES, 4),
    "aladdin, 4 servers on the workers' hosts, 8 ranges, 14 epochs": Rival(
        SPREAD_RANGES, 4, epochs=14
    ),
    "aladdin, 8 ranges": Rival({"algorithm": "aladdin", "max_shard_bytes": 51_200}, 1),
    "aladdin, equal steps": Rival({"algorithm": "aladdin", "staleness_aware": False}, 1),
    "aladdin, 8 ranges, equal steps": Rival(
        {"algorithm": "aladdin", "max_shard_bytes": 51_200, "staleness_aware": False}, 1
    ),
    "arsgd": Rival({"algorithm": "arsgd", "backend": "mpi"}, synchronous=True),
    "ad-psgd": Rival({"algorithm": "ad-psgd"}),
    "sgp": Rival({"algorithm": "sgp"}),
    "diloco": Rival({"algorithm": "diloco"}),
    "easgd": Rival({"algorithm": "easgd"}, 1),
    "aladdin, paper preset": Rival({"algorithm": "aladdin", "preset": "paper"}, 1),
}


def evaluate(run: Path, seed: int, servers: Sequence[int]) -> list[tuple[float, float, float]]:
    """Epoch, time since the start [s] and test accuracy of every copy, in order."""
    import torch
    from torch.utils.data import DataLoader

    from aladdin_mpi.core.flat import FlatParams
    from aladdin_mpi.runtime import checkpoint
    from aladdin_mpi.workload.data import collate, load_dataset
    from aladdin_mpi.workload.models import build_model

    data = load_dataset(DATASET, None, seed)
    model = build_model(MODEL, data.input_shape, data.num_classes, seed)
    params = FlatParams(model.named_parameters(), [list(model.parameters())])
    test = [*DataLoader(data.test, 1000, collate_fn=collate)]
    told = [json.loads((run / f"learned-{w}.json").read_text()) for w in range(WORKERS)]
    began = min(one["began"] for one in told)
    found = []
    for number in checkpoint.numbers(run):
        if not checkpoint.complete(run, number):
            continue
        head = json.loads((run / checkpoint.FOLDER / f"{number:06d}/checkpoint.json").read_text())
        parts = [checkpoint.read(run, number, r) for r in servers or range(WORKERS)]
        if servers:
            vector = torch.cat([one["params"] for part in parts for one in part["channels"]])
            samples = sum(parts[0]["worker_samples"])
        else:
            vector = torch.stack([part["parameters"][0] for part in parts]).mean(dim=0)
            samples = sum(part["own_samples"] for part in parts)
        params.assign(vector.numpy())
        model.eval()
        with torch.no_grad():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in test)
        epoch = samples / len(data.train)
        found.append((epoch, head["unix_s"] - began, right / len(data.test)))
    return found


def measure(rival: Rival, ratio: float, seed: int, lr: float, folder: Path) -> list[Any]:
    """One run: its rows without name and seed."""
    run = folder / "run"
    step_s = 0.0 if rival.synchronous else STEP_S
    options = {**rival.options, "checkpoint_iterations": CUT}
    argv = [sys.executable, HERE / "learner.py", run, str(seed), str(rival.epochs), str(lr)]
    argv += [str(step_s), json.dumps(options)]
    if rival.synchronous:
        launching.mpirun(WORKERS + rival.serving, argv, timeout=600)
    else:
        bits = 8e6 * PAYLOAD_MB / (ratio * STEP_S)
        ranks = rival.ranks_per_host
        with VirtualHosts(len(ranks), f"{round(bits / 1e3)}kbit") as hosts:
            hosts.mpirun(argv, timeout=1500, ranks_per_host=ranks)
    late = [json.loads((run / f"learned-{w}.json").read_text())["late"] for w in range(WORKERS)]
    return [(*row, max(late)) for row in evaluate(run, seed, rival.servers)]


def measured_step(links: Path, ratio: float) -> float:
    """How many times its computing a step of the faster all-reduce takes at this ratio."""
    import pandas as pd

    frame = pd.read_csv(links)
    frame = frame[(frame.workers == WORKERS) & (frame.slow == 1) & (frame.ratio == ratio)]
    steps = frame[frame.algorithm.str.startswith("arsgd")].groupby("algorithm").step_ms.median()
    alone = frame[frame.algorithm == "pushes off"].step_ms.median()
    return float(steps.min() / alone)


def _mean(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def report(path: Path, links: Path, ratio: float) -> None:
    """Accuracy at the end, and when each level was reached.

    One copy is above or below its neighbours by some tenths of a point: the last one is given, and
    the mean of those of the last epoch.
    """
    import pandas as pd

    frame = pd.read_csv(path)
    levels = (0.80, 0.84, 0.86, 0.87)
    factor = measured_step(links, ratio) if links.exists() else float("nan")
    click.echo(
        f"\n| algorithm | ratio | η | seeds | last epoch | last copy | seconds | "
        f"{' | '.join(f'to {level:.2f}' for level in levels)} |\n"
        + "|---" * (7 + len(levels))
        + "|"
    )
    for (name, at, lr), rows in frame.groupby(["name", "ratio", "lr"], sort=False):
        lasts, finals, seconds, reached = [], [], [], {level: [] for level in levels}
        for _, one in rows.groupby("seed"):
            time = one.seconds
            if RIVALS[name].synchronous:  # iterations × the measured step
                time = one.epoch * 60000 / BATCH / WORKERS * STEP_S * factor
            finals.append(float(one.accuracy.iloc[-1]))
            lasts.append(float(one.accuracy[one.epoch > one.epoch.iloc[-1] - 1].mean()))
            seconds.append(float(time.iloc[-1]))
            for level in levels:
                there = time[one.accuracy >= level]
                reached[level].append(float(there.iloc[0]) if len(there) else float("inf"))
        cells = [f"{pd.Series(reached[level]).median():.1f}" for level in levels]
        click.echo(
            f"| {name} | {at:g} | {lr:g} | {len(finals)} | {_mean(lasts)} | {_mean(finals)} | "
            f"{pd.Series(seconds).median():.1f} | {' | '.join(cells)} |"
        )
    click.echo(f"\narsgd: the step at ratio {ratio:g} was measured as {factor:.2f} times computing")


def draw(path: Path, links: Path, ratio: float, lr: float) -> None:
    """Accuracy against time and against epochs, mean over seeds."""
    import numpy as np
    import pandas as pd
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    frame = pd.read_csv(path)
    frame = frame[frame.lr == lr]
    factor = measured_step(links, ratio) if links.exists() else float("nan")
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for number, ((name, at), rows) in enumerate(frame.groupby(["name", "ratio"], sort=False)):
        synchronous = RIVALS[name].synchronous
        per_s = 60000 / BATCH / WORKERS * STEP_S * factor
        for ax, column in zip(axes, ("seconds", "epoch"), strict=True):
            curves = []
            for _, one in rows.groupby("seed"):
                x = one.epoch * per_s if column == "seconds" and synchronous else one[column]
                curves.append((np.asarray(x), np.asarray(one.accuracy)))
            grid = np.linspace(0, max(x[-1] for x, _ in curves), 200)
            mean = np.mean([np.interp(grid, x, y, left=np.nan) for x, y in curves], axis=0)
            label = f"{name}, ratio {at:g}"
            ax.plot(grid, 100 * mean, color=colormaps["tab20"](number), label=label)
    for ax, text in zip(axes, ("time [s]", "epochs of all workers together"), strict=True):
        ax.set_xlabel(text)
        ax.set_ylim(70, 90)
    axes[0].set_ylabel("test accuracy [%]")
    axes[0].legend(fontsize=7)
    figure.savefig(path.with_suffix(".svg"))


@click.command(help=__doc__)
@click.option("--seeds", default=5, show_default=True)
@click.option("--lr", default=0.08, show_default=True, help="Of each worker.")
@click.option("--only", default="", help="Names, separated by ';'.")
@click.option("--report", "only_report", is_flag=True, help="Print and draw what is there.")
@click.option(
    "--csv",
    "path",
    type=click.Path(path_type=Path),
    show_default=True,
    default=ROOT / "docs" / "data" / "accuracy-on-links.csv",
)
@click.option(
    "--links", type=click.Path(path_type=Path), show_default=True,
    default=ROOT / "docs" / "data" / "links.csv", help="Figures of experiments.py.",
)  # fmt: skip
def main(seeds: int, lr: float, only: str, only_report: bool, path: Path, links: Path) -> None:
    end_orderly()
    names = [name.strip() for name in only.split(";") if name.strip()] or list(RIVALS)
    done = set()
    if path.exists():
        with path.open(newline="") as file:
            read = csv.DictReader(file)
            done = {(r["name"], *(float(r[key]) for key in ("ratio", "seed", "lr"))) for r in read}
    cases = [(n, ratio) for n in names for ratio in RIVALS[n].ratios]
    for seed in range(0 if only_report else seeds):
        for name, ratio in cases:
            if (name, ratio, seed, lr) in done:
                continue
            folder = Path(tempfile.mkdtemp(prefix="aladdin-accuracy-"))
            try:
                rows = measure(RIVALS[name], ratio, seed, lr, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            new = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                if new:
                    writer.writerow(FIELDS)
                for epoch, seconds, accuracy, late in rows:
                    writer.writerow(
                        (name, ratio, seed, lr, round(epoch, 4), round(seconds, 2), accuracy, late)
                    )
            _, seconds, accuracy, late = rows[-1]
            click.echo(
                f"{name}, ratio {ratio:g}, seed {seed}: {accuracy:.4f} after {seconds:.1f} s"
                f", late steps {late:.2%}"
            )
    report(path, links, 2.0)
    draw(path, links, 2.0, lr)


if __name__ == "__main__":
    main()
