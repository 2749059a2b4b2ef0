"""What a run's log tells the simulator: times of computing, links, payload, what a server costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from aladdin_mpi.algorithms import REGISTRY
from aladdin_mpi.analysis import Run, load_run, metrics
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.simulation.outcome import Outcome
from aladdin_mpi.simulation.setting import FRAMING_BYTES

__all__ = ["Calibration", "calibrate"]

FIRST_ROWS = 5
"""Steps of each worker that are left out: things are loaded and compiled in them."""

TIMES_KEPT = 1000


@dataclass(frozen=True)
class Calibration:
    """What was found.

    Attributes
    ----------
    num_workers, servers : int
    values : dict
        Fields of a :class:`~aladdin_mpi.simulation.setting.Setting`.
    measured : Outcome
        The run itself; NaN where its log does not tell.
    notes : list of str
        What could not be found, a line each.
    """

    num_workers: int
    servers: int
    values: dict[str, Any]
    measured: Outcome
    notes: list[str] = field(default_factory=list)


def calibrate(folder: Path) -> Calibration:
    """Read a run.

    Parameters
    ----------
    folder : Path

    Returns
    -------
    Calibration
        ``compute_s`` and ``measured_s`` are steps without what they were blocked; ``bytes_per_s``
        is what the workers pushed over the time in which at least one of them did, which does not
        depend on how many shared the link; ``overhead_s`` is what a push waits to be begun and to
        be acknowledged, beside its merge.

    Raises
    ------
    ConfigError
        No worker made enough steps.
    RecordError
        There is no run, or it cannot be read.
    """
    run = load_run(folder)
    times = _compute_times(run, folder)
    kept = np.quantile(times, (np.arange(TIMES_KEPT) + 0.5) / TIMES_KEPT)
    kept *= times.mean() / kept.mean()
    values: dict[str, Any] = {
        "compute_s": float(times.mean()), "measured_s": tuple(kept.tolist()), "latency_s": 0.0,
    }  # fmt: skip
    options = run.config.get("algorithm_options") or {}
    values["period"] = int(options.get("period", 4))
    values["in_flight"] = str(options.get("in_flight", "auto"))
    slow = run.config.get("slow_worker") or {}
    values["slow"] = {int(index): float(factor) for index, factor in slow.items()}
    servers = max(1, len({log.rank for log in run.servers}))
    notes = []
    sends = run.sends[np.isfinite(run.sends["put_s"]) & (run.sends["put_s"] > 0)]
    if not len(sends):
        notes.append("its log has no pushes: --payload and --rate must be given")
    elif (sends["to"] >= 0).all():
        values |= _between_workers(sends)
    else:
        values |= _to_servers(run, sends[sends["to"] < 0], servers)
    return Calibration(run.num_workers, servers, values, _measured(run, servers), notes)


def _compute_times(run: Run, folder: Path) -> np.ndarray:
    """[s] steps without what they were blocked, of the workers that were not slowed."""
    steps = run.steps
    steps = steps[steps.index.get_level_values("row") >= FIRST_ROWS]
    plain = steps[steps["emulated"] != 1]
    chosen = plain if len(plain) else steps
    times = (chosen["step_s"] - chosen["blocked_s"].fillna(0)).to_numpy(np.float64)
    times = times[np.isfinite(times) & (times > 0)]
    if len(times) < 2 * FIRST_ROWS:
        raise ConfigError(
            f"--from-run {folder}: its log has {len(times)} steps beside the first {FIRST_ROWS} of "
            f"each worker; at least {2 * FIRST_ROWS} are needed, so train longer"
        )
    return times


def _between_workers(sends: pd.DataFrame) -> dict[str, Any]:
    """From messages of workers to workers: each has both links for itself."""
    rates = sends["bytes"] / sends["put_s"]
    return {
        "payload_bytes": float(sends["bytes"].median()) - FRAMING_BYTES,
        "bytes_per_s": float(rates.median()),
    }


def _to_servers(run: Run, sends: pd.DataFrame, servers: int) -> dict[str, Any]:
    channels = sorted(sends["channel"].unique())
    sizes = sends.groupby("channel")["bytes"].median()
    merges = run.merges
    merge_rate = float(merges["bytes"].sum() / merges["merge_s"].sum()) if len(merges) else math.nan
    of_server = np.array([channels.index(c) * servers // len(channels) for c in sends["channel"]])
    rates = [  # while k transfers are under way, each has 1/k of the link: all have the whole
        float(mine["bytes"].sum()) / metrics.covered_s(mine)
        for server in range(servers) if len(mine := sends[of_server == server])
    ]  # fmt: skip
    waits = run.algorithm in REGISTRY and "waits_for_stragglers" in REGISTRY[run.algorithm].traits
    ack_s = float(sends["ack_s"].quantile(0.1 if waits else 0.5))
    queue_s = float(sends["queue_s"].quantile(0.25))
    payload = float(sizes.sum()) - FRAMING_BYTES * len(channels)
    found: dict[str, Any] = {
        "payload_bytes": payload, "bytes_per_s": float(np.median(rates)), "shards": len(channels),
        "servers": servers,
    }  # fmt: skip
    merge_s = 0.0
    if math.isfinite(merge_rate) and merge_rate > 0:
        found["merge_bytes_per_s"] = merge_rate
        merge_s = payload / servers / merge_rate
    found["overhead_s"] = max(0.0, queue_s + ack_s - merge_s)
    return found


def _measured(run: Run, servers: int) -> Outcome:
    found = metrics.overview(run)
    served = bool(run.servers)
    table = metrics.split(run)
    rate = float((1 / table["step"]).sum())
    alone = (table["step"] - table["blocked"]).min()
    return Outcome(
        f"{run.algorithm} (run)", run.num_workers, servers if served else 0, step_s=found.step_s,
        steps_per_s=rate, speedup=float(rate * alone),
        efficiency=float(rate * alone) / run.num_workers, blocked=found.shares["blocked"],
        link_in=math.nan, link_out=math.nan,
        iterations_per_push=found.iterations_per_push if served else math.nan,
        staleness=found.staleness_mean, staleness_95=found.staleness_95,
        reply_age=float(run.mixes["lag_iterations"].mean()) if len(run.mixes) else math.nan,
    )  # fmt: skip
