"""One training job on virtual hosts, disturbed in several ways one after the other, and its logs.

All virtual hosts have the machine's clock, so rows of all ranks and the times at which something
was done to a rank can be compared without corrections.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import launching
import numpy as np
from virtual_hosts import VirtualHosts

from aladdin_mpi.record.reading import open_rank_file, rank_path

__all__ = ["SCENARIOS", "SERVER", "Job", "Logs", "Window", "disturbed_run", "plain_run"]

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
SERVER = -1
START_LIMIT_S, END_LIMIT_S = 80.0, 60.0


@dataclass(frozen=True)
class Window:
    """What was done to whom, and when.

    Attributes
    ----------
    name : str
    victim : int
        A worker, or -1 for the server.
    begin, end : float
        [s] monotonic clock.
    """

    name: str
    victim: int
    begin: float
    end: float

    def before(self, seconds: float) -> Window:
        """The time just before it."""
        return Window(self.name, self.victim, self.begin - seconds, self.begin)

    def after(self, seconds: float, margin_s: float = 1.0) -> Window:
        """The time after it, once what it has held up has gone through."""
        return Window(self.name, self.victim, self.end + margin_s, self.end + margin_s + seconds)


class Job:
    """A training job under way, a rank on each host: the first ``serving`` serve."""

    def __init__(
        self, hosts: VirtualHosts, folder: Path, started: launching.Started, serving: int = 1
    ) -> None:
        self.hosts, self.folder, self.control = hosts, folder, folder / "control"
        self.workers = range(len(hosts.names) - serving)
        self._serving = serving
        self._started = started

    def await_training(self) -> None:
        """Wait until every worker trains."""
        self._await(
            lambda: all((self.control / f"ready-{w}").exists() for w in self.workers),
            START_LIMIT_S, "training has not begun",
        )  # fmt: skip

    def end(self) -> None:
        """Have the workers end, and wait for it."""
        (self.control / "end").touch()
        self._await(
            lambda: self._started.process.poll() is not None, END_LIMIT_S, "the job has not ended"
        )
        if self._started.process.returncode:
            raise AssertionError(self._report(f"exit status {self._started.process.returncode}"))

    def _await(self, done: Callable[[], bool], limit_s: float, otherwise: str) -> None:
        end = time.monotonic() + limit_s
        while not done():
            if self._started.process.poll() not in (None, 0):
                otherwise, end = "the job has failed", 0.0
            if time.monotonic() > end:
                raise AssertionError(self._report(otherwise))
            time.sleep(0.05)

    def _report(self, what: str) -> str:
        text = (self.folder / "output.txt").read_text(errors="replace")
        return f"{what}\n--- output\n{text}"

    def pid(self, worker: int) -> int:
        """The process of a worker, or of the last server (-1)."""
        with open_rank_file(rank_path(self.folder / "run", worker + self._serving)) as file:
            return int(file.attrs["pid"])

    @contextlib.contextmanager
    def stopped(self, worker: int) -> Iterator[None]:
        """Inside, the process stands still."""
        pid = self.pid(worker)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def slowed(self, worker: int, factor: float = 10.0) -> Iterator[None]:
        """Inside, the worker computes slower."""
        path = self.control / f"slow-{worker}"
        draft = path.with_suffix(".new")
        draft.write_text(str(factor))
        draft.rename(path)
        try:
            yield
        finally:
            path.unlink()

    @contextlib.contextmanager
    def thin_link(self, worker: int, rate: str, usual: str) -> Iterator[None]:
        """Inside, the worker's link has another rate."""
        host = [self.hosts.names[worker + self._serving]]
        self.hosts.set_rate(rate, host)
        try:
            yield
        finally:
            self.hosts.set_rate(usual, host)


@dataclass(frozen=True)
class Scenario:
    """A disturbance: its name, its victim (-1: the server), and how it is made."""

    name: str
    victim: int
    make: Callable[[Job, str], contextlib.AbstractContextManager[None]]


SCENARIOS = (
    Scenario("server stopped", SERVER, lambda job, rate: job.stopped(SERVER)),
    Scenario("worker stopped", 0, lambda job, rate: job.stopped(0)),
    Scenario("worker 10 times slower", 1, lambda job, rate: job.slowed(1)),
    Scenario("worker on 10 Mb/s", 2, lambda job, rate: job.thin_link(2, "10mbit", rate)),
)


@contextlib.contextmanager
def training(
    hosts: VirtualHosts, folder: Path, log: IO[str], parameters: int, compute_ms: float,
    options: Sequence[str] = (),
) -> Iterator[Job]:  # fmt: skip
    """Start training on the hosts; inside, every worker trains."""
    argv = [sys.executable, SCRIPT, "--out", folder / "run", "--control", folder / "control"]
    argv += ["--parameters", str(parameters), "--compute-ms", str(compute_ms), *options]
    with hosts.start_mpi(argv, log=log) as started:
        job = Job(hosts, folder, started)
        job.await_training()
        yield job


def disturbed_run(
    folder: Path, *, workers: int = 3, rate: str = "200mbit", parameters: int = 250_000,
    compute_ms: float = 100.0, seconds: float = 5.0, quiet_s: float = 3.0,
    only: Sequence[str] = (), options: Sequence[str] = (),
) -> list[Window]:  # fmt: skip
    """Train while one thing after the other is done to a rank; everything has ended after it.

    Parameters
    ----------
    folder : Path
        For the run and its files.
    workers, rate, parameters, compute_ms
        Of the job; the first three workers may become victims.
    seconds, quiet_s : float
        [s] how long each disturbance lasts, and how long the time before and after it is that may
        be compared with it.
    only : sequence of str
        Names of scenarios; by default all.
    options : sequence of str
        More options of the training script.
    """
    windows = []
    (folder / "control").mkdir(parents=True)
    with VirtualHosts(workers + 1, rate) as hosts, open(folder / "output.txt", "w") as log:
        with training(hosts, folder, log, parameters, compute_ms, options) as job:
            time.sleep(quiet_s + 1)
            for scenario in SCENARIOS:
                if only and scenario.name not in only:
                    continue
                with scenario.make(job, rate):
                    begin = time.monotonic()
                    time.sleep(seconds)
                    end = time.monotonic()
                windows.append(Window(scenario.name, scenario.victim, begin, end))
                time.sleep(quiet_s + 1)
            job.end()
    return windows


def plain_run(
    folder: Path, *, workers: int, rate: str, parameters: int, compute_ms: float, seconds: float
) -> Window:
    """Train undisturbed; returns the time that counts."""
    (folder / "control").mkdir(parents=True)
    with VirtualHosts(workers + 1, rate) as hosts, open(folder / "output.txt", "w") as log:
        with training(hosts, folder, log, parameters, compute_ms) as job:
            time.sleep(2)
            begin = time.monotonic()
            time.sleep(seconds)
            window = Window("undisturbed", SERVER, begin, time.monotonic())
            job.end()
    return window


class Logs:
    """What the ranks of a run have logged."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.workers = range(workers)
        self._control = folder / "control"
        self.steps = [self._table(folder, worker, "steps") for worker in self.workers]
        self.sends = [self._table(folder, worker, "sends") for worker in self.workers]
        self.mixes = [self._table(folder, worker, "mixes") for worker in self.workers]
        self.arrivals = self._table(folder, SERVER, "arrivals")
        self.polls = self._table(folder, SERVER, "polls")

    @staticmethod
    def _table(folder: Path, worker: int, name: str) -> np.ndarray:
        with open_rank_file(rank_path(folder / "run", worker + 1)) as file:
            return file[name][:]

    def others(self, window: Window) -> list[int]:
        """The workers to whom nothing was done."""
        return [worker for worker in self.workers if worker != window.victim]

    def steps_in(self, worker: int, window: Window) -> np.ndarray:
        """A worker's steps that were under way in a window."""
        rows = self.steps[worker]
        ends = rows["start_s"] + rows["step_s"]
        return rows[(ends > window.begin) & (rows["start_s"] < window.end)]

    def merges_in(self, worker: int, begin: float, end: float) -> int:
        """Pushes of a worker that were merged between two moments."""
        rows = self.arrivals[self.arrivals["worker"] == worker]
        return int(((rows["time_s"] >= begin) & (rows["time_s"] < end)).sum())

    def merges_per_s(self, window: Window) -> float:
        """Merges of the other workers' pushes, [1/s]."""
        count = sum(self.merges_in(w, window.begin, window.end) for w in self.others(window))
        return count / (window.end - window.begin)

    def server_gap_s(self, window: Window) -> float:
        """[s] the longest time for which the server did not poll, with a second around the window.

        It never waits: unless it was stopped itself, this is how long the machine stood still.
        """
        rows = self.polls
        near = (rows["time_s"] > window.begin) & (rows["time_s"] < window.end + 1)
        return float(rows["longest_gap_s"][near].max())

    def bytes_per_s(self, window: Window) -> float:
        """What came in at the server from all workers, [B/s]."""
        count = sum(self.merges_in(w, window.begin, window.end) for w in self.workers)
        return count * int(self.sends[0]["bytes"][0]) / (window.end - window.begin)

    def expected(self) -> np.ndarray:
        """The right global model: the start, and the mean of what the workers have added."""
        added = sum(np.load(self._control / f"added-{worker}.npy") for worker in self.workers)
        return np.load(self._control / "start.npy").astype(np.int64) + added // len(self.workers)

    def final(self, worker: int) -> np.ndarray:
        """The global model as a worker has received it at the end."""
        return np.load(self._control / f"final-{worker}.npy")
