"""What a rank logs: tables, columns, units and file attributes.

This module is the single source of truth: files are created from it, readers and the documentation
take it from here.  It needs NumPy and nothing else.

Conventions: ``"1"`` is the unit of counts, numbers and ratios; a time named ``time_s`` or
``start_s`` is the monotonic clock of the rank that wrote the row (``time.monotonic()``), other
times are durations; NaN and -1 stand for "unknown".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

__all__ = [
    "ARRIVALS",
    "ATTRIBUTES",
    "CLOCK_COLUMNS",
    "END_VALUES",
    "EVALS",
    "EVENTS",
    "EVENT_MEANINGS",
    "MERGES",
    "MIXES",
    "POLLS",
    "REPLIES",
    "SCHEMA_VERSION",
    "SENDS",
    "SPREADS",
    "STEPS",
    "STEP_PARTS",
    "TABLES",
    "USER",
    "Column",
    "EventKind",
    "Row",
    "Table",
    "Value",
]

SCHEMA_VERSION = 1
"""Raised when a column is renamed, removed or changes its meaning, not when one is added."""

Value = int | float | bool | str | bytes
Row = tuple[Value, ...]


@dataclass(frozen=True)
class Column:
    """One column of a table, or one value of a file.

    Attributes
    ----------
    name : str
    dtype : str
        NumPy's name of the type, such as ``"f8"``; ``"S32"`` is UTF-8 text of at most 32 bytes.
    unit : str
        ``"s"``, ``"B"``, ``"text"``, or ``"1"`` for counts, numbers and ratios.
    meaning : str
        One line.
    """

    name: str
    dtype: str
    unit: str
    meaning: str

    @property
    def unknown(self) -> Value:
        """The value that stands for "unknown"."""
        kind = np.dtype(self.dtype).kind
        return float("nan") if kind == "f" else b"" if kind == "S" else -1


@dataclass(frozen=True)
class Table:
    """A table of rows of fixed size.

    Attributes
    ----------
    name, meaning : str
    columns : tuple of Column
        In the order of the values of a row.
    roles : tuple of str
        Who fills it (``"worker"``, ``"server"``, ``"relay"``); every file has every table.
    """

    name: str
    meaning: str
    columns: tuple[Column, ...]
    roles: tuple[str, ...]

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """The compound type of a row: little-endian, without padding."""
        return compound(self.columns)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def row(self, **values: Value) -> Row:
        """A row from named values; those not given are "unknown" (NaN, -1 or empty).

        Raises
        ------
        TypeError
            A name is not a column.
        """
        if unknown := values.keys() - set(self.names):
            raise TypeError(f"table {self.name!r} has no column {sorted(unknown)}")
        return tuple(values.get(c.name, c.unknown) for c in self.columns)


def compound(columns: Iterable[Column]) -> np.dtype[np.void]:
    return np.dtype([(c.name, np.dtype(c.dtype).newbyteorder("<")) for c in columns])


class EventKind(IntEnum):
    """What an event is about; the numbers are in files and never change."""

    NONFINITE_PUSH = 1
    NONFINITE_MERGE = 2
    NONFINITE_REPLY = 3
    STALL = 4
    STALL_END = 5
    LEAVE = 6
    STOP = 7
    OVERLOAD = 8
    CHECKPOINT = 9
    RESUME = 10
    ERROR = 11
    NOTE = 12


EVENT_MEANINGS: dict[EventKind, str] = {
    EventKind.NONFINITE_PUSH: "a NaN or infinity was found before a push; value: iteration",
    EventKind.NONFINITE_MERGE: "a push was not merged, it had a NaN or infinity; value: sequence",
    EventKind.NONFINITE_REPLY: "a reply was not mixed because of a NaN or infinity; value: number",
    EventKind.STALL: "a rank is silent or makes no step; value: seconds since its last sign",
    EventKind.STALL_END: "a stalled rank goes on; value: seconds that it was stalled",
    EventKind.LEAVE: "a worker has ended; value: workers still training",
    EventKind.STOP: "somebody asked everybody to stop; value: samples consumed by then",
    EventKind.OVERLOAD: "the server or its link is too slow; value: iterations carried per push",
    EventKind.CHECKPOINT: "a checkpoint was written; value: seconds that it took",
    EventKind.RESUME: "the run went on from a checkpoint; value: iteration or version",
    EventKind.ERROR: "an error that ends this rank; the text is its message",
    EventKind.NOTE: "anything else; the text says what",
}  # fmt: skip

TIME = Column("time_s", "f8", "s", "monotonic clock of this rank when the row was made")
CHANNEL = Column(
    "channel", "i2", "1",
    "which channel, from 0: an optimizer's, or with several servers one of its parts'"
)  # fmt: skip
WORKER = Column("worker", "i4", "1", "index of the worker, from 0; -1: none")
VERSION_HAD = Column("version", "i8", "1", "version of the parameters that the worker mixed last")
SEQUENCE = Column("sequence", "i8", "1", "number of the push among those of its worker, from 1")
ITERATIONS = Column("iterations", "i4", "1", "iterations whose result the push carries")
SAMPLES = Column("samples", "i4", "1", "training samples whose result the push carries")
WANTS_REPLY = Column("wants_reply", "i1", "1", "1: the push asked for the global parameters")
STALENESS = Column(
    "staleness", "i4", "1",
    "merges between the version that the worker had and the arrival of its push; -1: unknown",
)  # fmt: skip
SAMPLES_TOTAL = Column("samples_total", "i8", "1", "samples of all workers in merged pushes")

STEPS = Table(
    "steps",
    "one row per iteration: one call of opt.step() on a worker",
    (
        Column("iteration", "i8", "1", "number of the iteration on this worker, from 0"),
        CHANNEL,
        Column("epoch", "i4", "1", "epoch of the iteration, from 0"),
        Column("start_s", "f8", "s", "monotonic clock of this rank when the step began"),
        Column("step_s", "f4", "s", "whole step: end of the previous one to the end of this one"),
        Column("data_s", "f4", "s", "waiting for the batch"),
        Column("compute_s", "f4", "s", "forward and backward pass"),
        Column("optimizer_s", "f4", "s", "local optimizer"),
        Column(
            "push_s", "f4", "s", "rest of the algorithm's step: making the update, handing it over"
        ),
        Column("blocked_s", "f4", "s", "waiting for another rank"),
        Column("mix_s", "f4", "s", "mixing a reply into the local parameters"),
        Column("forward_s", "f4", "s", "forward pass; NaN: not measured apart"),
        Column("backward_s", "f4", "s", "backward pass; NaN: not measured apart"),
        Column("loss", "f4", "1", "training loss of the batch; NaN: unknown"),
        Column("lr", "f4", "1", "learning rate of the first parameter group, as this step used it"),
        Column("samples", "i4", "1", "samples in the batch"),
        Column("coalesced", "i1", "1", "1: the update travelled with a later push"),
        Column("iterations_in_push", "i4", "1", "iterations in the push made here; 0: none"),
        Column("staleness", "i4", "1", "staleness of the push acknowledged last; -1: unknown"),
        Column("emulated", "i1", "1", "1: part of the time was slept, to emulate a slow worker"),
    ),
    ("worker",),
)

STEP_PARTS: dict[str, str] = {
    "data_s": "data",
    "compute_s": "compute",
    "optimizer_s": "optimizer",
    "push_s": "push",
    "blocked_s": "blocked",
    "mix_s": "mix",
}
"""Columns of ``steps`` that a step is split into, and what they are called; the rest is "other"."""

SENDS = Table(
    "sends",
    "one row per push that was acknowledged, or message to a worker that has left",
    (
        SEQUENCE,
        CHANNEL,
        Column("queued_s", "f8", "s", "monotonic clock of this rank when the push was handed over"),
        Column("queue_s", "f4", "s", "from handing over to the start of the transfer"),
        Column("put_s", "f4", "s", "transfer: start of the put to its local and remote completion"),
        Column("ack_s", "f4", "s", "from publishing to the acknowledgement"),
        Column("bytes", "i8", "B", "size of the message with its header"),
        ITERATIONS,
        SAMPLES,
        WANTS_REPLY,
        STALENESS,
        VERSION_HAD,
        Column("to", "i4", "1", "worker that it went to; -1: the server"),
    ),
    ("worker",),
)

MIXES = Table(
    "mixes",
    "one row per reply that a worker mixed in or threw away",
    (
        TIME,
        CHANNEL,
        Column("number", "i8", "1", "number of the reply among those to this worker, from 1"),
        Column("version", "i8", "1", "merges that the carried parameters contain"),
        Column("alpha", "f4", "1", "mixing weight"),
        Column("lag_iterations", "i4", "1", "steps from the push named by the reply to the mix"),
        Column("discarded", "i1", "1", "1: thrown away because it was not finite"),
        Column("origin", "i4", "1", "worker that it came from; -1: the server"),
    ),
    ("worker",),
)

POLLS = Table(
    "polls",
    "one row per second of a server's loop",
    (
        TIME,
        Column("polls", "i8", "1", "polls of the mailbox in this second"),
        Column("empty", "i8", "1", "polls that found nothing"),
        Column("busy_s", "f4", "s", "time spent on merging, copying and answering"),
        Column("longest_gap_s", "f4", "s", "longest time between two polls"),
        Column("overload", "f4", "1", "iterations carried per push in this second; NaN: no push"),
        SAMPLES_TOTAL,
    ),
    ("server",),
)

ARRIVALS = Table(
    "arrivals",
    "one row per push that a server merged",
    (
        TIME,
        CHANNEL,
        WORKER,
        SEQUENCE,
        ITERATIONS,
        SAMPLES,
        STALENESS,
        VERSION_HAD,
        Column("merged_version", "i8", "1", "version of the global parameters after the merge"),
        WANTS_REPLY,
        Column("loss", "f4", "1", "training loss that the worker reported; NaN: unknown"),
        Column("nonfinite", "i1", "1", "1: not merged, a NaN or an infinity was in it"),
    ),
    ("server",),
)

MERGES = Table(
    "merges",
    "one row per pass of a server over the global parameters, or per message of a relay",
    (
        TIME,
        CHANNEL,
        Column("version", "i8", "1", "version of the global parameters after the pass"),
        Column("count", "i4", "1", "pushes merged in one pass"),
        Column("merge_s", "f4", "s", "duration of the pass"),
        Column("bytes", "i8", "B", "payload read from the mailbox; at a relay, the message's"),
        Column("messages", "i4", "1", "messages that they came in, or went on in from a relay"),
    ),
    ("server", "relay"),
)

REPLIES = Table(
    "replies",
    "one row per reply of a server",
    (
        TIME,
        CHANNEL,
        WORKER,
        Column("number", "i8", "1", "number of the reply among those to this worker, from 1"),
        Column("version", "i8", "1", "merges that the carried parameters contain"),
        Column("alpha", "f4", "1", "mixing weight"),
        Column("sequence", "i8", "1", "last push of the worker that the parameters contain"),
        Column("copy_s", "f4", "s", "copying the global parameters into the reply buffer"),
        Column("send_s", "f4", "s", "until the send completed locally; NaN: unknown"),
    ),
    ("server",),
)

EVALS = Table(
    "evals",
    "one row per evaluation of the global parameters",
    (
        TIME,
        Column("epoch", "f4", "1", "passes over the data by all workers together"),
        SAMPLES_TOTAL,
        Column("version", "i8", "1", "version of the evaluated parameters"),
        Column("loss", "f4", "1", "mean loss"),
        Column("accuracy", "f4", "1", "share of correct answers, 0 to 1; NaN: not a classifier"),
        Column("duration_s", "f4", "s", "evaluation"),
        Column("fetch_s", "f4", "s", "waiting for the global parameters"),
        Column("split", "i1", "1", "0: test, 1: validation, 2: training data"),
    ),
    ("worker", "server"),
)

SPREADS = Table(
    "spreads",
    "one row per measurement of how far the workers' parameters are apart, by worker 0",
    (
        TIME,
        Column("iteration", "i8", "1", "iteration of worker 0 after which it was called"),
        Column("workers", "i4", "1", "workers that took part: those still training"),
        Column("variance", "f8", "1", "of a parameter over the workers, mean of all parameters"),
        Column("mean_square", "f8", "1", "square of the workers' mean, mean of all parameters"),
    ),
    ("worker",),
)

EVENTS = Table(
    "events",
    "one row per rare event",
    (
        TIME,
        Column("kind", "i2", "1", "; ".join(f"{k.value}: {k.name.lower()}" for k in EventKind)),
        WORKER,
        Column("value", "f8", "1", "depends on the kind, see the attribute `kinds`"),
        Column("text", "S120", "text", "a line for people"),
    ),
    ("worker", "server"),
)

USER = Table(
    "user",
    "one row per value given to am.log()",
    (
        Column("iteration", "i8", "1", "number of the iteration on this worker, from 0"),
        Column("name", "S32", "text", "name of the value"),
        Column("value", "f8", "1", "the value"),
    ),
    ("worker",),
)

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        STEPS, SENDS, MIXES, POLLS, ARRIVALS, MERGES, REPLIES, EVALS, SPREADS, EVENTS, USER,
    )
}  # fmt: skip
"""All tables by name, in the order in which they are created."""

CLOCK_COLUMNS = ("time_s", "start_s", "queued_s")
"""Columns that are the monotonic clock of the rank that wrote the row; others are durations."""

ATTRIBUTES: tuple[Column, ...] = (
    Column("schema_version", "i4", "1", "version of this schema"),
    Column("package", "S", "text", "name of the package that wrote the file"),
    Column("rank", "i4", "1", "rank among all processes of the run"),
    Column("world_size", "i4", "1", "processes of the run"),
    Column("role", "S", "text", "worker, server or relay"),
    Column("worker", "i4", "1", "index of the worker, from 0; -1: not a worker"),
    Column("num_workers", "i4", "1", "workers of the run"),
    Column("host", "S", "text", "name of the machine"),
    Column("pid", "i8", "1", "process"),
    Column("device", "S", "text", "device of the model"),
    Column("run", "S", "text", "name of the run, the same on all ranks"),
    Column("config", "S", "text", "configuration of the run, YAML"),
    Column("versions", "S", "text", "versions of the software, JSON"),
    Column("commit", "S", "text", "git commit of the package"),
    Column("start_unix_s", "f8", "s", "time of day (Unix) when the file was created"),
    Column("start_clock_s", "f8", "s", "monotonic clock of this rank when the file was created"),
    Column("clock_offset_s", "f8", "s", "to add to this clock to get that of rank 0, at start"),
    Column("clock_error_s", "f8", "s", "uncertainty of clock_offset_s"),
    Column("part", "i4", "1", "how often the run had been started before, in the same folder"),
    Column("job", "S", "text", "what the scheduler says of the job (Slurm), JSON"),
    Column("mode", "S", "text", "how the file was written: swmr or flush"),
    Column("locking", "i1", "1", "1: with file locks, 0: without"),
)
"""Attributes of a file, known at start.  Text is UTF-8 of any length."""

END_VALUES: tuple[Column, ...] = (
    Column("clean_end", "i1", "1", "1: the rank ended in order, 0: it was killed or raised"),
    Column("end_unix_s", "f8", "s", "time of day (Unix) when the file was closed"),
    Column("end_clock_s", "f8", "s", "monotonic clock of this rank when the file was closed"),
    Column("clock_offset_s", "f8", "s", "to add to this clock to get that of rank 0, at the end"),
    Column("clock_error_s", "f8", "s", "uncertainty of clock_offset_s"),
    Column("iterations", "i8", "1", "iterations of this worker"),
    Column("samples", "i8", "1", "samples of this worker, or of all workers on a server"),
    Column("pushes", "i8", "1", "pushes sent, or merged on a server"),
    Column("replies", "i8", "1", "replies mixed, or sent on a server"),
    Column("version", "i8", "1", "last version of the global parameters"),
    Column("rows_lost", "i8", "1", "rows that could not be written; -1: the file was not closed"),
    Column("reason", "S120", "text", "why the run ended"),
    Column("backend", "S120", "text", "what averaged the gradients; empty: nothing did"),
)
"""Scalar datasets under ``/run``, known only at the end; unknown until then."""
