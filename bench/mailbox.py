"""The mailbox against a bare Put + Flush: start with ``mpiexec -n 2 python bench/mailbox.py``.

Rank 1 sends to rank 0. The mailbox does what training does: a frame with header and trailer goes
into a slot, is announced, polled, checked and acknowledged by a small message, with as many frames
under way as training has slots. Its rival puts the same bytes from the same staging buffers into
a window that was made and locked in the same way, turns through as many slots, and flushes; nobody
is told. Both sides poll without pause, in the rival's turns too.

Both run in every round, in an order that alternates; figures are medians over the rounds, ratios
are medians of the ratios within a round, because the machine's speed drifts. ``MiB/s`` is of a
stream of messages, ``us`` the time of a single one: until it is acknowledged, or flushed.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable

import click
import numpy as np
from mpi4py import MPI

from aladdin_mpi.comm.channel import ONE_SLOT_BYTES
from aladdin_mpi.comm.control import (
    NOTICE,
    TAG_NOTICE,
    SmallReceiver,
    SmallSender,
    pack_notice,
    unpack_notice,
)
from aladdin_mpi.comm.mailbox import Inbox, Outbox, pieces
from aladdin_mpi.core.wire import FrameLayout
from aladdin_mpi.messages import FRAME_HEADER_BYTES, Notice

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4**n * KIB for n in range(10)] + [512 * MIB]
STREAM_BYTES = 256 * MIB
COLUMNS = ["bytes", "slots", "mailbox_mib_per_s", "put_mib_per_s", "mailbox_to_put"]
COLUMNS += ["mailbox_us", "put_us", "added_us"]
SERVER, ORIGIN = 0, 1


def make_layout(nbytes: int) -> FrameLayout:
    """A frame of ``nbytes``, a multiple of 64."""
    return FrameLayout((nbytes - FRAME_HEADER_BYTES - 64) // 4)


def counts(nbytes: int) -> tuple[int, int]:
    """Messages of a stream, and single messages, in each round."""
    stream = min(max(STREAM_BYTES // nbytes, 4), 400)
    return stream, min(stream, 100)


class Bare:
    """The rival."""

    def __init__(self, comm: MPI.Intracomm, nbytes: int, slots: int) -> None:
        self.nbytes, self.slots, self.turn = nbytes, slots, 0
        here = nbytes * slots if comm.rank == SERVER else 0
        self.window = MPI.Win.Allocate(here, 1, MPI.INFO_NULL, comm)
        if here:
            np.frombuffer(self.window, np.uint8).fill(0)
        self.window.Lock_all(MPI.MODE_NOCHECK)
        comm.Barrier()

    def send(self, frames: list[np.ndarray], count: int) -> None:
        for _ in range(count):
            self.turn = (self.turn + 1) % self.slots
            raw, base = frames[self.turn], self.turn * self.nbytes
            for a, b in pieces(self.nbytes):
                self.window.Put((raw[a:b], MPI.BYTE), SERVER, (base + a, b - a, MPI.BYTE))
            self.window.Flush(SERVER)

    def free(self) -> None:
        self.window.Unlock_all()
        self.window.Free()


class Sender:
    """What a worker's communication thread does, without its pauses."""

    def __init__(self, comm: MPI.Intracomm, layout: FrameLayout, slots: int) -> None:
        self.slots, self.sent, self.acknowledged = slots, 0, 0
        frames = [layout.new_frame() for _ in range(slots)]
        for frame in frames:
            frame.params.fill(1.0)
        self.raws = [frame.raw for frame in frames]
        at = layout.trailer_at
        views = [memoryview(raw) for raw in self.raws]
        self.numbers = [(v[:8].cast("q"), v[at : at + 8].cast("q")) for v in views]
        self.box = Outbox(comm, SERVER, 0, layout, slots)
        self.notices = SmallReceiver(comm, TAG_NOTICE, NOTICE, [SERVER], unpack_notice)

    def send(self, count: int, in_flight: int) -> None:
        """Send, and return when all is acknowledged."""
        goal = self.sent + count
        while self.acknowledged < goal:
            if self.box.busy:
                self.box.advance()
            elif self.sent < goal and self.sent - self.acknowledged < in_flight:
                self.sent += 1
                at = self.sent % self.slots
                for number in self.numbers[at]:
                    number[0] = self.sent
                self.box.start(self.raws[at], self.sent)
                self.box.advance()
            for notice in self.notices.poll():
                self.acknowledged = notice.sequence

    def free(self) -> None:
        self.notices.cancel()
        self.box.free()


def serve(comm: MPI.Intracomm, layout: FrameLayout, slots: int, total: int) -> Callable[[], None]:
    """Acknowledge ``total`` messages; return what frees the inbox."""
    inbox = Inbox(comm, 1, layout, slots)
    notices = SmallSender(comm, TAG_NOTICE, NOTICE)
    while total or not notices.idle:
        comm.Iprobe()
        for arrival in inbox.poll():
            record = notices.record()
            pack_notice(record, Notice(0, arrival.sequence, 0, 0, 0, 0, 1, False))
            notices.send(record, ORIGIN)
            total -= 1
        notices.test()
    return inbox.free


def timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(sender: Sender, bare: Bare, nbytes: int, rounds: int) -> dict[str, object]:
    """One line of the table."""
    stream, single = counts(nbytes)
    streams: list[dict[str, float]] = []
    singles: dict[str, list[float]] = {"mailbox": [], "put": []}
    calls = {
        "mailbox": lambda count, most: sender.send(count, most),
        "put": lambda count, most: bare.send(sender.raws, count),
    }
    for round_ in range(-1, rounds):  # one round that is not counted
        took = {}
        for name in sorted(calls, reverse=bool(round_ % 2)):
            call = calls[name]
            took[name] = timed(lambda call=call: call(stream, sender.slots)) / stream
        for index in range(single):
            for name in sorted(calls, reverse=bool((round_ + index) % 2)):
                call = calls[name]
                seconds = timed(lambda call=call: call(1, 1))
                if round_ >= 0:
                    singles[name].append(seconds)
        if round_ >= 0:
            streams.append(took)
    speed = {name: nbytes / MIB / statistics.median(s[name] for s in streams) for name in calls}
    alone = {name: 1e6 * statistics.median(singles[name]) for name in calls}
    return {
        "bytes": nbytes,
        "slots": sender.slots,
        "mailbox_mib_per_s": round(speed["mailbox"]),
        "put_mib_per_s": round(speed["put"]),
        "mailbox_to_put": round(statistics.median(s["put"] / s["mailbox"] for s in streams), 3),
        "mailbox_us": round(alone["mailbox"], 1),
        "put_us": round(alone["put"], 1),
        "added_us": round(alone["mailbox"] - alone["put"], 1),
    }


def bench(nbytes: int, rounds: int) -> dict[str, object]:
    """Measure one size; the line is empty on the server.  Collective."""
    comm = MPI.COMM_WORLD.Dup()
    layout = make_layout(nbytes)
    slots = 1 if nbytes > ONE_SLOT_BYTES else 2
    bare = Bare(comm, nbytes, slots)
    line: dict[str, object] = {}
    if comm.rank == SERVER:
        free = serve(comm, layout, slots, sum(counts(nbytes)) * (rounds + 1))
    else:
        sender = Sender(comm, layout, slots)
        line, free = measure(sender, bare, nbytes, rounds), sender.free
    free()
    bare.free()
    comm.Free()
    return line


@click.command()
@click.option("--sizes", help=f"KiB, with commas between them; from 1 to {SIZES[-1] // KIB}.")
@click.option("--rounds", default=9, show_default=True, help="Rounds that are counted.")
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False, writable=True))
def main(sizes: str | None, rounds: int, csv_file: str | None) -> None:
    """Measure the mailbox; a ratio above 1 is in our favour."""
    comm = MPI.COMM_WORLD
    if comm.size != 2:
        raise click.UsageError("start with mpiexec -n 2 python bench/mailbox.py")
    numbers = [int(s) * KIB for s in sizes.split(",")] if sizes else SIZES
    lines = []
    if comm.rank == ORIGIN:
        library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip()
        click.echo(f"{library}, {rounds} rounds")
        click.echo("  ".join(name.rjust(9) for name in COLUMNS))
    for nbytes in numbers:
        line = bench(nbytes, rounds)
        if line:
            lines.append(line)
            click.echo("  ".join(str(line[n]).rjust(max(len(n), 9)) for n in COLUMNS))
    if csv_file and lines:
        with open(csv_file, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
