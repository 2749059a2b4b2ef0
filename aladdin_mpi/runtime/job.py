"""A rank's start and end: MPI, roles, threads, kernels, the run's folder, its log, its link."""

from __future__ import annotations

import atexit
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from aladdin_mpi._version import __version__
from aladdin_mpi.algorithms.base import Algorithm
from aladdin_mpi.core import encoding, kernels
from aladdin_mpi.errors import AladdinError, RecordError
from aladdin_mpi.messages import Phase, Stop
from aladdin_mpi.record.hdf5 import RankFile
from aladdin_mpi.record.reading import next_part, rank_path
from aladdin_mpi.record.recorder import NullRecorder, Recorder
from aladdin_mpi.record.schema import EventKind
from aladdin_mpi.runtime.checkpoint import Writer
from aladdin_mpi.runtime.clock import StepClock
from aladdin_mpi.runtime.crash import guard
from aladdin_mpi.runtime.cuts import Plan, signals
from aladdin_mpi.runtime.progress import Progress, choose
from aladdin_mpi.runtime.relay import RelayLoop
from aladdin_mpi.runtime.restart import Restart, describe, find, locate
from aladdin_mpi.runtime.server import ServerLoop
from aladdin_mpi.runtime.servercuts import ServerCuts
from aladdin_mpi.runtime.sharded import Sharding
from aladdin_mpi.runtime.state import from_plain

__all__ = ["Job", "Settings", "connect", "connect_peers", "relay", "serve", "start"]


SLURM = (
    "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NTASKS",
    "SLURM_RESTART_COUNT", "SLURMD_NODENAME", "SLURM_PROCID", "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
)  # fmt: skip
"""What is kept of a scheduler's environment."""


@dataclass(frozen=True)
class Settings:
    """The options of ``init()`` that are not the algorithm's (documented there).

    ``description`` is the algorithm and its options as text, the same on all ranks.
    """

    out: Path | None = None
    seed: int = 0
    log: bool = True
    log_variance: int = 0
    on_nonfinite: str = "skip"
    progress: str = "auto"
    stall_s: float = 10.0
    threads: int | None = None
    config_text: str = ""
    samples_total: int = 0
    description: str = ""
    plan: Plan = field(default_factory=Plan)
    resume: str = ""
    sharding: Sharding = field(default_factory=Sharding)
    wire: str = "float32"
    merge_on_node: bool = False
    slow_worker: Mapping[int, float] = field(default_factory=dict)


class Job:
    """This rank of a job.

    Attributes
    ----------
    roles : comm.roles.Roles
    folder : Path
        The run's folder, the same on all ranks.
    recorder : Recorder or NullRecorder
    offset : tuple of float
        [s] what to add to this rank's clock to get rank 0's, and its uncertainty.
    progress : Progress
        What this rank shows.
    restart : Restart or None
        Where the run goes on from.
    """

    def __init__(self, comm: Any, roles: Any, folder: Path) -> None:
        self.comm, self.roles, self.folder = comm, roles, folder
        self.recorder: NullRecorder = NullRecorder()
        self.offset = (0.0, 0.0)
        self.progress = Progress("off", 0, "")
        self.restart: Restart | None = None

    def writer(self, keep: int) -> Writer:
        """What writes this rank's parts of checkpoints."""
        roles = self.roles

        def written(number: int, seconds: float) -> None:
            text = f"checkpoint {number}"
            self.recorder.event(EventKind.CHECKPOINT, roles.worker, seconds, text)

        members = roles.members
        servers = [members.index(rank) for rank in roles.servers]
        return Writer(
            self.folder, members.index(roles.rank), len(members), servers, keep, written, self.say
        )  # fmt: skip

    def say(self, text: str) -> None:
        """Show a line of this rank to the user."""
        print(f"{self.roles.who} {text}", file=sys.stderr, flush=True)

    def measure_end(self) -> None:
        """Measure the clock's offset again.  Collective."""
        from aladdin_mpi.comm import roles

        offset, error = roles.clock_offset(self.comm)
        self.recorder.set_end("clock_offset_s", offset)
        self.recorder.set_end("clock_error_s", error)

    def end(self, **values: int | float | str) -> None:
        """Log the totals; the file is closed when the process exits."""
        from aladdin_mpi.comm import roles as comm_roles

        for name, value in values.items():
            self.recorder.set_end(name, value)
        self.recorder.flush()
        atexit.register(comm_roles.leave_together, self.comm)
        atexit.register(self.recorder.close)  # an evaluation of the final model may still come
        self.progress.close()
        guard.disarm()


def start(settings: Settings, servers: int, algorithm: Algorithm) -> Job:
    """Initialize MPI and everything that a rank needs.  Collective over all ranks.

    ``servers`` ranks serve; 0 where the algorithm has none.
    """
    asked = 0
    if settings.resume:
        folder, asked = locate(settings.resume, settings.out)
        settings = replace(settings, out=folder)
    _limit_threads_early(settings)
    from aladdin_mpi.comm import roles as comm_roles

    guard.arm("", comm_roles.abort)
    comm = comm_roles.open_world(need=1 + servers)
    roles = comm_roles.find_roles(
        comm, servers, settings.sharding.placement == "spread", settings.merge_on_node,
        "synchronous" in algorithm.traits,
    )  # fmt: skip
    guard.arm(roles.who, comm_roles.abort, first=roles.worker <= 0)
    sys.setswitchinterval(1e-3)  # else a Python loop on another thread makes the poller late
    _limit_threads(settings, comm_roles.shared_cores(comm))
    comm_roles.one_per_node_first(comm, kernels.warm_up)
    if settings.wire != "float32":
        comm_roles.one_per_node_first(comm, encoding.warm_up)
    job = Job(comm, roles, _folder(comm, settings))
    job.offset = comm_roles.clock_offset(comm)
    if settings.resume:
        job.restart = find(
            comm, job.folder, asked, settings.resume != "auto",
            lambda size, then: _part_of(roles, size, then), algorithm.name, servers,
            len(roles.members), job.say,
        )  # fmt: skip
        if job.restart is not None and roles.rank == 0:
            job.say(describe(job.restart, job.folder, len(roles.workers), servers))
    part = comm.bcast(next_part(job.folder) if settings.resume and roles.rank == 0 else 0, 0)
    error: AladdinError | None = None
    try:
        job.recorder = _recorder(job, settings, comm_roles.library(), part)
    except AladdinError as problem:
        error = problem
    comm_roles.agree(comm, error)
    guard.before_failing(lambda: job.recorder.close(False))
    if job.restart is not None:
        number = job.restart.number
        job.recorder.event(EventKind.RESUME, roles.worker, number, f"from checkpoint {number}")
    return job


def _part_of(roles: Any, size: int, servers: list[int]) -> tuple[int, bool]:
    """Whose part of a checkpoint of ``size`` members this rank takes, and whether it is its own;
    a relay has none, and looks at a server's.
    """
    if roles.worker < 0:
        return servers[max(roles.server, 0)], True
    workers = [rank for rank in range(size) if rank not in servers]
    own = roles.worker < len(workers)
    return workers[roles.worker if own else 0], own


def _limit_threads_early(settings: Settings) -> None:
    """Libraries that are not loaded yet read these when they are."""
    if settings.threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
            os.environ[variable] = str(settings.threads)


def _limit_threads(settings: Settings, share: int) -> None:
    """Threads of torch: what the user says, else this rank's share of the cores."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(share)
        os.environ["OMP_NUM_THREADS"] = str(share)  # for loader processes


def _folder(comm: Any, settings: Settings) -> Path:
    """The run's folder, made by rank 0; an error is raised on every rank."""
    from aladdin_mpi.comm import roles

    folder, error = settings.out, None
    if comm.rank == 0:
        if folder is None:
            folder = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".writable"
            probe.touch()
            probe.unlink()
            if settings.config_text:
                (folder / "config.yaml").write_text(settings.config_text, encoding="utf-8")
        except OSError as problem:
            error = RecordError(
                f"--out {folder}: cannot be written ({problem.strerror}); name a folder that can"
            )
    roles.agree(comm, error)
    return Path(comm.bcast(folder, 0)).absolute()


def _recorder(job: Job, settings: Settings, library: str, part: int) -> NullRecorder:
    if not settings.log:
        return NullRecorder()
    roles = job.roles
    device = "cpu"
    if torch.cuda.is_available() and roles.worker >= 0:
        device = f"cuda:{roles.local_rank % torch.cuda.device_count()}"
    names = ("torch", "numpy", "numba", "h5py", "mpi4py")
    versions = {name: metadata.version(name) for name in names}
    versions |= {"python": platform.python_version(), "mpi": library, "aladdin_mpi": __version__}
    attributes = {
        "rank": roles.rank,
        "world_size": roles.size,
        "role": roles.role,
        "worker": roles.worker,
        "num_workers": len(roles.workers),
        "run": job.folder.name,
        "device": device,
        "config": settings.config_text,
        "versions": json.dumps(versions),
        "commit": _commit(),
        "clock_offset_s": job.offset[0],
        "clock_error_s": job.offset[1],
        "part": part,
        "job": json.dumps({name: os.environ[name] for name in SLURM if name in os.environ}),
    }
    return Recorder(RankFile(rank_path(job.folder, roles.rank, part), attributes))


def _commit() -> str:
    """The commit of the package, where it runs from a checkout."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty"],
            capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


def serve(job: Job, settings: Settings, algorithm: Algorithm, config: Any) -> bool:
    """A server's whole life, until all workers have ended; returns whether the run was preempted
    and is to be started again.
    """
    from aladdin_mpi.comm.receiver import ServerLink
    from aladdin_mpi.comm.roles import server_groups

    roles = job.roles
    servers = job.comm.Split(1, roles.rank)
    assert algorithm.server is not None
    make = algorithm.server
    workers = len(roles.workers)
    leads = roles.server == 0
    mode = choose(settings.progress) if leads else "off"
    progress = Progress(mode, settings.samples_total, roles.who, settings.sharding.advice)
    group = server_groups(job.comm, roles)[roles.server]
    link = ServerLink(job.comm.Dup(), group, roles.workers, roles.relays, roles.routes)
    restart = job.restart
    cuts = ServerCuts(
        settings.plan, job.writer(settings.plan.keep), "lockstep" in algorithm.traits,
        restart.number if restart else 0, workers, algorithm.name, settings.description, leads,
    )  # fmt: skip
    resumed = None if restart is None else _for_server(restart, workers)
    if resumed is not None:
        cuts.restore(resumed)
    loop = ServerLoop(
        link, workers, lambda spec: make(config, workers), job.recorder, progress,
        settings.on_nonfinite, settings.stall_s, cuts, resumed, len(roles.relays),
    )  # fmt: skip
    signals.call(loop.preempt)
    loop.serve()
    preempted = bool(servers.bcast(loop.preempted, 0))
    servers.Free()
    cuts.wait()
    job.measure_end()
    link.free()
    progress.close()
    models = loop.models
    job.end(
        samples=loop.samples, version=models[0].version if models else 0,
        pushes=sum(sum(model.last_merged) for model in models),
        reason="preempted" if preempted else "all workers have ended",
    )  # fmt: skip
    return preempted


def relay(job: Job, algorithm: Algorithm, config: Any) -> bool:
    """A relay's whole life, until all workers have ended; returns whether the run was preempted."""
    from aladdin_mpi.comm.relay import RelayLink
    from aladdin_mpi.comm.roles import server_groups

    roles = job.roles
    job.comm.Split(2, roles.rank).Free()
    groups = server_groups(job.comm, roles)
    link = RelayLink(
        job.comm.Dup(), roles.servers, groups, roles.workers, roles.relay, roles.routes
    )  # fmt: skip
    loop = RelayLoop(
        link, len(roles.workers), roles.routes.rounds, "server_applies" in algorithm.traits,
        "waits_for_answers" in algorithm.traits, getattr(config, "push", "") == "update",
        job.recorder,
    )  # fmt: skip
    signals.call(loop.preempt)
    loop.serve()
    job.measure_end()
    link.free()
    preempted = link.stop == Stop.PREEMPTED
    job.end(reason="preempted" if preempted else "all workers have ended")
    return preempted


def _for_server(restart: Restart, workers: int) -> dict[str, Any]:
    """The server's part; with another number of workers, the algorithm begins afresh."""
    state = dict(restart.state)
    if not restart.same:
        then = len(state["worker_samples"])
        share, rest = divmod(restart.seen, workers)
        state["worker_samples"] = [share + (i < rest) for i in range(workers)]
        state["made"] = [sum(state["made"]) // then] * workers
        state["channels"] = [
            {name: value for name, value in channel.items() if name != "rules"}
            for channel in state["channels"]
        ]
    state["channels"] = [from_plain(channel) for channel in state["channels"]]
    return state


def connect(job: Job, settings: Settings, evenly: bool) -> tuple[Any, StepClock]:
    """A worker's link, with its communication thread running, and its clock."""
    from aladdin_mpi.comm.roles import server_groups
    from aladdin_mpi.comm.sender import WorkerLink

    roles = job.roles
    among = job.comm.Split(0, roles.rank)
    groups = server_groups(job.comm, roles)
    relay = roles.routes.relay_of[roles.worker]
    link = WorkerLink(
        job.comm.Dup(), roles.servers, groups, roles.worker, len(roles.workers), guard.fail, among,
        roles.routes, roles.relays[relay] if relay >= 0 else -1,
    )  # fmt: skip
    if settings.log_variance:
        link.beside["spread"] = among.Dup()
    _watch(job, settings, link, {rank: f"the server (rank {rank})" for rank in roles.servers})
    return link, StepClock(link, len(roles.workers), evenly)


def connect_peers(job: Job, settings: Settings, evenly: bool) -> tuple[Any, StepClock]:
    """The same where there is no server; worker 0 shows the progress."""
    from aladdin_mpi.comm.peers import PeerLink

    link = PeerLink(job.comm.Dup(), guard.fail)
    link.beside["cuts"] = job.comm.Dup()
    if settings.log_variance:
        link.beside["spread"] = job.comm.Dup()
    clock = StepClock(link, job.roles.size, evenly)
    if job.roles.worker == 0:
        _watch(job, settings, link, {other: f"worker {other}" for other in link.others})
        job.progress = Progress(choose(settings.progress), settings.samples_total, job.roles.who)

        def show() -> None:
            if not math.isnan(clock.loss):
                job.progress.loss(clock.loss)
            job.progress.update(clock.seen_samples(), math.nan, link.notice.active)

        job.recorder.every(show)
    return link, clock


def _watch(job: Job, settings: Settings, link: Any, names: dict[int, str]) -> None:
    """Name those that are silent (housekeeping thread: it waits for nobody)."""
    stalled: dict[int, float] = {}

    def watch() -> None:
        now = time.monotonic()
        for rank, name in names.items():
            late = now - link.heard_s[rank]
            if late >= settings.stall_s and rank not in stalled and link.phase is not Phase.START:
                stalled[rank] = now - late
                text = f"{name} has said nothing for {late:.0f} s"
                job.recorder.event(EventKind.STALL, -1, late, text)
                job.say(f"{text}; this worker is in phase '{link.phase.name.lower()}'")
            elif late < settings.stall_s and rank in stalled:
                took = now - stalled.pop(rank)
                job.recorder.event(EventKind.STALL_END, -1, took, f"{name} goes on")
                job.say(f"{name} goes on after {took:.0f} s")

    job.recorder.every(watch)
