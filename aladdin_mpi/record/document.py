"""The schema as a page: ``python -m aladdin_mpi.record.document > docs/schema.md``."""

from __future__ import annotations

from collections.abc import Iterable

from aladdin_mpi.record import schema

__all__ = ["page"]

_HEAD = f"""# The log of a run

Schema version {schema.SCHEMA_VERSION}. One HDF5 file per rank, `rank0000.h5` and so on; every file
has every table. A table is a dataset of rows; the attributes `<column>.unit` and `<column>.meaning`
of the dataset say what this page says. `time_s` and `start_s` are the monotonic clock of the rank
that wrote the row: add the file's attribute `clock_offset_s` to get rank 0's. NaN and -1 stand for
"unknown".
This page is made from `aladdin_mpi/record/schema.py` by `python -m aladdin_mpi.record.document`.
"""


def _rows(columns: Iterable[schema.Column]) -> list[str]:
    lines = ["| name | type | unit | meaning |", "|---|---|---|---|"]
    lines += [f"| `{c.name}` | {c.dtype} | {c.unit} | {c.meaning} |" for c in columns]
    return lines


def page() -> str:
    """The page, Markdown."""
    lines = [_HEAD]
    for table in schema.TABLES.values():
        writers = " and ".join(table.roles)
        lines += [f"## `{table.name}`", "", f"{table.meaning}. Written by: {writers}.", ""]
        lines += [*_rows(table.columns), ""]
    lines += ["### Kinds of events", "", "| number | kind | meaning |", "|---|---|---|"]
    for kind in schema.EventKind:
        lines.append(f"| {kind.value} | {kind.name.lower()} | {schema.EVENT_MEANINGS[kind]} |")
    lines += ["", "## Attributes of a file", "", *_rows(schema.ATTRIBUTES), ""]
    lines += ["## `/run`: values known at the end", "", *_rows(schema.END_VALUES)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
