"""A run as a trace for ui.perfetto.dev or chrome://tracing: every rank's spans on one clock.

One process per rank, with a row for each of its threads:

training
    The steps of a worker.  Inside a step only durations are known: the parts are laid in the order
    in which a step goes (data, compute, optimizer, push, blocked, mix), back from its end.
sender
    Transfers of pushes and messages; a second row where two are under way at once.
server
    Passes over the global parameters and copies for replies.  Passes that were made in one go are
    laid so that they end when it was over; what lies between passes was not measured.

Arrows go from a transfer to the pass that merged it, or to the step that mixed it in, and from the
copy for a reply to the step that mixed that in.  Where clocks disagree so much that an arrow would
go back in time it is left out, and counted.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

import numpy as np
import pandas as pd

from aladdin_mpi.analysis import spans
from aladdin_mpi.analysis.load import Run
from aladdin_mpi.analysis.timeline_rows import PUSH, REPLY, RankRows, Window
from aladdin_mpi.analysis.trace_events import flow_ends, integers

__all__ = ["Timeline", "write_timeline"]

PLACE = ["pid", "tid", "start", "end"]

Array = np.ndarray


@dataclass
class Timeline:
    """What was written.

    Attributes
    ----------
    events : int
    arrows : dict of str to int
        By kind: ``push``, ``reply``, ``message``.
    left_out : int
        Arrows that would have gone back in time.
    """

    events: int = 0
    arrows: dict[str, int] = field(default_factory=dict)
    left_out: int = 0


def write_timeline(
    run: Run, path: str | Path, first_s: float = -math.inf, last_s: float = math.inf
) -> Timeline:
    """Write the trace of a run.

    Parameters
    ----------
    run : Run
    path : path
        Compressed where it ends in ``.gz``.
    first_s, last_s : float
        [s] since the run started: what lies outside is left out.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    path = Path(path)
    window, timeline = Window(first_s, last_s), Timeline()
    head = {"run": run.name, "algorithm": run.algorithm, "clock_error_us": _clock_error_us(run)}
    compressed = path.suffix == ".gz"
    with cast("IO[str]", gzip.open(path, "wt", 3) if compressed else path.open("w")) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        comma = ""
        for lines in _Trace(run, window, timeline).blocks():
            if lines:
                file.write(comma + ",\n".join(lines))
                comma = ",\n"
                timeline.events += len(lines)
        other = json.dumps({**head, "notes": run.notes})
        file.write(f'\n],"otherData":{other}}}\n')
    return timeline


class _Trace:
    """All ranks' events, and the arrows between them."""

    def __init__(self, run: Run, window: Window, timeline: Timeline) -> None:
        self._run, self._window, self._timeline = run, window, timeline

    def blocks(self) -> Iterator[list[str]]:
        """Events, many at a time; each start of the run has arrows of its own."""
        for part in self._run.parts:
            logs = [log for log in self._run.logs if log.part == part]
            ranks = [RankRows(self._run, log, self._window) for log in logs]
            for rank in ranks:
                yield from rank.blocks()
            yield from self._arrows(ranks)

    def _arrows(self, ranks: list[RankRows]) -> Iterator[list[str]]:
        puts = _all([f for r in ranks for f in r.puts], [*PUSH, "to"])
        merged = _all([f for r in ranks for f in r.merged], PUSH)
        replies = _all([f for r in ranks for f in r.replies], REPLY)
        mixes = _all([f for r in ranks for f in r.mixes], [*REPLY, "origin", "at"])
        to_server, to_worker = puts[puts["to"] < 0], puts[puts["to"] >= 0]
        from_server, from_worker = mixes[mixes["origin"] < 0], mixes[mixes["origin"] >= 0]
        taken = to_server.merge(merged, on=PUSH)
        yield from self._arrows_of("push", taken, taken["start_y"].to_numpy())
        mixed = replies.merge(from_server, on=REPLY)
        yield from self._arrows_of("reply", mixed, mixed["at"].to_numpy())
        sent = to_worker.merge(
            from_worker, left_on=["worker", "to", "channel", "sequence"],
            right_on=["origin", "worker", "channel", "number"],
        )  # fmt: skip
        yield from self._arrows_of("message", sent, sent["at"].to_numpy())

    def _arrows_of(self, kind: str, pairs: pd.DataFrame, at: Array) -> Iterator[list[str]]:
        a, b, c, d = (pairs[n].to_numpy() for n in ("start_x", "end_x", "start_y", "end_y"))
        begin, end, good = spans.arrow(a, b, c, d, at)
        self._timeline.left_out += int(len(good) - good.sum())
        self._timeline.arrows[kind] = int(good.sum())
        pairs = pairs[good]
        ids = self._window.numbers(len(pairs))
        for phase, side, at in (("s", "x", begin[good]), ("f", "y", end[good])):
            places = integers(pairs[f"pid_{side}"]), integers(pairs[f"tid_{side}"]), at.tolist()
            yield flow_ends(kind, phase, ids, places)


def _all(frames: list[pd.DataFrame], names: list[str]) -> pd.DataFrame:
    """Places of all ranks, also where there are none."""
    columns = [*names, *PLACE]
    empty = pd.DataFrame({name: np.empty(0, np.int64) for name in columns})
    found = [frame[columns].astype(np.int64) for frame in frames if len(frame)]
    return pd.concat(found, ignore_index=True) if found else empty


def _clock_error_us(run: Run) -> float | None:
    """[µs] by which two ranks' clocks may be apart, as far as it was measured."""
    errors = [
        error
        for log in run.logs
        for error in (log.attributes["clock_error_s"], log.end["clock_error_s"])
        if math.isfinite(error)
    ]
    return 1e6 * max(errors) if errors else None
