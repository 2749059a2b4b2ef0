"""A run as a trace: spans in their rows, arrows from cause to effect, and what is damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path

import logs
import numpy as np
import pandas as pd
import pytest
import tracing
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from aladdin_mpi.analysis import spans
from aladdin_mpi.cli.main import main
from aladdin_mpi.record import schema
from aladdin_mpi.record.schema import EventKind, Value

pytestmark = pytest.mark.timeout(120)

HOST = 'a "host" 100%'
OFFSETS = [0.0, 3.0, -2.0]
"""[s] what to add to the clocks of the ranks."""


def call(*args: object) -> Result:
    return CliRunner().invoke(main, ["timeline", *map(str, args)], prog_name="aladdin-mpi")


def write(folder: Path, rank: int, rows: dict[str, list[dict[str, Value]]]) -> None:
    """One rank's file; times of rows are rank 0's, since the start."""
    start_s = logs.CLOCK_S - OFFSETS[rank]
    tables = {}
    for name, table in rows.items():
        for row in table:
            for column in schema.CLOCK_COLUMNS:
                if column in row:
                    row[column] = float(row[column]) + start_s
        made = [schema.TABLES[name].row(**row) for row in table]
        tables[name] = np.array(made, schema.TABLES[name].dtype)
    offset = {"start_clock_s": start_s, "clock_offset_s": OFFSETS[rank]}
    logs.write(folder, rank, tables, host=HOST, **offset)


def step(iteration: int, start_s: float, step_s: float = 0.01, **parts: Value) -> dict[str, Value]:
    given = {
        "data_s": 0.001, "compute_s": 0.004, "optimizer_s": 0.001, "push_s": 0.001,
        "blocked_s": 0.0, "mix_s": 0.0, "iterations_in_push": 1, "coalesced": 0, "channel": 0,
    }  # fmt: skip
    return {"iteration": iteration, "start_s": start_s, "step_s": step_s} | given | parts


def push(sequence: int, queued_s: float, **given: Value) -> dict[str, Value]:
    return {
        "sequence": sequence, "channel": 0, "queued_s": queued_s, "queue_s": 0.001, "put_s": 0.002,
        "ack_s": 0.003, "bytes": 100, "iterations": 1, "samples": 32, "staleness": 2,
        "version": 3, "to": -1,
    } | given  # fmt: skip


def served(folder: Path) -> Path:
    """Worker 0 pushes twice and mixes; worker 1 once; two pushes are merged in one pass."""
    write(folder, 0, {
        "arrivals": [
            {"time_s": 1.015, "channel": 0, "worker": 0, "sequence": 1, "iterations": 1,
             "merged_version": 1, "nonfinite": 0},
            {"time_s": 1.03, "channel": 0, "worker": 1, "sequence": 1, "iterations": 1,
             "merged_version": 2, "nonfinite": 0},
            {"time_s": 1.03, "channel": 0, "worker": 0, "sequence": 2, "iterations": 2,
             "merged_version": 3, "nonfinite": 0},
        ],
        "merges": [
            {"time_s": 1.015, "channel": 0, "version": 1, "count": 1, "merge_s": 0.001},
            {"time_s": 1.03, "channel": 0, "version": 3, "count": 2, "merge_s": 0.002},
        ],
        "replies": [
            {"time_s": 1.031, "channel": 0, "worker": 0, "number": 1, "version": 3, "alpha": 0.75,
             "sequence": 2, "copy_s": 0.0005, "send_s": 0.002},
            {"time_s": 1.0316, "channel": 0, "worker": 1, "number": 1, "version": 3, "alpha": 0.75,
             "sequence": 1, "copy_s": 0.0005, "send_s": math.nan},
        ],
        "polls": [{"time_s": 1.02, "busy_s": 0.25, "overload": math.nan}],
        "events": [{"time_s": 1.04, "kind": int(EventKind.STALL_END), "worker": 1, "value": 0.02,
                    "text": 'goes on "again"\n'}],
    })  # fmt: skip
    write(folder, 1, {
        "steps": [step(0, 1.0), step(1, 1.01, coalesced=1, iterations_in_push=0),
                  step(2, 1.02, forward_s=0.001, backward_s=0.002, iterations_in_push=2),
                  step(3, 1.03, mix_s=0.002, loss=math.nan)],
        "sends": [push(1, 1.0095), push(2, 1.0248, iterations=2)],
        "mixes": [{"time_s": 1.0399, "channel": 0, "number": 1, "version": 3, "alpha": 0.75,
                   "lag_iterations": 1, "discarded": 0, "origin": -1}],
        "evals": [{"time_s": 1.06, "epoch": 1.0, "loss": 0.5, "accuracy": math.nan,
                   "duration_s": 0.005, "fetch_s": 0.01}],
        "events": [{"time_s": 1.05, "kind": int(EventKind.LEAVE), "worker": 0, "value": 4.0}],
    })  # fmt: skip
    write(folder, 2, {"steps": [step(0, 1.0, 0.03)], "sends": [push(1, 1.02)]})
    return folder


def test_spans_and_arrows(tmp_path: Path) -> None:
    result = call(served(tmp_path))
    assert result.exit_code == 0, result.output
    assert "3 push, 1 reply arrows" in result.stdout and result.stderr == ""
    events = tracing.load(tmp_path / "trace.json")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[1] == 'rank 0, server on a "host" 100%'
    assert names[3] == 'rank 2, worker 1 on a "host" 100%'

    parts = [(e["name"], e["ts"], e["dur"]) for e in tracing.slices(events, pid=2)
             if 1_020_000 <= e["ts"] < 1_030_000]  # fmt: skip
    assert sorted(parts, key=lambda p: (p[1], -p[2])) == [
        ("step 2", 1_020_000, 10_000), ("other", 1_020_000, 3000), ("data", 1_023_000, 1000),
        ("compute", 1_024_000, 4000), ("forward", 1_024_000, 1000), ("backward", 1_025_000, 2000),
        ("push of 2 iterations", 1_025_800, 2000), ("optimizer", 1_028_000, 1000),
        ("push of 2 iterations", 1_029_000, 1000),
    ]  # fmt: skip
    assert len(tracing.slices(events, "push put off")) == 1
    (finish,) = tracing.slices(events, "finish")
    assert (finish["ts"], finish["dur"]) == (1_040_000, 10_000)
    (evaluation,) = tracing.slices(events, "evaluation")
    assert (evaluation["ts"], evaluation["dur"]) == (1_045_000, 15_000)
    assert evaluation["args"]["accuracy"] is None

    pushes = tracing.arrows(events, "push")
    assert [(a["pid"], a["args"]["sequence"], b["name"]) for a, b in pushes] == [
        (2, 1, "merge"), (2, 2, "merge of 2 pushes"), (3, 1, "merge of 2 pushes"),
    ]  # fmt: skip
    ((reply, mix),) = tracing.arrows(events, "reply")
    assert (reply["name"], reply["ts"] + reply["dur"]) == ("reply to worker 0", 1_031_000)
    assert (mix["name"], mix["pid"], mix["args"]["number"]) == ("mix", 2, 1)

    flights = [e for e in events if e["name"] == "in flight"]
    assert [e["ts"] for e in flights[:2]] == [1_009_500, 1_015_500]
    (stalled,) = [e for e in events if e["ph"] == "i" and e["name"] == "stall end"]
    assert stalled["args"]["text"] == 'goes on "again"\n'
    assert [e["ts"] for e in events if e["name"] == "worker 1 stalled"] == [1_020_000, 1_040_000]
    assert {e["name"] for e in events if e["ph"] == "C"} == {"busy", "iterations per push"}


def test_only_what_was_asked_for(tmp_path: Path) -> None:
    served(tmp_path)
    path = tmp_path / "cut.json.gz"
    assert call(tmp_path, "-o", path, "--from", 1.031, "--to", 1.045).exit_code == 0
    events = tracing.load(path)
    assert {e["name"] for e in tracing.slices(events, "step")} == {"step 3"}
    assert len(tracing.arrows(events, "reply")) == 1
    assert tracing.arrows(events, "push") == []
    assert call(tmp_path, "-o", path, "--from", 100).exit_code == 0
    assert {e["ph"] for e in tracing.load(path)} == {"M"}


def test_messages_between_workers(tmp_path: Path) -> None:
    """Two at once get two rows; one that had arrived before its send was timed is drawn all the
    same; one that went back in time is not.
    """
    sent = {"queue_s": 0.0, "ack_s": math.nan, "staleness": -1, "version": -1}
    write(tmp_path, 1, {
        "steps": [step(0, 1.0)],
        "sends": [push(1, 1.001, to=1, put_s=0.01, **sent), push(1, 1.002, to=2, **sent),
                  push(2, 1.019, to=1, **sent), push(3, 1.05, to=1, **sent)],
    })  # fmt: skip
    mixed = {"channel": 0, "version": -1, "alpha": 0.5, "discarded": 0, "origin": 0}
    write(tmp_path, 2, {
        "steps": [step(0, 1.0, mix_s=0.001), step(1, 1.01, mix_s=0.002), step(2, 1.02)],
        "mixes": [{"time_s": time, "number": number, **mixed}
                  for number, time in ((1, 1.0095), (2, 1.0189), (3, 1.025))],
    })  # fmt: skip
    result = call(tmp_path)
    assert "2 message arrows" in result.stdout
    assert "1 arrow(s) left out" in result.stderr
    assert "these are missing: 0" in result.stderr
    events = tracing.load(tmp_path / "trace.json")
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2}
    assert rows == {"training", "sender", "sender 2"}
    found = [(a["args"]["sequence"], b["ts"]) for a, b in tracing.arrows(events, "message")]
    assert found == [(1, 1_009_000), (2, 1_018_000)]


def test_damaged_rows_do_no_harm(tmp_path: Path) -> None:
    bad = {"data_s": -1.0, "compute_s": math.inf, "optimizer_s": math.nan, "mix_s": 1e30}
    write(tmp_path, 1, {
        "steps": [step(0, 1.0, math.nan), step(2, 1.02, 1e30, **bad), step(1, 1.01, -5.0),
                  step(3, math.nan)],
        "sends": [push(1, 1.0, put_s=-3.0, ack_s=math.nan), push(1, 1.0, queue_s=math.inf)],
        "events": [{"time_s": 1.0, "kind": 99, "worker": -1, "value": math.inf, "text": b"\xff"}],
    })  # fmt: skip
    write(tmp_path, 0, {
        "arrivals": [{"time_s": 1.0, "channel": 0, "worker": 0, "sequence": 1, "nonfinite": 0}],
        "merges": [{"time_s": 1.0, "channel": 0, "count": 2**31 - 1, "merge_s": math.nan},
                   {"time_s": 1.0, "channel": 0, "count": -5, "merge_s": -1.0}],
    })  # fmt: skip
    result = call(tmp_path)
    assert result.exit_code == 0, result.output
    tracing.load(tmp_path / "trace.json")


@pytest.mark.parametrize("what", ["missing", "empty", "damaged", "unwritable"])
def test_a_mistake_is_one_line(tmp_path: Path, what: str) -> None:
    folder, options = tmp_path / "run", []
    if what != "missing":
        folder.mkdir()
    if what == "damaged":
        (folder / "rank0000.h5").write_bytes(b"no HDF5")
    if what == "unwritable":
        served(folder)
        options = ["-o", tmp_path / "none" / "trace.json"]
    result = call(folder, *options)
    (line,) = result.stderr.splitlines()
    assert line.startswith("aladdin-mpi: error: ")
    assert (result.exit_code, result.stdout) == (2, "")


# ---- where spans lie

moments = st.floats(0, 100, allow_nan=False, width=32)
lengths = st.floats(0, 3, width=32) | st.just(math.nan)


@settings(deadline=None)
@given(st.lists(st.tuples(moments, *[lengths] * 7), max_size=20))
def test_steps_never_overlap(rows: list[tuple[float, ...]]) -> None:
    names = ["start_s", "step_s", *(f"{part}_s" for part in spans.PARTS[1:])]
    steps = pd.DataFrame(sorted(rows, key=lambda row: row[0]), columns=names, dtype=float)
    borders = spans.lay_steps(steps)
    assert borders.shape == (len(rows), 8)
    assert (np.diff(borders, axis=1) >= 0).all()
    assert (borders[1:, 0] >= borders[:-1, -1]).all()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 300)), max_size=40))
def test_spans_of_a_lane_do_not_overlap(rows: list[tuple[int, int]]) -> None:
    start = np.array(sorted(row[0] for row in rows), np.int64)
    end = start + np.array([row[1] for row in rows], np.int64)
    lane = spans.lanes(start, end)
    for number in range(int(lane.max(initial=-1)) + 1):
        a, b = start[lane == number], end[lane == number]
        c, d = spans.in_turn(a, b)
        assert (c <= d).all() and (c[1:] >= d[:-1]).all()
        assert np.abs(c - a).max() <= spans.ROUNDING_US
        assert np.abs(d - b).max() <= spans.ROUNDING_US


def test_spans_of_one_time_are_stacked() -> None:
    time = np.array([1.0, 2.0, 2.0, 2.0, 3.0])
    start, end = spans.stacked(time, np.array([0.5, 0.1, 0.2, 0.3, 0.0]))
    assert np.allclose(start, [0.5, 1.4, 1.5, 1.7, 3.0])
    assert np.allclose(end, [1.0, 1.5, 1.7, 2.0, 3.0])


span = st.tuples(st.integers(0, 50), st.integers(0, 20))


@given(span, span, st.integers(-10, 90))
def test_arrows_end_within_their_spans(a: tuple[int, int], b: tuple[int, int], at: int) -> None:
    places = [np.array([v]) for v in (a[0], sum(a), b[0], sum(b), at)]
    begin, end, good = spans.arrow(*places)
    possible = a[1] > 0 and b[1] > 0 and a[0] < sum(b)
    assert good[0] == possible
    if possible:
        assert a[0] <= begin[0] < sum(a) and b[0] <= end[0] < sum(b) and begin[0] <= end[0]


def passes(pushes: list[tuple[float, int, int]], made: list[tuple[float, int]]) -> list[int]:
    arrivals = pd.DataFrame(pushes, columns=["time_s", "iterations", "nonfinite"])
    merges = pd.DataFrame(made, columns=["time_s", "count"])
    found = spans.passes_of_pushes(arrivals.assign(channel=0), merges.assign(channel=0))
    return found.tolist()


def test_pushes_find_their_pass() -> None:
    one, two = (1.0, 1, 0), (2.0, 1, 0)
    assert passes([one, two, two], [(1.0, 1), (2.0, 2)]) == [0, 1, 1]
    assert passes([two, two, two], [(2.0, 2), (2.0, 1)]) == [0, 0, 1]
    assert passes([one, (1.0, 1, 1), one], [(1.0, 2)]) == [0, -1, 0], "one was not finite"
    assert passes([one, (1.0, 0, 0), one], [(1.0, 1), (1.0, 1)]) == [0, -1, 1], "one was empty"
    assert passes([(1.0, 0, 0), one], [(1.0, 2)]) == [0, 0], "an empty one was merged"
    assert passes([one, one], [(1.0, 1)]) == [-1, -1], "a row is missing"
    assert passes([one], []) == [-1]
    assert passes([], [(1.0, 1)]) == []


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 4), max_size=4), max_size=6))
def test_every_push_is_in_the_pass_that_counts_it(calls: list[list[int]]) -> None:
    pushes = [(float(t), 1, 0) for t, counts in enumerate(calls) for _ in range(sum(counts))]
    made = [(float(t), n) for t, counts in enumerate(calls) for n in counts]
    expected = [i for i, (_, n) in enumerate(made) for _ in range(n)]
    assert passes(pushes, made) == expected


def test_the_trace_is_told_of(tmp_path: Path) -> None:
    served(tmp_path)
    call(tmp_path)
    other = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert other["clock_error_us"] == pytest.approx(10)
