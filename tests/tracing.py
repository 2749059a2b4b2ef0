"""What every timeline must be; used on synthesised runs and on real ones."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]
PARTS = {"other", "data", "compute", "optimizer", "push", "blocked", "mix"}


def load(path: Path) -> list[Event]:
    """The events of a trace, after all that can be said of any trace was checked."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    trace = json.loads(text, parse_constant=lambda name: 1 / 0)  # NaN is no JSON
    events: list[Event] = trace["traceEvents"]
    for event in events:
        assert isinstance(event["pid"], int) and event["pid"] > 0
        assert event["ph"] == "M" or isinstance(event["ts"], int)
        assert event.get("dur", 1) > 0
    check_rows(events)
    check_steps(events)
    check_arrows(events)
    check_pairs(events)
    return events


def slices(events: list[Event], name: str = "", pid: int = 0) -> list[Event]:
    """Spans whose name begins so."""
    return [
        e for e in events
        if e["ph"] == "X" and e["name"].startswith(name) and pid in (0, e["pid"])
    ]  # fmt: skip


def rows(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    """Spans by process and row, parents before children."""
    found = defaultdict(list)
    for event in slices(events):
        found[event["pid"], event["tid"]].append(event)
    for row in found.values():
        row.sort(key=lambda e: (e["ts"], -e["dur"]))
    return found


def check_rows(events: list[Event]) -> None:
    """Spans of one row do not overlap, or lie one within the other; every row has a name."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for place, row in rows(events).items():
        assert place in named
        open_until: list[int] = []
        for event in row:
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or end <= open_until[-1], event
            open_until.append(end)


def check_steps(events: list[Event]) -> None:
    """The parts of a step make it up, without gaps; forward and backward lie in its compute."""
    for row in rows(events).values():
        for step in (e for e in row if e["name"].startswith("step ")):
            end = step["ts"] + step["dur"]
            inside = [e for e in row if step["ts"] <= e["ts"] < end and e is not step]
            parts = [e for e in inside if e["name"].split()[0] in PARTS]
            assert sum(e["dur"] for e in parts) == step["dur"]
            for before, after in pairwise(parts):
                assert before["ts"] + before["dur"] == after["ts"]


def check_arrows(events: list[Event]) -> None:
    """Every arrow has a beginning and an end, each within a span, and goes forward in time."""
    begins, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert begins.keys() == ends.keys()
    assert len(begins) == sum(e["ph"] == "s" for e in events)
    assert len(ends) == sum(e["ph"] == "f" for e in events)
    by_row = rows(events)
    for number, begin in begins.items():
        end = ends[number]
        assert begin["ts"] <= end["ts"]
        assert end["bp"] == "e"
        assert (begin["cat"], begin["name"]) == (end["cat"], end["name"])
        assert around(by_row, begin) and around(by_row, end)


def around(by_row: dict[tuple[int, int], list[Event]], event: Event) -> list[Event]:
    """Spans that an event lies in, the outermost first."""
    row = by_row[event["pid"], event["tid"]]
    return [e for e in row if e["ts"] <= event["ts"] < e["ts"] + e["dur"]]


def check_pairs(events: list[Event]) -> None:
    """Every span that may overlap others begins once and ends once."""
    begins, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "be")
    assert begins.keys() == ends.keys()
    for number, begin in begins.items():
        assert begin["ts"] < ends[number]["ts"]
        assert (begin["cat"], begin["pid"]) == (ends[number]["cat"], ends[number]["pid"])


def arrows(events: list[Event], kind: str) -> list[tuple[Event, Event]]:
    """The spans that arrows connect, the innermost at both ends."""
    by_row = rows(events)
    ends = {e["id"]: e for e in events if e["ph"] == "f" and e["cat"] == kind}
    return [
        (around(by_row, e)[-1], around(by_row, ends[e["id"]])[-1])
        for e in events
        if e["ph"] == "s" and e["cat"] == kind
    ]
