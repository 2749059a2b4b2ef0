"""Batch-norm statistics in the global model: ResNet-20 on Fashion-MNIST, 4 workers, 2 epochs.

    python bench/batchnorm.py

Prints the test accuracy of the global model and of every worker's own model just before the end.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from launching import mpirun

WORKERS = 4


def job(folder: str, epochs: int) -> None:
    """One rank."""
    import torch
    from torch.utils.data import DataLoader

    import aladdin_mpi as am
    from aladdin_mpi.workload.data import collate, load_dataset
    from aladdin_mpi.workload.models import build_model

    am.init("aladdin", out=folder, progress="off")
    data = load_dataset("fashion-mnist", None, 0)
    model = build_model("resnet20", data.input_shape, data.num_classes, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    optimizer = am.DistributedOptimizer(optimizer, model)
    train = am.partition(DataLoader(data.train, 64, shuffle=True, collate_fn=collate))

    def accuracy() -> float:
        model.eval()
        right = 0
        with torch.no_grad():
            for x, y in DataLoader(data.test, 1000, collate_fn=collate):
                right += int((model(x).argmax(1) == y).sum())
        model.train()
        return right / len(data.test)

    for _ in range(epochs):
        for x, y in train:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    own = accuracy()
    am.finish(model)
    sys.stdout.write(f"own {own}\n")  # in one piece: lines of several ranks must not mix
    sys.stdout.flush()
    if am.rank() == 0:
        print("global", accuracy(), flush=True)


@click.group(invoke_without_command=True, help=__doc__)
@click.option("--epochs", default=2, show_default=True)
@click.pass_context
def main(context: click.Context, epochs: int) -> None:
    if context.invoked_subcommand:
        return
    with tempfile.TemporaryDirectory() as folder:
        run = mpirun(
            WORKERS + 1, [sys.executable, __file__, "job", folder, str(epochs)], timeout=1800
        )
    found: dict[str, list[float]] = {"own": [], "global": []}
    for kind, value in re.findall(r"(own|global) (\d\.\d+)", run.stdout):  # lines may run together
        found[kind].append(float(value))
    own = ", ".join(f"{value:.4f}" for value in found["own"])
    click.echo(f"workers' own models: {own}; mean {statistics.mean(found['own']):.4f}")
    click.echo(f"global model: {found['global'][0]:.4f}")


@main.command("job", hidden=True)
@click.argument("folder")
@click.argument("epochs", type=int)
def run_job(folder: str, epochs: int) -> None:
    job(folder, epochs)


if __name__ == "__main__":
    main()
