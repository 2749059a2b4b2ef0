"""One rank's rows of a timeline, and the places between which arrows may be drawn.

A run that was started several times goes on in the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any, cast

import numpy as np
import pandas as pd

from aladdin_mpi.analysis import spans
from aladdin_mpi.analysis.load import RankLog, Run
from aladdin_mpi.analysis.trace_events import (
    asynchronous,
    complete,
    counter,
    floats,
    instant,
    integers,
    metadata,
    row_id,
    row_name,
)
from aladdin_mpi.record.schema import EventKind

__all__ = ["PUSH", "REPLY", "RankRows", "Window"]

TRAINING, EVALUATION, SENDER = 1, 2, 10
"""Rows of a rank; senders have one or more."""

PUSH = ["worker", "channel", "sequence"]
REPLY = ["worker", "channel", "number"]

Array = np.ndarray


class Window:
    """What part of a run is asked for, [s] since it started, and numbers for what needs one."""

    def __init__(self, first_s: float, last_s: float) -> None:
        big = spans.LONGEST_S
        self._first, self._last = (float(np.clip(s, -big, big)) * 1e6 for s in (first_s, last_s))
        self._numbers = count(1)

    def inside(self, start: Array, end: Array) -> Array:
        """Which spans are asked for."""
        return (end >= self._first) & (start <= self._last)

    def numbers(self, how_many: int) -> Sequence[int]:
        """New ones."""
        return list(islice(self._numbers, how_many))


class RankRows:
    """Makes the events of one rank.

    Attributes
    ----------
    puts, mixes, merged, replies : list of DataFrame
        Where transfers, mixes, merged pushes and copies for replies are: what names them, process,
        row, start and end [µs].  Those of mixes have the moment of the mix, too.
    """

    def __init__(self, run: Run, log: RankLog, window: Window) -> None:
        self._run, self._log, self._window = run, log, window
        self._inside = window.inside
        self.puts: list[pd.DataFrame] = []
        self.mixes: list[pd.DataFrame] = []
        self.merged: list[pd.DataFrame] = []
        self.replies: list[pd.DataFrame] = []

    def blocks(self) -> Iterator[list[str]]:
        """Events, many at a time."""
        yield self._names(self._log)
        if self._log.worker >= 0:
            yield from self._training(self._log)
            yield from self._sender(self._log)
        else:
            yield from self._server(self._log)
        yield self._evaluations(self._log)
        yield self._events(self._log)

    # -- workers ----------------------------------------------------------------------------------

    def _training(self, log: RankLog) -> Iterator[list[str]]:
        steps = _of(self._run.steps, log).sort_values("start_s", kind="stable")
        borders = spans.lay_steps(steps)
        start, end = borders[:, 0], borders[:, -1]
        mixes = _of(self._run.mixes, log)
        finish = self._finish(log, end)
        step_of = self._place_mixes(log, mixes, borders, finish)
        keep = self._inside(start, end)
        steps, borders = steps[keep], borders[keep]
        start, end = borders[:, 0], borders[:, -1]
        row = _row(log)
        yield complete(
            *row, "step %d", start, end,
            '"epoch":%d,"channel":%d,"loss":%s,"lr":%s,"samples":%d,"staleness":%d,"emulated":%d',
            names=[integers(steps["iteration"])],
            args=[integers(steps["epoch"]), integers(steps["channel"]), floats(steps["loss"]),
                  floats(steps["lr"]), integers(steps["samples"]), integers(steps["staleness"]),
                  integers(steps["emulated"])],
        )  # fmt: skip
        for number, part in enumerate(spans.PARTS):
            a, b = borders[:, number], borders[:, number + 1]
            some = b > a
            a, b, of = a[some], b[some], steps[some]
            if part == "push":
                yield complete(*row, "%s", a, b, names=[_pushes(of)])
            elif part == "mix":
                at = np.flatnonzero(keep)[some]
                yield self._mix_spans(row, a, b, mixes, step_of, at)
            else:
                yield complete(*row, part, a, b)
            if part == "compute":
                forward = np.minimum(a + spans.micro(spans.durations(of["forward_s"])), b)
                backward = np.minimum(forward + spans.micro(spans.durations(of["backward_s"])), b)
                yield complete(*row, "forward", a, forward)
                yield complete(*row, "backward", forward, backward)
        if finish is not None and self._inside(*finish).all():
            yield complete(*row, "finish", *finish)

    def _finish(self, log: RankLog, end: Array) -> tuple[Array, Array] | None:
        """From the last step to the moment when everything was pushed and merged."""
        events = _of(self._run.events, log)
        left = events[(events["kind"] == EventKind.LEAVE) & (events["worker"] == log.worker)]
        if not len(left) or not len(end):
            return None
        until = spans.micro(left["time_s"].to_numpy()[-1:])
        return (end[-1:], until) if until > end[-1] else None

    def _place_mixes(
        self, log: RankLog, mixes: pd.DataFrame, borders: Array, finish: tuple[Array, Array] | None
    ) -> Array:
        """The step of each mix (-1: none); where arrows to it end is kept."""
        at = spans.micro(mixes["time_s"].to_numpy())
        step = np.searchsorted(borders[:, 0], at, side="left") - 1
        tip, tip_end = at.copy(), at.copy()
        if len(borders):
            of = borders[np.maximum(step, 0)]
            step = np.where(at <= of[:, -1] + spans.ROUNDING_US, step, -1)
            begin = np.where(of[:, -1] > of[:, -2], of[:, -2], of[:, 0])
            tip, tip_end = np.where(step >= 0, (begin, of[:, -1]), (at, at))
        if finish is not None:
            late = (step < 0) & (at > finish[0]) & (at <= finish[1])
            tip, tip_end = np.where(late, np.array(finish), (tip, tip_end))
        self.mixes.append(
            _place(log.rank, row_id(log.rank, TRAINING), tip, tip_end).assign(
                at=at, worker=log.worker, channel=mixes["channel"].to_numpy(),
                number=mixes["number"].to_numpy(), origin=mixes["origin"].to_numpy(),
            )[self._inside(tip, tip_end) & (tip_end > tip)]
        )  # fmt: skip
        return step

    def _mix_spans(
        self, row: tuple[int, int], a: Array, b: Array, mixes: pd.DataFrame, step_of: Array,
        at: Array,
    ) -> list[str]:  # fmt: skip
        """``at`` are the numbers of the steps; each tells of the last mix in it."""
        last = pd.Series(np.arange(len(mixes)), index=step_of).groupby(level=0).last()
        of = last.reindex(at).to_numpy()
        known = ~np.isnan(of)
        told = mixes.iloc[of[known].astype(np.int64)]
        with_reply = complete(
            *row, "%s", a[known], b[known],
            '"number":%d,"version":%d,"alpha":%s,"lag_iterations":%d,"from_worker":%d',
            names=[np.where(told["discarded"] == 1, "mix (thrown away)", "mix").tolist()],
            args=[integers(told["number"]), integers(told["version"]), floats(told["alpha"]),
                  integers(told["lag_iterations"]), integers(told["origin"])],
        )  # fmt: skip
        return with_reply + complete(*row, "mix", a[~known], b[~known])

    def _sender(self, log: RankLog) -> Iterator[list[str]]:
        sends = _of(self._run.sends, log)
        queued_s, queue_s = sends["queued_s"].to_numpy(), spans.durations(sends["queue_s"])
        put_s, ack_s = spans.durations(sends["put_s"]), spans.durations(sends["ack_s"])
        begin = queued_s + queue_s
        order = np.argsort(begin, kind="stable")
        sends = sends.iloc[order]
        queued, start = spans.micro(queued_s[order]), spans.micro(begin[order])
        end = spans.micro((begin + put_s)[order])
        told = spans.micro((begin + put_s + ack_s)[order])
        lane = spans.lanes(start, end)
        for number in range(int(lane.max(initial=-1)) + 1):
            rows = np.flatnonzero(lane == number)
            start[rows], end[rows] = spans.in_turn(start[rows], end[rows])
            name = f"sender {number + 1}" if number else "sender"
            yield [row_name(log.rank, SENDER + number, name)]
        keep = self._inside(start, end)
        sends, queued, start, end, told, lane = (
            part[keep] for part in (sends, queued, start, end, told, lane)
        )
        tids = row_id(log.rank, SENDER) + lane
        columns = {name: sends[name].to_numpy() for name in ("channel", "sequence", "to")}
        place = _place(log.rank, tids, start, end)
        self.puts.append(place.assign(worker=log.worker, **columns)[end > start])
        yield complete(
            log.rank + 1, tids, "%s", start, end,
            '"sequence":%d,"channel":%d,"iterations":%d,"samples":%d,"staleness":%d,"bytes":%d,'
            '"version":%d,"wants_reply":%d,"to_worker":%d,"queue_us":%d,"ack_us":%s',
            names=[_transfers(sends)],
            args=[*(integers(sends[name]) for name in (
                  "sequence", "channel", "iterations", "samples", "staleness", "bytes", "version",
                  "wants_reply", "to")),
                  (start - queued).tolist(), floats(sends["ack_s"] * 1e6)],
        )  # fmt: skip
        pushed = sends["to"].to_numpy() < 0  # from handing over to the acknowledgement
        yield self._asynchronous(log, "in flight", queued[pushed], told[pushed])

    # -- server -----------------------------------------------------------------------------------

    def _server(self, log: RankLog) -> Iterator[list[str]]:
        merges, replies = (_of(t, log) for t in (self._run.merges, self._run.replies))
        passes = spans.stacked(merges["time_s"].to_numpy(), spans.durations(merges["merge_s"]))
        copied = replies["time_s"].to_numpy()
        copies = copied - spans.durations(replies["copy_s"]), copied
        both = [spans.micro(np.concatenate(pair)) for pair in zip(passes, copies, strict=True)]
        order = np.argsort(both[1], kind="stable")
        start, end = spans.in_turn(*(part[order] for part in both))
        place = (
            _place(log.rank, row_id(log.rank, TRAINING), start, end).set_axis(order).sort_index()
        )
        merge, copy = place.iloc[: len(merges)], place.iloc[len(merges) :].reset_index(drop=True)
        yield complete(
            *_row(log), "%s", *_inner(merge),
            '"version":%d,"count":%d,"bytes":%d,"channel":%d',
            names=[_merges(merges)],
            args=[integers(merges[name]) for name in ("version", "count", "bytes", "channel")],
            keep=self._inside(*_inner(merge)),
        )  # fmt: skip
        yield complete(
            *_row(log), "reply to worker %d", *_inner(copy),
            '"number":%d,"version":%d,"alpha":%s,"sequence":%d,"send_us":%s',
            names=[integers(replies["worker"])],
            args=[integers(replies["number"]), integers(replies["version"]),
                  floats(replies["alpha"]), integers(replies["sequence"]),
                  floats(replies["send_s"] * 1e6)],
            keep=self._inside(*_inner(copy)),
        )  # fmt: skip
        arrivals = _of(self._run.arrivals, log)
        taken = spans.passes_of_pushes(arrivals, merges)
        merged = merge.iloc[taken[taken >= 0]].reset_index(drop=True)
        pushes = arrivals[PUSH].iloc[np.flatnonzero(taken >= 0)].reset_index(drop=True)
        self.merged.append(self._visible(pd.concat([pushes, merged], axis=1)))
        keys = replies[REPLY].reset_index(drop=True)
        self.replies.append(self._visible(pd.concat([keys, copy], axis=1)))
        yield self._counters(log)

    def _counters(self, log: RankLog) -> list[str]:
        polls = _of(self._run.polls, log)
        at = spans.micro(polls["time_s"].to_numpy())
        keep = self._inside(at, at)
        polls, at = polls[keep], at[keep]
        return [
            *counter(log.rank + 1, "busy", at, spans.durations(polls["busy_s"])),
            *counter(log.rank + 1, "iterations per push", at, spans.durations(polls["overload"])),
        ]

    # -- all ranks --------------------------------------------------------------------------------

    def _names(self, log: RankLog) -> list[str]:
        role = str(log.attributes["role"])
        who = f"worker {log.worker}" if log.worker >= 0 else role
        pid, name = log.rank + 1, f"rank {log.rank}, {who} on {log.attributes['host']}"
        return [
            metadata(pid, 0, "process_name", name=name),
            metadata(pid, 0, "process_sort_index", sort_index=log.rank),
            row_name(
                log.rank, TRAINING, "training" if log.worker >= 0 else str(log.attributes["role"])
            ),
        ]

    def _evaluations(self, log: RankLog) -> list[str]:
        evals = _of(self._run.evals, log)
        if not len(evals):
            return []
        until = evals["time_s"].to_numpy()
        took = spans.durations(evals["duration_s"]) + spans.durations(evals["fetch_s"])
        start, end = spans.in_turn(spans.micro(until - took), spans.micro(until))
        return [row_name(log.rank, EVALUATION, "evaluation")] + complete(
            log.rank + 1, row_id(log.rank, EVALUATION), "evaluation", start, end,
            '"epoch":%s,"loss":%s,"accuracy":%s,"version":%d,"samples":%d,"fetch_us":%s',
            args=[floats(evals["epoch"]), floats(evals["loss"]), floats(evals["accuracy"]),
                  integers(evals["version"]), integers(evals["samples_total"]),
                  floats(evals["fetch_s"] * 1e6)],
            keep=self._inside(start, end),
        )  # fmt: skip

    def _events(self, log: RankLog) -> list[str]:
        events = _of(self._run.events, log)
        at = spans.micro(events["time_s"].to_numpy())
        kinds = {int(kind): kind.name.lower() for kind in EventKind}
        lines = []
        rows = zip(
            at.tolist(), integers(events["kind"]), integers(events["worker"]),
            floats(events["value"]), events["text"].tolist(), self._inside(at, at).tolist(),
            strict=True,
        )  # fmt: skip
        for time, kind, worker, value, text, inside in rows:
            if inside:
                name = kinds.get(kind, f"event {kind}").replace("_", " ")
                args = f'"worker":{worker},"value":{value},"text":{json.dumps(text)}'
                lines.append(instant(*_row(log), name, time, args))
        ends = events[(events["kind"] == EventKind.STALL_END) & (events["value"] > 0)]
        for worker, mine in ends.groupby("worker"):
            until = mine["time_s"].to_numpy()
            began = spans.micro(until - spans.durations(mine["value"]))
            name = f"worker {worker} stalled" if worker >= 0 else "stalled"
            lines += self._asynchronous(log, name, began, spans.micro(until))
        return lines

    def _asynchronous(self, log: RankLog, name: str, start: Array, end: Array) -> list[str]:
        """Spans that may overlap."""
        keep = self._inside(start, end) & (end > start)
        ids = self._window.numbers(int(keep.sum()))
        return asynchronous(name, *_row(log), ids, start[keep], end[keep])

    def _visible(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Spans that are asked for and have a length."""
        return frame[self._inside(*_inner(frame)) & (frame["end"] > frame["start"]).to_numpy()]


def _pushes(steps: pd.DataFrame) -> list[str]:
    """Names of the pushes made in steps."""
    carried = integers(steps["iterations_in_push"])
    return [
        "push put off" if late == 1 else "push" if n <= 1 else f"push of {n} iterations"
        for late, n in zip(integers(steps["coalesced"]), carried, strict=True)
    ]


def _transfers(sends: pd.DataFrame) -> list[str]:
    """Names of transfers."""
    return [
        f"message to worker {to}" if to >= 0 else "push" if n == 1 else f"push of {n} iterations"
        for to, n in zip(integers(sends["to"]), integers(sends["iterations"]), strict=True)
    ]


def _merges(merges: pd.DataFrame) -> list[str]:
    """Names of passes."""
    return ["merge" if n == 1 else f"merge of {n} pushes" for n in integers(merges["count"])]


def _of(frame: pd.DataFrame, log: RankLog) -> pd.DataFrame:
    """Rows of one rank and start of the run; those of a rank lie together."""
    index = cast("pd.MultiIndex", frame.index)
    place = index.levels[0].get_loc(log.rank)
    first, last = np.searchsorted(index.codes[0], [place, place + 1])
    rows = frame.iloc[first:last]
    return rows[rows["part"] == log.part]


def _place(rank: int, tid: int | Array, start: Array, end: Array) -> pd.DataFrame:
    """Which spans of a rank arrows may touch."""
    columns: dict[str, Any] = {"pid": rank + 1, "tid": tid, "start": start, "end": end}
    return pd.DataFrame(columns, index=np.arange(len(start)))


def _inner(frame: pd.DataFrame) -> tuple[Array, Array]:
    return frame["start"].to_numpy(), frame["end"].to_numpy()


def _row(log: RankLog) -> tuple[int, int]:
    return log.rank + 1, row_id(log.rank, TRAINING)
