"""Every algorithm on the same harness: Fashion-MNIST, CNN, 4 workers, 3 epochs, three seeds.

    python bench/accuracy.py --only algorithms --out runs/accuracy

Same data order, schedule, initial parameters and evaluation for all.  A copy of the global
parameters (of worker 0's own, where there is no server) is taken 12 times an epoch and evaluated
after training, so that evaluation disturbs nothing; epochs and seconds to 85 % (of the first 2000
test images) are read from that.
Seconds are those of worker 0's loop.  All ranks share this machine's cores: seconds compare
algorithms here, and say nothing about a cluster.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import click

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from launching import mpirun

WORKERS, BATCH, PER_EPOCH, GOAL = 4, 64, 12, 0.85

RIVALS: dict[str, tuple[str, dict[str, Any]]] = {
    "aladdin": ("aladdin", {}),
    "shat": ("shat", {}),
    "bsp": ("bsp", {}),
    "asp": ("asp", {}),
    "ssp, staleness 3": ("ssp", {}),
    "dssp, 3 to 15": ("dssp", {}),
    "easgd, period 2": ("easgd", {}),
    "arsgd, Horovod": ("arsgd", {"backend": "horovod"}),
    "arsgd, MPI": ("arsgd", {"backend": "mpi"}),
    "arsgd, DDP": ("arsgd", {"backend": "ddp"}),
    "localsgd, period 4": ("localsgd", {}),
    "diloco, period 50": ("diloco", {}),
    "gosgd, p 0.01": ("gosgd", {}),
    "d-psgd": ("d-psgd", {}),
    "ad-psgd": ("ad-psgd", {}),
    "sgp, overlap 1": ("sgp", {}),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "aladdin, paper preset": ("aladdin", {"preset": "paper"}),
    "ssp, staleness 10": ("ssp", {"staleness": 10}),
    "easgd, period 8": ("easgd", {"period": 8}),
    "gosgd, p 1": ("gosgd", {"p": 1.0}),
    "asp, η 0.01": ("asp", {}),
    "asp, momentum 0": ("asp", {}),
}
ALL = RIVALS | VARIANTS
SGD: dict[str, dict[str, float]] = {
    "asp, η 0.01": {"lr": 0.01},
    "asp, momentum 0": {"momentum": 0.0},
}


class Row(NamedTuple):
    """One run: test accuracy of the final model, when 85 % was reached (NaN: never), and the share
    of the workers' time that they waited for somebody.
    """

    name: str
    seed: int
    accuracy: float
    epochs_to_goal: float
    seconds_to_goal: float
    seconds: float
    blocked: float


def job(folder: str, name: str, seed: int, epochs: int, lr: float) -> None:
    """One rank."""
    import time

    import torch
    from torch.utils.data import DataLoader

    import aladdin_mpi as am
    from aladdin_mpi.workload.data import collate, load_dataset
    from aladdin_mpi.workload.models import build_model

    algorithm, options = ALL[name]
    am.init(algorithm, out=folder, seed=seed, progress="off", threads=1, **options)
    data = load_dataset("fashion-mnist", None, seed)
    model = build_model("cnn", data.input_shape, data.num_classes, seed)
    sgd = {"lr": lr, "momentum": 0.9, "weight_decay": 1e-4} | SGD.get(name, {})
    optimizer = torch.optim.SGD(model.parameters(), **sgd)
    optimizer = am.DistributedOptimizer(optimizer, model)
    train = am.partition(DataLoader(data.train, BATCH, shuffle=True, collate_fn=collate))
    copies: list[tuple[float, float, dict[str, torch.Tensor]]] = []
    start, apart, due = time.monotonic(), 0.0, 0.0

    def keep() -> None:
        nonlocal apart
        began = time.monotonic()
        with am.global_parameters(model):
            state = {key: value.clone() for key, value in model.state_dict().items()}
        copies.append((am.samples() / len(data.train), began - start - apart, state))
        apart += time.monotonic() - began

    for _ in range(epochs):
        for x, y in train:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if am.rank() == 0 and am.samples() / len(data.train) >= due:
                keep()
                due += 1 / PER_EPOCH
    seconds = time.monotonic() - start - apart
    am.finish(model)
    if am.rank() > 0:
        return

    torch.set_num_threads(2)  # the others have ended
    test = [*DataLoader(data.test, 500, collate_fn=collate)]

    def accuracy(state: dict[str, torch.Tensor], parts: int) -> float:
        model.load_state_dict(state)
        model.eval()
        with torch.no_grad():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in test[:parts])
        return right / sum(len(y) for _, y in test[:parts])

    final = (float(epochs), seconds, accuracy(model.state_dict(), len(test)))
    reached = (float("nan"), float("nan"))
    for epoch, at, state in copies:
        if accuracy(state, 4) >= GOAL:
            reached = (epoch, at)
            break
    text = json.dumps({"reached": reached, "final": final})
    (Path(folder) / "result.json").write_text(text, encoding="utf-8")


def measure(name: str, seed: int, epochs: int, lr: float) -> Row:
    """One run."""
    import numpy as np

    from aladdin_mpi.algorithms import find
    from aladdin_mpi.algorithms.base import Topology
    from aladdin_mpi.record.reading import open_rank_file, rank_path

    served = find(ALL[name][0]).topology is Topology.SERVER
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, __file__, folder, name, str(seed), str(epochs), str(lr)]
        mpirun(WORKERS + served, argv, timeout=900)
        result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
        total = blocked = 0.0
        for rank in range(served, WORKERS + served):
            with open_rank_file(rank_path(folder, rank)) as file:
                steps = file["steps"][:]
            total += float(np.sum(steps["step_s"], dtype=np.float64))
            blocked += float(np.sum(steps["blocked_s"], dtype=np.float64))
    _, seconds, accuracy = result["final"]
    return Row(name, seed, accuracy, *result["reached"], seconds, blocked / total)


def run_all(out: Path, seeds: int, epochs: int, lr: float) -> list[Row]:
    """All runs that ``algorithms.csv`` does not hold yet; returns all."""
    path = out / "algorithms.csv"
    rows: list[Row] = []
    if path.exists():
        with path.open(newline="") as file:
            for r in csv.reader(file):
                if r[0] != "name":
                    rows.append(Row(r[0], int(r[1]), *map(float, r[2:])))
    else:
        path.write_text(",".join(Row._fields) + "\n", encoding="utf-8")
    there = {(row.name, row.seed) for row in rows}
    # one seed of all after the other, so that what else the machine does hits all alike
    order = [(name, seed) for seed in range(seeds) for name in RIVALS]
    order += [(name, seed) for seed in range(seeds) for name in VARIANTS]
    for name, seed in order:
        if (name, seed) not in there:
            rows.append(measure(name, seed, epochs, lr))
            click.echo(rows[-1])
            with path.open("a", newline="") as file:
                csv.writer(file).writerow(rows[-1])
    return rows


def report(rows: list[Row], out: Path) -> None:
    """Print the table, and draw accuracy beside blocked time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in ALL if any(row.name == name for row in rows)]
    table = {}
    for name in names:
        found = [row for row in rows if row.name == name]
        accuracy = [row.accuracy for row in found]
        deviation = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
        means = [
            statistics.mean(getattr(row, column) for row in found)
            for column in ("epochs_to_goal", "seconds_to_goal", "seconds", "blocked")
        ]
        table[name] = (statistics.mean(accuracy), deviation, *means, len(found))
    click.echo(
        "| algorithm | test accuracy | epochs to 85 % | seconds to 85 % | seconds | blocked |"
    )
    click.echo("|---|---|---|---|---|---|")
    for name in sorted(names, key=lambda key: -table[key][0]):
        mean, deviation, e, s, seconds, blocked, count = table[name]
        click.echo(
            f"| {name} | {mean:.4f} ± {deviation:.4f} (n={count}) | {e:.2f} | {s:.1f} | "
            f"{seconds:.1f} | {blocked:.1%} |"
        )
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 5), sharey=True)
    order = sorted(names, key=lambda key: table[key][0])
    left.barh(order, [table[n][0] for n in order], xerr=[table[n][1] for n in order], color="0.6")
    left.set_xlim(min(0.75, min(table[n][0] for n in names)), 0.92)
    left.set_xlabel("test accuracy, mean ± deviation over seeds")
    right.barh(order, [100 * table[n][5] for n in order], color="0.3")
    right.set_xlabel("time blocked [%]")
    figure.tight_layout()
    figure.savefig(out / "algorithms.svg")


if __name__ == "__main__":
    folder, name, seed, epochs, lr = sys.argv[1:]
    job(folder, name, int(seed), int(epochs), float(lr))
