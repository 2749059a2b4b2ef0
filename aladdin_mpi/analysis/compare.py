"""Several runs side by side: accuracy and time (as in Table 2 of Ko et al. 2021), and what a slow
worker costs (Table 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from aladdin_mpi.analysis import metrics
from aladdin_mpi.analysis.groups import group, labels, slow_down
from aladdin_mpi.analysis.load import Run

__all__ = ["slow_downs", "summary"]


def summary(
    runs: Sequence[Run], within_s: float | None = None, accuracy: float | None = None
) -> pd.DataFrame:
    """One row per configuration; each figure as mean and deviation over its seeds.

    Parameters
    ----------
    runs : sequence of Run
        Runs that differ in the seed only are one configuration.
    within_s : float, optional
        [s] For "accuracy in a given time"; by default the training time of the quickest run.
    accuracy : float, optional
        For "time to a given accuracy", 0 to 1; by default the highest that every configuration
        reached, to a whole percent.

    Returns
    -------
    DataFrame
        Index: label.  Columns (level 0): ``runs``, ``accuracy``, ``seconds``, ``accuracy in T s``,
        ``seconds to A %``, ``samples/s``, ``blocked``; level 1: ``mean``, ``sd``.
    """
    groups = group(runs)
    if within_s is None:
        within_s = min((metrics.duration_s(run) for run in runs), default=math.nan)
    if accuracy is None:
        best = [
            max((float(metrics.evaluations(run)["accuracy"].max()) for run in members),
                default=math.nan)
            for members in groups.values() if any(len(run.evals) for run in members)
        ]  # fmt: skip
        known = [value for value in best if math.isfinite(value)]  # not a classifier, or damaged
        accuracy = math.floor(100 * min(known)) / 100 if known else math.nan
    columns: dict[str, Callable[[Run], float]] = {
        "accuracy": metrics.final_accuracy,
        "seconds": metrics.duration_s,
        f"accuracy in {within_s:.3g} s": lambda run: metrics.accuracy_at(run, within_s),
        f"seconds to {100 * accuracy:.3g} %": lambda run: metrics.time_to(run, accuracy),
        "samples/s": lambda run: float(metrics.throughput(run).sum()),
        "blocked": lambda run: metrics.shares(run)["blocked"],
    }
    rows = {}
    for label, members in groups.items():
        row: dict[tuple[str, str], float] = {("runs", ""): len(members)}
        for name, measure in columns.items():
            values = np.array([measure(run) for run in members], np.float64)
            whole = not np.isnan(values).any()
            row[name, "mean"] = float(values.mean()) if whole else math.nan
            row[name, "sd"] = float(values.std(ddof=1)) if whole and len(values) > 1 else math.nan
        rows[label] = row
    frame = pd.DataFrame.from_dict(rows, orient="index")
    frame.columns = pd.MultiIndex.from_tuples(frame.columns)
    return frame


def slow_downs(runs: Sequence[Run]) -> pd.DataFrame:
    """Samples per second with one worker slower, over those with all alike (index: label; columns:
    how many times slower).  Empty where no run has a slow worker.
    """
    rates: dict[str, dict[float, list[float]]] = {}
    for run, label in zip(runs, labels(runs, without=["slow_worker"]), strict=True):
        rate = float(metrics.throughput(run).sum())
        rates.setdefault(label, {}).setdefault(slow_down(run), []).append(rate)
    factors = sorted({factor for found in rates.values() for factor in found})
    if factors in ([], [1.0]):
        return pd.DataFrame()
    means = pd.DataFrame(
        {
            factor: {
                label: float(np.mean(found[factor])) if factor in found else math.nan
                for label, found in rates.items()
            }
            for factor in factors
        }
    )
    return means.div(means[factors[0]], axis=0)
