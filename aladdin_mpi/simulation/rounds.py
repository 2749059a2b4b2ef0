"""The algorithms in rounds, by recurrences over iterations: BSP, AR-SGD on a ring, and SGP.

BSP.  All begin a round together, worker i pushes after C_i, or after (1 − f) C_i where a share f
of its computing gives gradients that travel already.  The server has the last one at E (transfers
share its link, see :class:`~aladdin_mpi.simulation.links.SharedLink`), merges n pushes and steps in
n + 1 passes of m, and sends n replies of b bytes at once, which all arrive together::

    T_k = T_{k−1} + max(max_i C_i, E) + (n + 1) m + b max(n/C, S/c) + latencies

AR-SGD.  A ring of n workers reduces P bytes in 2(n − 1) rounds of P/n bytes each, which take
A = 2(n − 1)/n · P/c + 2(n − 1) L.  Worker i begins iteration k when all have ended the last, at
T_{k−1}, and computes C_{i,k} long.  With a share f of it in which gradients travel already, and a
last range of p ≤ P bytes that is known only at the end::

    T_k = max( T_{k−1} + max_i (1 − f) C_{i,k} + A,   T_{k−1} + max_i C_{i,k} + A(p) )

SGP (one iteration of overlap).  Worker i ends computing iteration k at E_{i,k} = T_{i,k−1} +
C_{i,k}, and then sends P bytes to i + 2^(k mod ⌈log₂ n⌉); its link carries one message after the
other, and a third one waits in its worker.  It goes on when it has what was sent to it at k − 1::

    T_{i,k} = max( E_{i,k}, free buffer, arrival of message k − 1 )

P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, J.
Parallel Distrib. Comput. 69(2), 2009.  Assran et al., ICML 2019.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from aladdin_mpi.simulation.outcome import Outcome
from aladdin_mpi.simulation.setting import FRAMING_BYTES, ComputeTimes, Setting

__all__ = [
    "RANGE_BYTES",
    "after_computing_s",
    "allreduce_s",
    "last_end",
    "simulate_arsgd",
    "simulate_bsp",
    "simulate_sgp",
]

RANGE_BYTES = 4 << 20
"""[B] of a range of gradients that is reduced at once."""


def allreduce_s(setting: Setting, nbytes: float) -> float:
    """[s] of an all-reduce on a ring."""
    n = setting.num_workers
    rounds = 2 * (n - 1)
    return rounds * (nbytes / n / setting.worker_bytes_per_s + setting.latency_s)


def after_computing_s(setting: Setting, longest_s: float) -> float:
    """[s] from the end of the slowest worker's computing, ``longest_s``, to that of the all-reduce
    of gradients.
    """
    whole = allreduce_s(setting, setting.payload_bytes)
    if not setting.overlap:
        return whole
    last = allreduce_s(setting, min(RANGE_BYTES, setting.payload_bytes))
    return max(whole - setting.overlap * longest_s, last)


def simulate_arsgd(setting: Setting) -> Outcome:
    """AR-SGD."""
    times = ComputeTimes(setting).blocks(setting.num_iterations)
    steps = [longest + after_computing_s(setting, longest) for longest in times.max(axis=1)]
    ends = np.cumsum(steps)
    n = setting.num_workers
    sent = 2 * (n - 1) / n * setting.payload_bytes
    return _outcome("arsgd", setting, np.repeat(ends[:, None], n, axis=1), times, sent)


def last_end(begins_s: list[float], nbytes: float, bytes_per_s: float, each: float) -> float:
    """[s] when the last of some transfers of ``nbytes`` ends that share a link.

    ``begins_s`` is sorted; the link and each transfer have the rates of a
    :class:`~aladdin_mpi.simulation.links.SharedLink`.
    """
    moved = now = 0.0
    ended, count = 0, len(begins_s)
    ends: list[float] = []  # when `moved` is this, the transfer ends
    for begin in begins_s:
        while ended < len(ends):
            speed = min(bytes_per_s / (len(ends) - ended), each)
            at = now + (ends[ended] - moved) / speed
            if at > begin:
                moved += (begin - now) * speed
                break
            moved, now = ends[ended], at
            ended += 1
        now = begin
        ends.append(moved + nbytes)
    while ended < count:
        now += (ends[ended] - moved) / min(bytes_per_s / (count - ended), each)
        moved = ends[ended]
        ended += 1
    return now


def simulate_bsp(setting: Setting) -> Outcome:
    """BSP over servers."""
    n, servers = setting.num_workers, setting.servers
    each = setting.worker_bytes_per_s / servers
    times = ComputeTimes(setting).blocks(setting.num_iterations)
    begins = np.sort((1 - setting.overlap) * times, axis=1)
    after = (n + 1) * setting.merge_s + setting.reply_latency_s
    after += setting.reply_bytes * max(n / setting.bytes_per_s, 1 / each)
    to = setting.latency_s + setting.overhead_s / 2
    pushed = [
        last_end(row, setting.push_bytes, setting.bytes_per_s, each) for row in begins.tolist()
    ]
    steps = np.maximum(times.max(axis=1), np.array(pushed) + to) + after
    ends = np.repeat(np.cumsum(steps)[:, None], n, axis=1)
    found = _outcome("bsp", setting, ends, times, 0.0)
    link = n * setting.push_bytes / (found.step_s * setting.bytes_per_s)
    return replace(
        found, servers=servers, link_in=link, link_out=link, iterations_per_push=1.0,
        staleness=(n - 1) / 2, staleness_95=float(math.ceil(0.95 * n) - 1),
        overload=setting.overload,
    )  # fmt: skip


def simulate_sgp(setting: Setting) -> Outcome:
    """SGP with one iteration of overlap."""
    n = setting.num_workers
    times = ComputeTimes(setting).blocks(setting.num_iterations)
    if n == 1:
        return _outcome("sgp", setting, np.cumsum(times, axis=0), times, 0.0)
    distances = [2**k for k in range((n - 1).bit_length())]
    nbytes = setting.payload_bytes + FRAMING_BYTES
    transfer = nbytes / setting.worker_bytes_per_s
    ended = np.zeros(n)
    left = [np.zeros(n), np.zeros(n)]  # when the message before last, and the last, has left
    inward = np.zeros(n)  # when a worker's link in is free
    arrival = np.zeros(n)  # of the message of the iteration before
    ends = np.empty_like(times)
    for k in range(setting.num_iterations):
        computed = ended + times[k]
        handed = np.maximum(computed, left[0])  # two buffers
        begun = np.maximum(handed, left[1])
        to = (np.arange(n) + distances[k % len(distances)]) % n
        begun = np.maximum(begun, inward[to])
        left = [left[1], begun + transfer]
        inward[to] = left[1]
        ended = np.maximum(handed, arrival)
        arrival = np.empty(n)
        arrival[to] = left[1] + setting.latency_s + setting.overhead_s
        ends[k] = ended
    return _outcome("sgp", setting, ends, times, nbytes)


def _outcome(
    name: str, setting: Setting, ends: np.ndarray, times: np.ndarray, sent_bytes: float
) -> Outcome:
    """Figures from when each iteration of each worker ends, shape (iterations, workers) [s]."""
    n, first = setting.num_workers, setting.num_iterations // 4
    begin = ends[first - 1] if first else np.zeros(n)
    took = ends[-1] - begin
    made = setting.num_iterations - first
    rate = float(np.sum(made / took))
    link = float(np.mean(made * sent_bytes / took)) / setting.worker_bytes_per_s
    return Outcome(
        name, n, 0, step_s=n / rate, steps_per_s=rate, speedup=rate * setting.compute_s,
        efficiency=rate * setting.compute_s / n,
        blocked=1 - float(times[first:].sum() / took.sum()), link_in=link, link_out=link,
        overload=math.nan,
    )  # fmt: skip
