"""The ranks' program of the experiment about accuracy: real gradients, steps of a fixed length.

Fashion-MNIST and a small network, whose passes take a fraction of ``step_s``; the rest is slept, so
that a step takes as long as on a machine of one's own although all ranks share two cores.  Global
parameters are kept by the package's own checkpoints and evaluated afterwards.  Each worker writes
``learned-<worker>.json``: when it began and ended, and the share of steps that took too long.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import aladdin_mpi as am
from aladdin_mpi.workload.data import collate, load_dataset
from aladdin_mpi.workload.models import build_model

BATCH, MODEL, DATASET, MOMENTUM = 64, "mlp", "fashion-mnist", 0.9


def main(out: Path, seed: int, epochs: int, lr: float, step_s: float, options: str) -> None:
    """``options`` are those of ``init()``, as JSON; without ``step_s`` nothing is slept."""
    am.init(
        out=out, seed=seed, progress="off", threads=1, checkpoint_keep=10_000, **json.loads(options)
    )
    data = load_dataset(DATASET, None, seed)
    model = build_model(MODEL, data.input_shape, data.num_classes, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    optimizer = am.DistributedOptimizer(optimizer, model)
    train = am.partition(DataLoader(data.train, BATCH, shuffle=True, collate_fn=collate))
    steps = late = 0
    began = time.time()
    for _ in range(epochs):
        end = time.monotonic() + step_s
        for x, y in train:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            left = end - time.monotonic()
            if left > 0:
                time.sleep(left)
            steps, late = steps + 1, late + (left < 0 < step_s)
            optimizer.step()
            end = time.monotonic() + step_s
    ended = time.time()
    am.finish(model)
    told = {"began": began, "ended": ended, "late": late / steps}
    (out / f"learned-{am.rank()}.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    folder, seed, epochs, lr, step_s, options = sys.argv[1:]
    main(Path(folder), int(seed), int(epochs), float(lr), float(step_s), options)
