"""Loader processes, which import this script again."""

import sys
from pathlib import Path

import torch
from harness import Found, run
from torch import nn
from torch.utils.data import DataLoader, Dataset

import aladdin_mpi as am

SAMPLES = 120


class Squares(Dataset):
    """Tells, by its second value, which process has made a sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, int, torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        loaded = "mpi4py.MPI" in sys.modules
        return index, -1 if info is None or loaded else info.id, torch.full((4,), index / SAMPLES)


def epoch(processes: int, context: str | None) -> Found:
    """One epoch, by all workers together, with samples made by other processes without MPI."""
    model = nn.Linear(4, 1)
    optimizer = am.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
    loader = DataLoader(
        Squares(), 8, shuffle=True, num_workers=processes, multiprocessing_context=context
    )
    loader = am.partition(loader)
    seen, makers = [], set()
    for indices, made_by, x in loader:
        optimizer.zero_grad()
        (model(x) - 1).pow(2).mean().backward()
        optimizer.step()
        seen += indices.tolist()
        makers |= set(made_by.tolist())
    assert makers <= set(range(processes)), makers  # none if the other worker was much faster
    return Found([model], values={"seen": seen, "batches": len(loader)})


def by_default() -> Found:
    return epoch(2, None)


def spawn() -> Found:
    return epoch(1, "spawn")


if __name__ == "__main__":
    am.init(out=sys.argv[1], progress="off")
    run([by_default, spawn], Path(sys.argv[1]))
