"""How a run in progress goes: what is remembered of each rank, and the view made of it.

Nothing here reads files or clocks: :mod:`aladdin_mpi.analysis.tail` brings what is new.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from aladdin_mpi.analysis.load import RankLog, Run
from aladdin_mpi.record import schema
from aladdin_mpi.record.schema import EventKind

__all__ = ["Evaluation", "Event", "Memory", "News", "ServerView", "View", "WorkerView", "view"]

WINDOW_S = 5.0
"""[s] what "the last seconds" are."""

LAG_S = 1.0
"""[s] how old rows are at most when they reach the file."""

SILENT_S = 5.0
SLOWER = 1.25
"""How much longer than the others' a worker's own work on a step takes if that is worth a word."""

KEPT_ROWS = 50_000
LONGEST_S = 1e6
KEPT = 5
"""Evaluations and events that are shown."""


@dataclass(frozen=True)
class News:
    """What was read of one rank's file.

    Attributes
    ----------
    log : RankLog
        With the rank's present state and end values.
    now_s : float
        [s] on that rank's monotonic clock.
    rows : dict of str to ndarray
        New rows by table.
    """

    log: RankLog
    now_s: float
    rows: dict[str, np.ndarray]


class Memory:
    """What is remembered of one rank: the rows of the last seconds, and totals.

    Attributes
    ----------
    steps, polls, merges, evals, events : ndarray
        The latest rows.
    iterations, samples, pushes, passes : int
        All of this rank's.
    first_s : float
        [s] start of the first step, or the first merge.
    """

    def __init__(self, news: News) -> None:
        self.log, self.now_s = news.log, news.now_s
        for name in ("steps", "polls", "merges", "evals", "events"):
            setattr(self, name, np.empty(0, schema.TABLES[name].dtype))
        self.iterations = self.samples = self.pushes = self.passes = 0
        self.left = False
        self.first_s = math.nan
        self.take(news)

    steps: np.ndarray
    polls: np.ndarray
    merges: np.ndarray
    evals: np.ndarray
    events: np.ndarray

    def take(self, news: News) -> None:
        """Add what is new, forget what is old."""
        self.log, self.now_s = news.log, news.now_s
        for name, rows in news.rows.items():
            if len(rows):
                getattr(self, f"_take_{name}")(rows)

    def _take_steps(self, rows: np.ndarray) -> None:
        rows = _sane(rows)
        if not self.iterations:
            self.first_s = float(rows["start_s"][0])
        self.iterations = max(self.iterations + len(rows), int(rows["iteration"][-1]) + 1)
        self.samples += int(rows["samples"].clip(0).sum(dtype=np.int64))
        self.steps = _latest(self.steps, rows)

    def _take_polls(self, rows: np.ndarray) -> None:
        self.polls = _latest(self.polls, rows)

    def _take_merges(self, rows: np.ndarray) -> None:
        self.merges = _latest(self.merges, rows)
        self.passes += len(rows)
        self.pushes += int(rows["count"].clip(0).sum(dtype=np.int64))
        if not math.isfinite(self.first_s):
            self.first_s = float(rows["time_s"][0])

    def _take_evals(self, rows: np.ndarray) -> None:
        self.evals = np.concatenate([self.evals, rows])[-KEPT:]

    def _take_events(self, rows: np.ndarray) -> None:
        own = (rows["kind"] == EventKind.LEAVE) & (rows["worker"] == self.log.worker)
        self.left |= self.log.worker >= 0 and bool(own.any())
        told = (rows["text"] != b"") | ((rows["kind"] != EventKind.LEAVE) & ~own)
        self.events = np.concatenate([self.events, rows[told]])[-KEPT:]

    @property
    def last_s(self) -> float:
        """[s] end of the last step, or time of the last second that a server logged."""
        if len(self.steps):
            return float(_ends(self.steps)[-1])
        return float(self.polls["time_s"][-1]) if len(self.polls) else math.nan

    @property
    def running(self) -> bool:
        return self.log.state == "running"

    @property
    def clock_s(self) -> float:
        """[s] now, or when the rank ended, on its clock."""
        known = (self.log.end["end_clock_s"], self.last_s, self.log.attributes["start_clock_s"])
        return self.now_s if self.running else next((t for t in known if math.isfinite(t)), 0.0)

    def since_start_s(self, time_s: float, run: Run) -> float:
        """[s] since the run's start of a time on this rank's clock."""
        return float(run.seconds(self.log, np.array([time_s]))[0])


@dataclass(frozen=True)
class Evaluation:
    """One evaluation; ``at_s`` [s] since the run started."""

    at_s: float
    epoch: float
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Event:
    """Something rare; ``at_s`` [s] since the run started."""

    at_s: float
    rank: int
    text: str


@dataclass(frozen=True)
class WorkerView:
    """One worker over the last seconds.

    Attributes
    ----------
    state : str
        ``training``, ``finished`` (it waits for the others), ``ended`` or ``stopped``.
    step_s : float
        [s] mean duration of a step.
    samples_per_s : float
    parts : dict of str to float
        Share of its time, 0 to 1, by the names of ``STEP_PARTS``, and ``other``.
    remark : str
        What is unusual; empty otherwise.
    """

    rank: int
    worker: int
    host: str
    state: str
    iterations: int
    step_s: float
    samples_per_s: float
    parts: dict[str, float]
    remark: str = ""


@dataclass(frozen=True)
class ServerView:
    """A server over the last seconds (rates: over the whole run when it has ended).

    ``busy`` is a share of its time, ``overload`` the iterations carried per push.
    """

    rank: int
    pushes_per_s: float
    passes_per_s: float
    version: int
    busy: float
    overload: float
    longest_gap_s: float
    remark: str = ""


@dataclass(frozen=True)
class View:
    """A run at one moment; NaN where something is not known.

    Attributes
    ----------
    state : str
        ``running``, ``ended``, or ``stopped`` (killed, or an error).
    at_s : float
        [s] since the run started.
    epoch, epochs : float
        Passes over the data so far, and of the whole run.
    share : float
        How much of the run is done, 0 to 1.
    left_s : float
        [s] until its end, about.
    samples_per_s : float
        [1/s] of all workers over the last seconds; of the whole run when it has ended.
    loss : float
        Mean training loss over the last seconds.
    """

    name: str
    algorithm: str
    num_workers: int
    state: str
    at_s: float
    epoch: float
    epochs: float
    share: float
    left_s: float
    iterations: int
    samples: int
    samples_per_s: float
    loss: float
    evaluations: tuple[Evaluation, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    servers: tuple[ServerView, ...] = ()
    events: tuple[Event, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)


def view(memories: Sequence[Memory], run: Run, notes: Iterable[str] = ()) -> View:
    """What is to be shown of a run.

    Parameters
    ----------
    memories : sequence of Memory
        Of the ranks whose files were read, at least one.
    run : Run
        Of the same ranks, for its configuration.
    """
    memories = sorted(memories, key=lambda memory: memory.log.rank)
    state = "running" if any(m.running for m in memories) else "ended"
    if state == "ended" and any(m.log.state == "stopped" for m in memories):
        state = "stopped"
    workers = [m for m in memories if m.log.worker >= 0]
    shown = tuple(_worker(m, workers) for m in workers)
    rate = sum(w.samples_per_s for w in shown if state != "running" or w.state == "training")
    samples = sum(m.samples for m in workers)
    if len(workers) < run.num_workers:  # the server knows of all
        samples = max([samples, *(_last(m.polls, "samples_total") for m in memories)])
    if state != "running":
        took = _duration_s(workers, run)
        rate = samples / took if took > 0 else math.nan
    evaluations = _evaluations(memories, run)
    epoch, share = _progress(workers, memories, run, samples)
    events = [
        Event(m.since_start_s(row["time_s"], run), m.log.rank, _text(row))
        for m in memories
        for row in m.events
    ]
    losses = [_recent(m)["loss"] for m in workers if len(m.steps)]
    return View(
        name=run.name, algorithm=run.algorithm, num_workers=run.num_workers, state=state,
        at_s=max(m.since_start_s(m.clock_s, run) for m in memories),
        epoch=epoch, epochs=_number(run.config.get("epochs")), share=share,
        left_s=samples * (1 / share - 1) / rate
        if state == "running" and share > 0 and rate > 0 else math.nan,
        iterations=sum(m.iterations for m in workers), samples=samples, samples_per_s=rate,
        loss=_mean(np.concatenate(losses)) if losses else math.nan,
        evaluations=tuple(evaluations), workers=shown,
        servers=tuple(_server(m) for m in memories if m.log.attributes["role"] == "server"),
        events=tuple(sorted(events, key=lambda event: event.at_s)[-KEPT:]), notes=tuple(notes),
    )  # fmt: skip


def _worker(memory: Memory, workers: Sequence[Memory]) -> WorkerView:
    log, rows = memory.log, _recent(memory)
    state = log.state if not memory.running else "finished" if memory.left else "training"
    total_s = float(rows["step_s"].sum(dtype=np.float64))
    parts = {
        name: float(rows[column].sum(dtype=np.float64))
        for column, name in schema.STEP_PARTS.items()
    }
    parts["other"] = max(0.0, total_s - sum(parts.values()))
    whole_s = sum(parts.values()) or 1.0
    parts = {name: part_s / whole_s for name, part_s in parts.items()}
    rate = 0.0
    if len(rows):
        took_s = float(_ends(rows)[-1] - rows["start_s"][0])
        rate = int(rows["samples"].clip(0).sum()) / took_s if took_s > 0 else 0.0
        if state == "training" and memory.now_s - _ends(rows)[-1] > WINDOW_S + LAG_S + 2 * took_s:
            rate = 0.0
    return WorkerView(
        log.rank, log.worker, str(log.attributes["host"]), state, memory.iterations,
        total_s / len(rows) if len(rows) else math.nan, rate, parts,
        _remark(memory, state, [m for m in workers if m is not memory]),
    )  # fmt: skip


def _remark(memory: Memory, state: str, others: Sequence[Memory]) -> str:
    if state == "stopped":
        return "stopped"
    if state == "finished":
        return "finished"
    if state != "training":
        return ""
    if not len(memory.steps):
        return "no step yet"
    silent_s = memory.now_s - memory.last_s
    if silent_s > LAG_S + max(SILENT_S, 5 * float(np.median(_recent(memory)["step_s"]))):
        return f"no step for {silent_s:.0f} s"
    own = _work_s(memory)
    rest = [_work_s(m) for m in others if len(m.steps)]
    if rest and own > SLOWER * float(np.median(rest)) > 0:
        return f"{own / float(np.median(rest)):.1f}× slower"
    return ""


def _server(memory: Memory) -> ServerView:
    until = memory.clock_s - (LAG_S if memory.running else 0.0)
    polls = memory.polls[memory.polls["time_s"] > memory.last_s - WINDOW_S]
    merges = memory.merges["time_s"]
    merges = memory.merges[(merges > until - WINDOW_S) & (merges <= until)]
    took_s = min(WINDOW_S, max(1.0, until - float(memory.log.attributes["start_clock_s"])))
    pushes, passes = int(merges["count"].clip(0).sum()), len(merges)
    if not memory.running and len(memory.merges):
        pushes, passes = memory.pushes, memory.passes
        took_s = max(1e-3, float(memory.merges["time_s"][-1]) - memory.first_s)
    busy_s = float(polls["busy_s"].sum(dtype=np.float64))
    silent_s = memory.now_s - memory.last_s
    remark = ""
    if memory.log.state == "stopped":
        remark = "stopped"
    elif memory.running and silent_s > LAG_S + SILENT_S:
        remark = f"silent for {silent_s:.0f} s"
    return ServerView(
        memory.log.rank, pushes / took_s, passes / took_s,
        _last(memory.merges, "version"), busy_s / len(polls) if len(polls) else math.nan,
        _mean(polls["overload"]), float(polls["longest_gap_s"].max(initial=0.0)), remark,
    )  # fmt: skip


def _recent(memory: Memory) -> np.ndarray:
    """Steps of the last seconds, at least one where there is any."""
    steps = memory.steps
    if not len(steps):
        return steps
    ends = _ends(steps)
    until = ends[-1]
    if memory.running and not memory.left:
        until = max(until, memory.now_s - LAG_S)
    found = steps[ends > until - WINDOW_S]
    return found if len(found) else steps[-1:]


def _work_s(memory: Memory) -> float:
    """[s] mean duration of a step without waiting for others."""
    rows = _recent(memory)
    return _mean(rows["step_s"] - rows["blocked_s"])


def _duration_s(workers: Sequence[Memory], run: Run) -> float:
    """[s] of training."""
    with_steps = [m for m in workers if len(m.steps)]
    if not with_steps:
        return math.nan
    return max(m.since_start_s(m.last_s, run) for m in with_steps) - min(
        m.since_start_s(m.first_s, run) for m in with_steps
    )


def _evaluations(memories: Sequence[Memory], run: Run) -> list[Evaluation]:
    found = [
        Evaluation(
            m.since_start_s(row["time_s"], run), float(row["epoch"]), float(row["loss"]),
            float(row["accuracy"]),
        )
        for m in memories
        for row in m.evals
        if row["split"] == 0
    ]  # fmt: skip
    return sorted(found, key=lambda evaluation: evaluation.at_s)[-KEPT:]


def _progress(
    workers: Sequence[Memory], memories: Sequence[Memory], run: Run, samples: int
) -> tuple[float, float]:
    """Epoch, and share of the run that is done."""
    epochs = _number(run.config.get("epochs"))
    epoch = max([_last(m.steps, "epoch") for m in workers if len(m.steps)], default=math.nan)
    sizes = [
        float(row["samples_total"] / row["epoch"])
        for m in memories
        for row in m.evals
        if row["epoch"] > 0 and row["samples_total"] > 0
    ]
    share = math.nan
    if sizes:  # samples of an epoch, as evaluations tell
        epoch = max(float(epoch), samples / sizes[-1])
        share = min(1.0, samples / sizes[-1] / epochs) if epochs > 0 else math.nan
    most = _number(run.config.get("max_iterations"))
    if most > 0 and workers:
        made = min(1.0, sum(m.iterations for m in workers) / len(workers) / most)
        share = made if math.isnan(share) else max(share, made)
    return float(epoch), share


def _latest(kept: np.ndarray, new: np.ndarray) -> np.ndarray:
    """What of a table is to be remembered."""
    rows = np.concatenate([kept[-KEPT_ROWS:], new[-KEPT_ROWS:]])
    times = _ends(rows) if "start_s" in (rows.dtype.names or ()) else rows["time_s"]
    return rows[times > times[-1] - 2 * WINDOW_S - LAG_S]


def _sane(steps: np.ndarray) -> np.ndarray:
    """Without durations that are unknown or impossible: they are 0."""
    steps = steps.copy()
    for column in ("step_s", *schema.STEP_PARTS):
        known = (steps[column] >= 0) & (steps[column] < LONGEST_S)
        steps[column] = np.where(known, steps[column], 0.0)
    return steps


def _ends(steps: np.ndarray) -> np.ndarray:
    """[s] when steps ended."""
    return steps["start_s"] + steps["step_s"]


def _last(rows: np.ndarray, column: str) -> int:
    return int(rows[column][-1]) if len(rows) else 0


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean(dtype=np.float64)) if len(known) else math.nan


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _text(row: np.void) -> str:
    """An event in words."""
    text: str = row["text"].decode(errors="replace")
    kinds = {int(kind): kind.name.lower().replace("_", " ") for kind in EventKind}
    text = " ".join(text.split()) or kinds.get(int(row["kind"]), f"event {row['kind']}")
    return text if row["worker"] < 0 or "worker" in text else f"worker {row['worker']} {text}"
