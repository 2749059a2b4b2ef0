"""Which runs differ in what: labels for pictures and tables, groups of seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aladdin_mpi.analysis.load import Run

__all__ = ["differences", "group", "labels", "options", "slow_down"]

IGNORED = (
    "seed", "out", "log", "progress", "data_dir", "eval_every", "eval_batch_size", "stall_s",
    "threads", "workers", "resume", "log_variance", "time_limit",
)  # fmt: skip
"""Options that change nothing of what is compared."""


def options(run: Run) -> dict[str, Any]:
    """The options that matter, flat: those of the algorithm stand beside the others.

    ``workers`` is the number of workers.
    """
    found: dict[str, Any] = {}
    for name, value in run.config.items():
        if name == "algorithm_options" and isinstance(value, dict):
            found |= value
        elif name not in IGNORED and not name.startswith("checkpoint"):
            found[name] = value
    return found | {"workers": run.num_workers}


def slow_down(run: Run) -> float:
    """How many times slower the slowest worker was made; 1 where none was."""
    slow = run.config.get("slow_worker") or {}
    return max((float(factor) for factor in slow.values()), default=1.0) if slow else 1.0


def differences(runs: Sequence[Run]) -> list[str]:
    """Names of the options in which the runs differ; of an algorithm's own, those in which runs of
    the same algorithm do.
    """
    all_options = [options(run) for run in runs]
    names = list(dict.fromkeys(name for found in all_options for name in found))
    differing = []
    for name in names:
        by_algorithm: dict[Any, set[str]] = {}
        everywhere = all(name in found for found in all_options)
        for run, found in zip(runs, all_options, strict=True):
            if name in found:
                key = None if everywhere else run.algorithm
                by_algorithm.setdefault(key, set()).add(repr(found[name]))
        if any(len(values) > 1 for values in by_algorithm.values()):
            differing.append(name)
    return differing


def labels(runs: Sequence[Run], without: Sequence[str] = ()) -> list[str]:
    """What tells each run from the others, such as ``aladdin, period 8``: the algorithm, and the
    options in which they differ but for those of ``without``.
    """
    names = [name for name in differences(runs) if name not in (*without, "algorithm")]
    texts = []
    for run in runs:
        found = options(run)
        parts = [run.algorithm]
        for name in names:
            if name in found:
                parts.append(_say(name, found[name]))
        texts.append(", ".join(part for part in parts if part))
    return texts


def _say(name: str, value: Any) -> str:
    if name == "workers":
        return f"{value} worker" + "s" * (value != 1)
    if name == "slow_worker":
        return "".join(f"worker {i} ×{float(f):g}" for i, f in (value or {}).items()) or "none slow"
    words = name.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"no {words}"
    return f"{words} {value}"


def group(runs: Sequence[Run], without: Sequence[str] = ()) -> dict[str, list[Run]]:
    """Runs of one configuration, which differ in the seed only, by their label."""
    groups: dict[str, list[Run]] = {}
    for run, label in zip(runs, labels(runs, without), strict=True):
        groups.setdefault(label, []).append(run)
    return groups
