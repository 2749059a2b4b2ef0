"""A message of more than 2^31 bytes to the server, twice through its only slot, and one back.

``mpiexec -n 2 python -m mpi4py large_message.py``
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from mailing import SERVER, Origin, Server
from mpi4py import MPI

from aladdin_mpi.comm.mailbox import pieces
from aladdin_mpi.core.wire import Arrival, Frame, FrameLayout

LAYOUT = FrameLayout(2**29 + 4099, 5, 3)
CHUNK = 1 << 20
BASE = np.arange(CHUNK, dtype=np.float32)
MESSAGES = 2
TAG = 5


def chunks(frame: Frame, number: int) -> Iterator[tuple[np.ndarray, np.float32]]:
    """Parts of the parameters, and what each adds to ``BASE``: whole numbers below 2^24."""
    for index, start in enumerate(range(0, LAYOUT.size, CHUNK)):
        yield frame.params[start : start + CHUNK], np.float32(7919 * index + number)


def fill(frame: Frame, number: int) -> None:
    for part, offset in chunks(frame, number):
        np.add(BASE[: part.size], offset, out=part)
    frame.floats[:] = number
    frame.counts[:] = 2**40 + number


def check(frame: Frame, number: int) -> None:
    for part, offset in chunks(frame, number):
        assert np.array_equal(part, BASE[: part.size] + offset), offset
    assert (frame.floats == number).all()
    assert (frame.counts == 2**40 + number).all()


def main() -> None:
    comm = MPI.COMM_WORLD.Dup()
    assert LAYOUT.frame_bytes > 2**31
    checked = []

    def take(arrival: Arrival) -> None:
        check(arrival.frame, arrival.sequence)
        checked.append(arrival.sequence)
        if arrival.sequence == MESSAGES:  # back, as a reply travels
            raw = arrival.frame.raw
            requests = [
                comm.Isend((raw[a:b], b - a, MPI.BYTE), 1, TAG) for a, b in pieces(raw.size)
            ]
            while not MPI.Request.Testall(requests):
                time.sleep(1e-4)

    if comm.rank == SERVER:
        server = Server(comm, LAYOUT, 1)
        server.serve(take)
        server.free()
        assert checked == list(range(1, MESSAGES + 1))
        print(f"{LAYOUT.frame_bytes} bytes, messages {checked}", flush=True)
    else:
        origin = Origin(comm, LAYOUT, 1)
        frame = origin.next_frame
        for number in range(1, MESSAGES + 1):
            fill(frame, number)
            origin.send(last=number == MESSAGES)
            if number < MESSAGES:
                origin.wait_for_room()
        origin.wait(lambda: not origin._box.busy)
        frame.raw[:] = 0
        requests = [
            comm.Irecv((frame.raw[a:b], b - a, MPI.BYTE), SERVER, TAG)
            for a, b in pieces(frame.raw.size)
        ]
        while not MPI.Request.Testall(requests):
            time.sleep(1e-4)
        origin.finish()
        check(frame, MESSAGES)
        assert frame.intact(MESSAGES)
        origin.free()
        print("and back", flush=True)


main()
