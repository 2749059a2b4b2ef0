"""What a run prints at its end: accuracy, throughput, where a worker's time went, its folder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from aladdin_mpi.errors import RecordError
from aladdin_mpi.record import schema
from aladdin_mpi.record.reading import next_part, open_rank_file, rank_path

__all__ = ["Summary", "print_summary", "summarize"]


@dataclass(frozen=True)
class Summary:
    """A run in a few numbers; NaN where the logs do not tell.

    Attributes
    ----------
    num_workers : int
        Workers whose logs were found.
    iterations, samples : int
        Of all workers together.
    accuracy, loss : float
        Of the last evaluation on the test data.
    samples_per_s : float
        [1/s] of all workers together, from the first step of each to its last.
    step_s : float
        [s] mean duration of a step.
    parts : dict of str to float
        Share of the workers' time (0 to 1) by the names in
        :data:`~aladdin_mpi.record.schema.STEP_PARTS`, and ``other``.
    pushes : int
    coalesced : float
        Share of the iterations whose update travelled with a later push.
    overload : float
        Iterations carried per push.
    emulated : bool
        Compute was emulated in some steps.
    """

    num_workers: int
    iterations: int
    samples: int
    accuracy: float
    loss: float
    samples_per_s: float
    step_s: float
    parts: dict[str, float]
    pushes: int
    coalesced: float
    overload: float
    emulated: bool


def summarize(run_folder: Path | str) -> Summary:
    """Read the rank files of a run, also while they are still written."""
    steps: list[np.ndarray] = []
    evals: list[np.ndarray] = []
    for worker_steps, worker_evals in _tables(Path(run_folder)):
        steps.append(worker_steps)
        evals.append(worker_evals[worker_evals["split"] == 0])
    evaluations = np.concatenate([np.empty(0, schema.EVALS.dtype), *evals])
    last = evaluations[np.argmax(evaluations["epoch"])] if evaluations.size else None
    everything = np.concatenate([np.empty(0, schema.STEPS.dtype), *steps])
    total_s = float(np.nansum(everything["step_s"], dtype=np.float64))
    parts = {
        name: _ratio(float(np.nansum(everything[column], dtype=np.float64)), total_s)
        for column, name in schema.STEP_PARTS.items()
    }
    parts["other"] = max(0.0, 1 - sum(parts.values()))
    carried = everything["iterations_in_push"]
    carried = carried[carried > 0]
    count = int(everything.size)
    return Summary(
        num_workers=len(steps),
        iterations=count,
        samples=int(everything["samples"].clip(0).sum()),
        accuracy=float(last["accuracy"]) if last is not None else math.nan,
        loss=float(last["loss"]) if last is not None else math.nan,
        samples_per_s=sum(_rate(table) for table in steps),
        step_s=_ratio(total_s, count),
        parts=parts,
        pushes=int(carried.size),
        coalesced=_ratio(float((everything["coalesced"] == 1).sum()), count),
        overload=float(carried.mean()) if carried.size else math.nan,
        emulated=bool((everything["emulated"] == 1).any()),
    )


def print_summary(
    run_folder: Path | str, accuracy: float | None = None, console: Console | None = None
) -> None:
    """Print how a run went.

    Parameters
    ----------
    run_folder : path
    accuracy : float, optional
        Of the final model, 0 to 1, where it is known better than from the logs.
    console : rich.console.Console, optional
        Where to print; standard output by default.
    """
    console = console or Console(highlight=False)
    summary = summarize(run_folder)
    accuracy = summary.accuracy if accuracy is None else accuracy
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(min_width=13)
    table.add_column(overflow="fold")
    if not math.isnan(accuracy):
        table.add_row("test accuracy", f"{accuracy:.4f}")
    elif summary.emulated:
        table.add_row("test accuracy", "none: compute was emulated")
    if summary.iterations:
        _add_times(table, summary)
    else:
        table.add_row("timing", "not logged")
    console.print()
    console.print(table)
    console.print(f"folder         {run_folder}", soft_wrap=True, markup=False)


def _add_times(table: Table, summary: Summary) -> None:
    emulated = " (emulated compute)" if summary.emulated else ""
    table.add_row(
        "throughput",
        f"{summary.samples_per_s:.0f} samples/s on {summary.num_workers} worker(s){emulated}",
    )
    table.add_row("step", f"{1e3 * summary.step_s:.2f} ms, of which a worker spent")
    for name, share in summary.parts.items():
        table.add_row(f"  {name}", f"{share:6.1%}  {1e3 * share * summary.step_s:9.3f} ms")
    table.add_row("pushes", f"{summary.pushes}, {summary.coalesced:.1%} of iterations coalesced")
    if not math.isnan(summary.overload):
        table.add_row("overload", f"{summary.overload:.2f} iterations per push")


def _tables(folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Steps and evaluations of every worker whose file can be read, since the run's last start."""
    part = max(next_part(folder) - 1, 0)
    for path in sorted(folder.glob(rank_path("", 0, part).name.replace("0000", "*", 1))):
        try:
            with open_rank_file(path) as file:
                if file.attrs["role"] in ("worker", b"worker"):
                    yield file[schema.STEPS.name][()], file[schema.EVALS.name][()]
        except (RecordError, OSError, KeyError):
            continue  # of a rank on a host whose disk is not shared, or killed at its start


def _rate(steps: np.ndarray) -> float:
    """[1/s] Samples of one worker by the time from its first step to the end of its last."""
    if not steps.size:
        return 0.0
    took_s = float(steps["start_s"][-1] + steps["step_s"][-1] - steps["start_s"][0])
    return _ratio(float(steps["samples"].clip(0).sum()), took_s)


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan
