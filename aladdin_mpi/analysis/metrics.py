"""What a run's tables come to: where time went, how much travelled, how stale it was, who was late.

Each function takes a :class:`~aladdin_mpi.analysis.load.Run` and returns a frame or plain numbers;
NaN is what the logs do not tell.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from aladdin_mpi.analysis.load import Run
from aladdin_mpi.record import schema
from aladdin_mpi.record.schema import EventKind

__all__ = [
    "PARTS",
    "Overview",
    "accuracy_at",
    "begin_s",
    "coalescing",
    "covered_s",
    "duration_s",
    "evaluations",
    "final_accuracy",
    "overview",
    "problems",
    "relays",
    "senders",
    "servers",
    "shares",
    "slowest",
    "spans",
    "split",
    "staleness",
    "throughput",
    "time_to",
    "variance",
]

PARTS = [*schema.STEP_PARTS.values(), "other"]
"""What a step is split into; ``other`` is what is left of it."""

STANDS_OUT = 1.1
"""How many times longer than the others' median a worker's step takes if it is called slow."""


def split(run: Run) -> pd.DataFrame:
    """Mean seconds of a step by worker (index ``worker``): the columns of :data:`PARTS`, and
    ``step``, their sum.
    """
    columns = [*schema.STEP_PARTS, "step_s"]
    steps = run.steps[columns].astype(np.float64)
    means = steps.groupby(level="rank").mean().rename(columns=schema.STEP_PARTS)
    means["other"] = means["step_s"] - means[[*schema.STEP_PARTS.values()]].sum(axis=1)
    means = means.rename(columns={"step_s": "step"})[[*PARTS, "step"]]
    return means.rename(index=_worker_of(run)).rename_axis("worker").sort_index()


def shares(run: Run) -> dict[str, float]:
    """Share of all workers' time, 0 to 1, by the names of :data:`PARTS`."""
    steps = run.steps
    total = float(steps["step_s"].to_numpy().sum(dtype=np.float64))
    if not total > 0:
        return dict.fromkeys(PARTS, math.nan)
    found = {
        name: float(np.nansum(steps[column], dtype=np.float64)) / total
        for column, name in schema.STEP_PARTS.items()
    }
    return found | {"other": 1 - sum(found.values())}


def begin_s(run: Run) -> float:
    """[s] when the first step of any worker began, on the run's clock."""
    return float(run.steps["start_s"].min()) if len(run.steps) else 0.0


def spans(run: Run) -> pd.DataFrame:
    """When each part of the run trained: ``begin`` and ``end`` [s] of all workers together, and
    ``before``, [s] of training in earlier parts (index ``part``).
    """
    steps = run.steps
    ends = steps["start_s"] + steps["step_s"]
    found = pd.DataFrame({
        "begin": steps["start_s"].groupby(steps["part"]).min(),
        "end": ends.groupby(steps["part"]).max(),
    })  # fmt: skip
    took = found["end"] - found["begin"]
    found["before"] = took.cumsum() - took
    return found


def duration_s(run: Run) -> float:
    """[s] from the first step of any worker to the end of the last one of any, without the time
    between two starts of the run.
    """
    if not len(run.steps):
        return math.nan
    found = spans(run)
    return float((found["end"] - found["begin"]).sum())


def throughput(run: Run) -> pd.Series:
    """Samples per second by worker, each from its first step to the end of its last."""
    found = {
        _worker_of(run)[rank]: rows["samples"].clip(lower=0).sum() / _span(rows)
        for rank, rows in run.steps.groupby(level="rank")
    }
    return pd.Series(found, dtype=np.float64).rename_axis("worker").sort_index()


def senders(run: Run) -> pd.DataFrame:
    """What each worker sent: messages and MB per second, share of its time with a transfer under
    way, median seconds queued, in transfer, until acknowledged.
    """
    found = {}
    took_by = {rank: _span(rows) for rank, rows in run.steps.groupby(level="rank")}
    for rank, rows in run.sends.groupby(level="rank"):
        took = took_by.get(rank, math.nan)
        found[_worker_of(run)[rank]] = {
            "sends_per_s": len(rows) / took,
            "MB_per_s": rows["bytes"].sum() / took / 1e6,
            "transfer_share": covered_s(rows) / took,
            "queue_s": rows["queue_s"].median(),
            "put_s": rows["put_s"].median(),
            "ack_s": rows["ack_s"].median(),
        }
    frame = pd.DataFrame.from_dict(found, orient="index", columns=list(_SENDER))
    return frame.rename_axis("worker").sort_index()


def covered_s(sends: pd.DataFrame) -> float:
    """[s] with at least one of these transfers under way, several of which may overlap."""
    begin = (sends["queued_s"] + sends["queue_s"]).to_numpy(np.float64)
    end = begin + sends["put_s"].to_numpy(np.float64)
    known = np.isfinite(end)
    order = np.argsort(begin[known], kind="stable")
    begin, end = begin[known][order], end[known][order]
    before = np.concatenate([[-math.inf], np.maximum.accumulate(end)])[:-1]
    return float(np.clip(end - np.maximum(begin, before), 0.0, None).sum())


_SENDER = ("sends_per_s", "MB_per_s", "transfer_share", "queue_s", "put_s", "ack_s")
_RELAY = ("messages_per_s", "pushes_per_message", "MB_out_per_s", "merge_share")
_SERVER = ("merges_per_s", "pushes_per_pass", "MB_in_per_s", "MB_out_per_s", "busy_share", "gap_s")


def servers(run: Run) -> pd.DataFrame:
    """Each server (index ``rank``): pushes merged per second, pushes per pass, MB per second in and
    out, share of its time spent working, longest time between two polls.
    """
    took = duration_s(run)
    found = {}
    for rank in dict.fromkeys(log.rank for log in run.servers):
        merges, polls, replies = (
            frame[frame.index.get_level_values("rank") == rank]
            for frame in (run.merges, run.polls, run.replies)
        )
        messages = merges["messages"].where(merges["messages"] > 0, merges["count"])
        size = merges["bytes"].sum() / max(messages.sum(), 1)
        if run.config.get("wire", "float32") != "float32":
            size = math.nan  # a reply's is another
        found[rank] = {
            "merges_per_s": merges["count"].sum() / took,
            "pushes_per_pass": merges["count"].mean(),
            "MB_in_per_s": merges["bytes"].sum() / took / 1e6,
            "MB_out_per_s": replies["time_s"].nunique() * size / took / 1e6,  # one for a relay
            "busy_share": polls["busy_s"].mean(),  # a row is a second
            "gap_s": polls["longest_gap_s"].max(),
        }
    return pd.DataFrame.from_dict(found, orient="index", columns=list(_SERVER)).rename_axis("rank")


def relays(run: Run) -> pd.DataFrame:
    """Each relay (index ``rank``): messages per second, pushes per message, MB per second to the
    servers, share of its time spent merging.
    """
    took = duration_s(run)
    found = {}
    for rank in dict.fromkeys(log.rank for log in run.relays):
        merges = run.merges[run.merges.index.get_level_values("rank") == rank]
        found[rank] = {
            "messages_per_s": len(merges) / took,
            "pushes_per_message": merges["count"].mean(),
            "MB_out_per_s": merges["bytes"].sum() / took / 1e6,
            "merge_share": merges["merge_s"].sum() / took,
        }
    return pd.DataFrame.from_dict(found, orient="index", columns=list(_RELAY)).rename_axis("rank")


def staleness(run: Run) -> pd.Series:
    """How many pushes had each staleness (index), as the servers saw them."""
    values = run.arrivals["staleness"]
    return values[values >= 0].value_counts().sort_index()


def coalescing(run: Run) -> pd.Series:
    """How many pushes carried so many iterations (index)."""
    values = run.steps["iterations_in_push"]
    return values[values > 0].value_counts().sort_index()


def evaluations(run: Run) -> pd.DataFrame:
    """Evaluations on the test data in the order of time; ``time_s`` counts from the first step, and
    without what evaluating itself took.
    """
    evals = run.evals
    evals = evals[evals["split"] == 0].sort_values("time_s").reset_index(drop=True)
    if not len(evals):
        return evals
    apart = evals["duration_s"] + evals["fetch_s"].fillna(0)
    if len(run.steps):
        found = spans(run).reindex(evals["part"])
        evals["time_s"] += found["before"].to_numpy() - found["begin"].to_numpy()
    evals["time_s"] -= apart.cumsum()
    return evals


def final_accuracy(run: Run) -> float:
    """Of the last evaluation, 0 to 1."""
    evals = evaluations(run)
    return float(evals["accuracy"].iloc[-1]) if len(evals) else math.nan


def accuracy_at(run: Run, seconds: float) -> float:
    """The best accuracy reached within so many seconds of training."""
    evals = evaluations(run)
    reached = evals[evals["time_s"] <= seconds]["accuracy"]
    return float(reached.max()) if len(reached) else math.nan


def time_to(run: Run, accuracy: float) -> float:
    """[s] of training until an evaluation reached this accuracy; NaN: none did."""
    evals = evaluations(run)
    reached = evals[evals["accuracy"] >= accuracy]["time_s"]
    return float(reached.iloc[0]) if len(reached) else math.nan


def variance(run: Run) -> pd.DataFrame:
    """How far the workers' parameters were apart: ``iteration``, ``variance`` of a parameter over
    the workers, ``mean_square`` of their mean, both averaged over the parameters.
    """
    rows = run.spreads
    return rows.sort_values("iteration").reset_index(drop=True)


def slowest(run: Run) -> tuple[int, str]:
    """The worker with the longest steps, and in what they differ from the others'.

    −1 where none stands out.
    """
    table = split(run)
    if len(table) < 2:
        return -1, "only one worker"
    worker = int(table["step"].idxmax())
    others = table.drop(index=worker).median()
    mine = table.loc[worker]
    ratio = mine["step"] / others["step"]
    if not ratio >= STANDS_OUT:
        return -1, f"no worker stands out: the slowest, {worker}, is at {ratio:.2f} of the others"
    excess = (mine - others)[PARTS]
    part = str(excess.idxmax())
    text = (
        f"worker {worker}: {1e3 * mine['step']:.2f} ms a step, {ratio:.1f} times the others' "
        f"median; {part} takes {1e3 * excess[part]:.2f} ms more"
    )
    mine_rows = run.steps[run.steps.index.get_level_values("rank") == _rank_of(run)[worker]]
    if (mine_rows["emulated"] == 1).any():
        text += " (part of it slept on purpose)"
    return worker, text


def problems(run: Run) -> list[str]:
    """What went wrong, a line each."""
    lines: list[str] = []
    events = run.events
    for kind, what in (
        (EventKind.NONFINITE_PUSH, "step(s) thrown away because of a NaN or an infinity"),
        (EventKind.NONFINITE_MERGE, "push(es) not merged because of a NaN or an infinity"),
        (EventKind.NONFINITE_REPLY, "reply(s) not mixed because of a NaN or an infinity"),
    ):
        if count := int((events["kind"] == kind).sum()):
            lines.append(f"{count} {what}")
    for kind in (EventKind.STALL, EventKind.ERROR):
        for (rank, _), row in events[events["kind"] == kind].head(5).iterrows():
            lines.append(f"at {row['time_s']:.1f} s, seen by rank {rank}: {row['text']}")
    for log in run.logs:
        if (lost := log.end["rows_lost"]) > 0:
            lines.append(f"rank {log.rank}: {lost} row(s) of the log could not be written")
    resumed = events[events["kind"] == EventKind.RESUME].groupby("part").head(1)
    for (_, _), row in resumed.iterrows():
        lines.append(f"start {row['part'] + 1} went on {row['text']}")
    return lines + run.notes


@dataclass(frozen=True)
class Overview:
    """A run in a few numbers; NaN (None in JSON) where the logs do not tell.

    Attributes
    ----------
    accuracy, loss : float
        Of the last evaluation.
    duration_s, step_s : float
        [s] of the training; mean step.
    samples_per_s, speedup : float
        Of all workers; over one worker's, where that was given.
    shares : dict of str to float
        Share of the workers' time by part.
    pushes, iterations, samples : int
    iterations_per_push, coalesced : float
        Above 1 the link is full; share of iterations that travelled with a later push.
    staleness_mean, staleness_95 : float
        Of the pushes that were merged.
    """

    name: str
    algorithm: str
    num_workers: int
    accuracy: float
    loss: float
    duration_s: float
    step_s: float
    samples_per_s: float
    speedup: float
    iterations: int
    samples: int
    pushes: int
    iterations_per_push: float
    coalesced: float
    staleness_mean: float
    staleness_95: float
    shares: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain values; None for NaN."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def overview(run: Run, one_worker: Run | None = None) -> Overview:
    """The run in a few numbers; ``one_worker`` is the run that a speed-up is measured against."""
    steps, evals, stale = run.steps, evaluations(run), run.arrivals["staleness"]
    stale = stale[stale >= 0]
    carried = steps["iterations_in_push"]
    carried = carried[carried > 0]
    rate = float(throughput(run).sum()) if len(steps) else math.nan
    return Overview(
        name=run.name,
        algorithm=run.algorithm,
        num_workers=run.num_workers,
        accuracy=final_accuracy(run),
        loss=float(evals["loss"].iloc[-1]) if len(evals) else math.nan,
        duration_s=duration_s(run),
        step_s=float(steps["step_s"].mean()) if len(steps) else math.nan,
        samples_per_s=rate,
        speedup=rate / float(throughput(one_worker).sum()) if one_worker else math.nan,
        iterations=len(steps),
        samples=int(steps["samples"].clip(lower=0).sum()),
        pushes=len(carried),
        iterations_per_push=float(carried.mean()) if len(carried) else math.nan,
        coalesced=float((steps["coalesced"] == 1).mean()) if len(steps) else math.nan,
        staleness_mean=float(stale.mean()) if len(stale) else math.nan,
        staleness_95=float(stale.quantile(0.95)) if len(stale) else math.nan,
        shares=shares(run),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _worker_of(run: Run) -> dict[int, int]:
    return {log.rank: log.worker for log in run.logs}


def _rank_of(run: Run) -> dict[int, int]:
    return {log.worker: log.rank for log in run.workers}


def _span(rows: pd.DataFrame) -> float:
    """[s] that a worker trained, by its rows of ``steps``: from first to last, part by part."""
    return float(
        sum(
            part["start_s"].iloc[-1] + part["step_s"].iloc[-1] - part["start_s"].iloc[0]
            for _, part in rows.groupby("part")
        )
    )
