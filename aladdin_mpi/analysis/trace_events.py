"""Events of a trace as JSON text: made from templates, for there can be millions."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

__all__ = [
    "asynchronous",
    "complete",
    "counter",
    "floats",
    "flow_ends",
    "instant",
    "integers",
    "metadata",
    "row_id",
    "row_name",
]


def row_id(rank: int, row: int) -> int:
    """Number of a row; unique in a trace, and none is a process's: viewers take 0, and a row with
    its process's number, for something else.
    """
    return 1000 * (rank + 1) + row


def metadata(pid: int, tid: int, kind: str, **args: object) -> str:
    """A name, or where to show something."""
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args})


def row_name(rank: int, row: int, name: str) -> str:
    """The name of a rank's row."""
    return metadata(rank + 1, row_id(rank, row), "thread_name", name=name)


def complete(
    pid: int, tid: int | np.ndarray, name: str, start: np.ndarray, end: np.ndarray,
    args_text: str = "", *, names: Sequence[list] = (), args: Sequence[list] = (),
    keep: np.ndarray | None = None,
) -> list[str]:  # fmt: skip
    """Complete events; spans without a length are left out.

    ``name`` and ``args_text`` are templates of the values in ``names`` and ``args``, lists as long
    as the spans.
    """
    some = end > start
    if keep is not None:
        some &= keep
    tids: list = [] if isinstance(tid, int) else [tid.tolist()]
    text = f'{{"ph":"X","pid":{pid},"tid":{"%d" if tids else tid},"name":"{name}","ts":%d,"dur":%d'
    text += f',"args":{{{args_text}}}}}' if args_text else "}"
    columns = [*tids, *names, start.tolist(), (end - start).tolist(), *args]
    if some.all():
        return [text % row for row in zip(*columns, strict=True)]
    rows = zip(some.tolist(), zip(*columns, strict=True), strict=True)
    return [text % row for wanted, row in rows if wanted]


def asynchronous(
    name: str, pid: int, tid: int, ids: Sequence[int], start: np.ndarray, end: np.ndarray
) -> list[str]:
    """Spans that may overlap."""
    tail = f'"cat":{json.dumps(name)},"name":{json.dumps(name)},"pid":{pid},"tid":{tid}'
    lines = []
    for number, a, b in zip(ids, start.tolist(), end.tolist(), strict=True):
        lines.append(f'{{"ph":"b","id":{number},"ts":{a},{tail}}}')
        lines.append(f'{{"ph":"e","id":{number},"ts":{b},{tail}}}')
    return lines


def flow_ends(kind: str, phase: str, ids: Sequence[int], places: Sequence[list]) -> list[str]:
    """The beginnings (phase ``s``) or ends (``f``) of arrows; ``places``: process, row, time."""
    enclosing = ',"bp":"e"' if phase == "f" else ""
    text = f'{{"ph":"{phase}"{enclosing},"cat":"{kind}","name":"{kind}","id":%d'
    text += ',"pid":%d,"tid":%d,"ts":%d}'
    return [text % row for row in zip(ids, *places, strict=True)]


def instant(pid: int, tid: int, name: str, time: int, args: str) -> str:
    """A moment of a process."""
    return (
        f'{{"ph":"i","s":"p","pid":{pid},"tid":{tid},"name":{json.dumps(name)},"ts":{time},'
        f'"args":{{{args}}}}}'
    )


def counter(pid: int, name: str, at: np.ndarray, values: np.ndarray) -> list[str]:
    """A curve."""
    head = f'{{"ph":"C","pid":{pid},"name":"{name}","ts":'
    return [
        f'{head}{t},"args":{{"value":{v:.6g}}}}}'
        for t, v in zip(at.tolist(), values.tolist(), strict=True)
    ]


def integers(values: pd.Series) -> list[int]:
    return values.to_numpy().tolist()


def floats(values: pd.Series) -> list[str]:
    """As JSON, which has no NaN."""
    return [f"{v:.6g}" if math.isfinite(v) else "null" for v in values.to_numpy().tolist()]
