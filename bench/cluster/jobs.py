"""One training job on virtual hosts, in phases with links and workers of different speed.

A job starts once; then the driver changes the links' rate or slows a worker, waits until that has
settled, and takes the time of steps from the logs for a while.  All hosts have the machine's clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from disturbances import Job
from virtual_hosts import VirtualHosts

from aladdin_mpi.record.reading import open_rank_file, rank_path

__all__ = ["Phase", "Seen", "Setting", "run"]

WORKER = Path(__file__).with_name("worker.py")
SETTLE_S = 3.0
ENVIRONMENT = {"HOROVOD_CYCLE_TIME": "5"}
"""Horovod's threads look for gradients every 5 ms, in place of 1: 8 ranks share two cores."""


@dataclass(frozen=True)
class Setting:
    """A job.

    Attributes
    ----------
    options : dict
        Those of ``init()``, with the algorithm.
    serving : int
        Ranks that serve, each on a host of its own, as every worker is.
    megabytes, compute_ms : float
        Size of the parameters and computing of a step.
    """

    options: dict[str, Any]
    serving: int
    workers: int
    megabytes: float
    compute_ms: float


@dataclass(frozen=True)
class Phase:
    """A part of a job.

    Attributes
    ----------
    ratio : float
        payload / (rate of a link × computing): how long one push takes, in steps.
    slow : float
        How many times slower the last worker computes.
    seconds : float
        How long it is measured.
    """

    ratio: float
    slow: float = 1.0
    seconds: float = 10.0
    settle_s: float = SETTLE_S


class Seen(NamedTuple):
    """What a phase showed: sums over workers [1/s]; of all workers but a slow one the median and
    90th percentile of steps and the mean of their parts [ms]; means.  MB/s and the share of its
    rate on the busiest host's link, each way; the share of the cores' time that was idle.
    """

    steps_per_s: float
    step_ms: float
    step_p90_ms: float
    compute_ms: float
    blocked_ms: float
    push_ms: float
    mix_ms: float
    send_ms: float
    coalesced: float
    staleness: float
    in_share: float
    out_share: float
    idle: float


@dataclass
class _Window:
    phase: Phase
    begin: float = 0.0
    end: float = 0.0
    counters: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)


def run(setting: Setting, phases: Sequence[Phase], folder: Path) -> list[Seen]:
    """Make the job; its log is ``folder/run``."""
    control = folder / "control"
    control.mkdir(parents=True)
    argv = [sys.executable, WORKER, folder / "run", control, str(setting.megabytes)]
    argv += [str(setting.compute_ms), json.dumps(setting.options)]
    windows = [_Window(phase) for phase in phases]
    hosts = VirtualHosts(setting.workers + setting.serving, _rate(setting, phases[0]))
    with hosts, open(folder / "output.txt", "w") as log:
        with hosts.start_mpi(argv, log=log, env=ENVIRONMENT) as started:
            job = Job(hosts, folder, started, setting.serving)
            try:
                job.await_training()
                rate = _rate(setting, phases[0])
                for window in windows:
                    rate = _measure(job, setting, window, rate)
                hosts.set_rate(None)
                job.end()
            except AssertionError:
                _say_where(job, setting)
                raise
    seen = [_look(setting, folder / "run", window) for window in windows]
    return seen


def _say_where(job: Job, setting: Setting) -> None:
    """Have every rank write where its threads are, to the job's output."""
    for worker in range(-setting.serving, setting.workers):
        with contextlib.suppress(OSError):
            os.kill(job.pid(worker), signal.SIGUSR2)
    time.sleep(1.0)


def _rate(setting: Setting, phase: Phase) -> str:
    """``tc``'s word for the rate of a phase's links."""
    bits = 8e6 * setting.megabytes / (phase.ratio * setting.compute_ms / 1e3)
    return f"{round(bits / 1e3)}kbit"


def _measure(job: Job, setting: Setting, window: _Window, before: str) -> str:
    """Returns the rate of the links, which was another one before."""
    phase = window.phase
    rate = _rate(setting, phase)
    if rate != before:
        job.hosts.set_rate(rate)
    with job.slowed(setting.workers - 1, phase.slow):
        time.sleep(phase.settle_s)
        window.begin = time.monotonic()
        window.counters.append(_counters(job.hosts))
        time.sleep(phase.seconds)
        window.counters.append(_counters(job.hosts))
        window.end = time.monotonic()
    return rate


def _counters(hosts: VirtualHosts) -> tuple[np.ndarray, np.ndarray]:
    """Idle and all time of the cores; bytes received and sent by every host, and when."""
    with open("/proc/stat", encoding="ascii") as file:
        times = [float(word) for word in file.readline().split()[1:9]]
    carried = [(*hosts.link_bytes(host), time.monotonic()) for host in hosts.names]
    return np.array([times[3] + times[4], sum(times)]), np.array(carried)


def _look(setting: Setting, run_folder: Path, window: _Window) -> Seen:
    steps, sends = [], []
    for rank in range(setting.serving, setting.serving + setting.workers):
        with open_rank_file(rank_path(run_folder, rank)) as file:
            steps.append(file["steps"][:])
            sends.append(file["sends"][:])
    per_s = sum(_steps_per_s(rows, window) for rows in steps)
    usual = setting.workers - (window.phase.slow != 1 and setting.workers > 1)
    rows = np.concatenate([_inside(rows, window) for rows in steps[:usual]])
    pushes = np.concatenate([s[_between(s["queued_s"], window)] for s in sends[:usual]])
    cores, links = (b - a for a, b in zip(*window.counters, strict=True))
    rate = 1e6 * setting.megabytes / (window.phase.ratio * setting.compute_ms / 1e3)
    shares = links[:, :2] / links[:, 2:] / rate

    def mean_ms(column: str) -> float:
        return 1e3 * float(np.nanmean(rows[column]))

    known = pushes["staleness"][pushes["staleness"] >= 0]
    return Seen(
        per_s, 1e3 * float(np.median(rows["step_s"])),
        1e3 * float(np.percentile(rows["step_s"], 90)), mean_ms("compute_s"), mean_ms("blocked_s"),
        mean_ms("push_s"), mean_ms("mix_s"),
        1e3 * float(np.median(pushes["put_s"])) if len(pushes) else float("nan"),
        float(rows["coalesced"].mean()), float(known.mean()) if len(known) else float("nan"),
        float(shares[:, 0].max()), float(shares[:, 1].max()), float(cores[0] / cores[1]),
    )  # fmt: skip


def _between(times: np.ndarray, window: _Window) -> np.ndarray:
    return (times >= window.begin) & (times < window.end)


def _inside(rows: np.ndarray, window: _Window) -> np.ndarray:
    """The steps that ended in the window; where none did, those that were under way."""
    ends = rows["start_s"] + rows["step_s"]
    found = rows[_between(ends, window)]
    return found if len(found) else rows[(ends > window.begin) & (rows["start_s"] < window.end)]


def _steps_per_s(rows: np.ndarray, window: _Window) -> float:
    """A worker's in the window; a step that is partly outside counts by its share inside."""
    starts, took = rows["start_s"], rows["step_s"].astype(np.float64)
    inside = np.minimum(starts + took, window.end) - np.maximum(starts, window.begin)
    return float((np.clip(inside, 0.0, None) / took).sum()) / (window.end - window.begin)
