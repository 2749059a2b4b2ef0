"""Many small messages with random pauses; at the server the sum of all of them must be exact.

``mpiexec -n 4 python -m mpi4py soak.py MESSAGES``.  The values are whole numbers, so that a sum of
float32 is exact whatever the order; what finds no room goes into the next message.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from mailing import SERVER, Origin, Server
from mpi4py import MPI

from aladdin_mpi.core import kernels
from aladdin_mpi.core.wire import Arrival, FrameLayout

LAYOUT = FrameLayout(33, 3, 1)
MOST_COALESCED = 8
LARGEST = 3


def pause(rng: np.random.Generator) -> None:
    """Mostly nothing, sometimes a moment, seldom a few milliseconds."""
    draw = rng.random()
    if draw < 0.2:
        time.sleep(rng.random() * 2e-4)
    elif draw < 0.201:
        time.sleep(rng.random() * 5e-3)


def produce(origin: Origin, messages: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Send; return the sum of all that was sent, and how many iterations that were."""
    total = np.zeros(LAYOUT.size, np.int64)
    waiting = np.zeros(LAYOUT.size, np.int64)
    iterations = coalesced = 0
    while origin.sent < messages:
        update = rng.integers(0, LARGEST + 1, LAYOUT.size)
        waiting += update
        total += update
        iterations += 1
        coalesced += 1
        pause(rng)
        origin.progress()
        if coalesced == MOST_COALESCED:
            origin.wait_for_room()
        if origin.room:
            frame = origin.next_frame
            frame.params[:] = waiting
            frame.floats[:] = origin.sent + 1
            frame.counts[:] = coalesced
            origin.send(origin.sent + 1 == messages, coalesced)
            waiting[:] = 0
            coalesced = 0
    return total, iterations


def main() -> None:
    comm = MPI.COMM_WORLD.Dup()
    workers = comm.size - 1
    shares = [len(range(w, int(sys.argv[1]), workers)) for w in range(workers)]
    total = np.zeros(LAYOUT.size, np.int64)
    iterations = 0
    began = time.monotonic()
    if comm.rank == SERVER:
        server = Server(comm, LAYOUT, 2)
        merged = np.zeros(LAYOUT.size, np.float32)
        counted = np.zeros(2, np.int64)  # messages, iterations
        last = [0] * workers

        def take(arrival: Arrival) -> None:
            push = arrival.frame.read_push(0)
            assert push.sequence == arrival.sequence == last[arrival.origin] + 1
            assert (arrival.frame.floats == push.sequence).all()
            assert (arrival.frame.counts == push.iterations).all()
            last[arrival.origin] = push.sequence
            counted[:] += 1, push.iterations
            kernels.merge(merged, (arrival.frame.params,), (1.0,))

        server.serve(take)
        end = server
        assert last == shares
    else:
        worker = comm.rank - 1
        end = Origin(comm, LAYOUT, 2)
        total, iterations = produce(end, shares[worker], np.random.default_rng(worker))
        end.finish()
    totals = np.zeros_like(total)
    comm.Reduce(total, totals, root=SERVER)
    made = comm.reduce(iterations, root=SERVER)
    if comm.rank == SERVER:
        assert merged.max() < 2**24, "sums of float32 would not be exact"
        found = {
            "messages": int(counted[0]),
            "iterations_merged": int(counted[1]),
            "iterations_made": made,
            "exact": bool((merged == totals).all()),
            "sum": float(merged[0]),
            "seconds": round(time.monotonic() - began, 1),
        }
        print(json.dumps(found), flush=True)
    end.free()


main()
