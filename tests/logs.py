"""Logs of made-up runs with known figures, for the tests of the analysis."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from aladdin_mpi.record import schema
from aladdin_mpi.record.hdf5 import RankFile
from aladdin_mpi.record.reading import rank_path
from aladdin_mpi.record.schema import Value

CLOCK_S = 1000.0
"""[s] monotonic time of rank 0 when a made-up run starts."""

STEP_S = 0.010
SPLIT = {
    "data_s": 0.001, "compute_s": 0.005, "optimizer_s": 0.001, "push_s": 0.001, "blocked_s": 0.0005,
    "mix_s": 0.0005,
}  # fmt: skip
"""[s] how a step is split; 0.001 s is left."""


def rows(table: str, size: int, **columns: Any) -> np.ndarray:
    """Rows with these columns (scalars or arrays), the others "unknown"."""
    found = np.empty(size, schema.TABLES[table].dtype)
    for column in schema.TABLES[table].columns:
        found[column.name] = columns.get(column.name, column.unknown)
    return found


def write(
    folder: Path,
    rank: int,
    tables: Mapping[str, np.ndarray],
    clean: bool = True,
    end: Mapping[str, Value] | None = None,
    part: int = 0,
    **attributes: Value,
) -> Path:
    """A rank's file."""
    known: dict[str, Value] = {
        "rank": rank, "world_size": 3, "role": "worker" if rank else "server", "worker": rank - 1,
        "num_workers": 2, "host": "alpha", "start_clock_s": CLOCK_S, "clock_offset_s": 0.0,
        "clock_error_s": 1e-5, "run": folder.name, "part": part,
    }  # fmt: skip
    path = rank_path(folder, rank, part)
    file = RankFile(path, known | attributes)
    for name, table in tables.items():
        file.append(name, table)
    for name, value in (end or {}).items():
        file.set_end(name, value)
    file.close(clean)
    return path


def served(
    folder: Path,
    steps: int = 100,
    step_s: float = STEP_S,
    slow: float = 1.0,
    offset_s: float = 500.0,
    accuracy: tuple[float, ...] = (0.5, 0.8, 0.9),
    **config: Any,
) -> Path:
    """A server (rank 0) and two workers of ``steps`` iterations with 32 samples each, from second 1
    on; every second push is coalesced.  Worker 1's computing takes ``slow`` times as long, and its
    clock is ``offset_s`` behind.
    """
    options = {"algorithm": "aladdin", "algorithm_options": {"period": 4}, "seed": 0} | config
    text = yaml.safe_dump(options)
    arrivals, merges = [], []
    for worker in range(2):
        longer = (slow - 1) * SPLIT["compute_s"] if worker else 0.0
        split = {**SPLIT, "compute_s": SPLIT["compute_s"] + longer}
        took = step_s + longer
        first = CLOCK_S + 1 - (offset_s if worker else 0.0)
        number = np.arange(steps)
        table = rows(
            "steps", steps, iteration=number, channel=0, epoch=0, start_s=first + took * number,
            step_s=took, loss=1.0, lr=0.1, samples=32, coalesced=number % 2 == 0,
            iterations_in_push=2 * (number % 2), staleness=1, emulated=slow > 1, **split,
        )  # fmt: skip
        pushes = steps // 2
        made = first + took * (2 + 2 * np.arange(pushes))  # at the end of every second step
        sends = rows(
            "sends", pushes, sequence=1 + np.arange(pushes), channel=0, queued_s=made,
            queue_s=0.0001, put_s=0.002, ack_s=0.001, bytes=1_000_000, iterations=2, samples=64,
            wants_reply=np.arange(pushes) % 2, staleness=1, version=0, to=-1,
        )  # fmt: skip
        replies = pushes // 2
        mixes = rows(
            "mixes", replies, time_s=made[1::2] + 0.008, channel=0, number=1 + np.arange(replies),
            version=1, alpha=0.5, lag_iterations=1, discarded=0, origin=-1,
        )  # fmt: skip
        tables = {"steps": table, "sends": sends, "mixes": mixes}
        if worker == 0:
            at = first + took * steps * (1 + np.arange(len(accuracy))) / len(accuracy)
            tables["evals"] = rows(
                "evals", len(accuracy), time_s=at, epoch=1 + np.arange(len(accuracy)),
                samples_total=64 * steps, version=1, loss=0.5, accuracy=accuracy, duration_s=0.0,
                fetch_s=0.0, split=0,
            )  # fmt: skip
            tables["spreads"] = rows(
                "spreads", 2, time_s=made[:2], iteration=[10, 20], workers=2, variance=[1e-3, 2e-3],
                mean_square=1.0,
            )  # fmt: skip
        write(
            folder, 1 + worker, tables, config=text, start_clock_s=first - 1,
            clock_offset_s=offset_s if worker else 0.0,
        )  # fmt: skip
        at = made + (offset_s if worker else 0.0) + 0.003
        arrivals.append(rows(
            "arrivals", pushes, time_s=at, channel=0, worker=worker,
            sequence=1 + np.arange(pushes), iterations=2, samples=64, staleness=1, version=0,
            wants_reply=np.arange(pushes) % 2, loss=1.0, nonfinite=0,
        ))  # fmt: skip
    everything = np.concatenate(arrivals)
    everything = everything[np.argsort(everything["time_s"], kind="stable")]
    everything["merged_version"] = 1 + np.arange(len(everything))
    merges = rows(
        "merges", len(everything), time_s=everything["time_s"], channel=0,
        version=everything["merged_version"], count=1, merge_s=0.0005, bytes=1_000_000,
    )  # fmt: skip
    asking = everything[everything["wants_reply"] == 1]
    number = np.zeros(len(asking), int)
    for worker in range(2):
        mine = asking["worker"] == worker
        number[mine] = 1 + np.arange(mine.sum())
    replies_table = rows(
        "replies", len(asking), time_s=asking["time_s"] + 0.001, channel=0, worker=asking["worker"],
        number=number, version=asking["merged_version"], alpha=0.5, sequence=asking["sequence"],
        copy_s=0.0003, send_s=0.001,
    )  # fmt: skip
    polls = rows(
        "polls", 2, time_s=[CLOCK_S + 1, CLOCK_S + 2], polls=1000, empty=900, busy_s=0.25,
        longest_gap_s=0.004, overload=2.0, samples_total=64,
    )  # fmt: skip
    tables = {"arrivals": everything, "merges": merges, "replies": replies_table, "polls": polls}
    write(folder, 0, tables, config=text)
    return folder
