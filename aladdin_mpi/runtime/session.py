"""The public API: what a training script calls."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch.utils.data import DataLoader

from aladdin_mpi.algorithms import find
from aladdin_mpi.algorithms.base import Topology, flag
from aladdin_mpi.errors import AladdinError, ConfigError
from aladdin_mpi.messages import Phase, RequestKind, Stop
from aladdin_mpi.record.schema import EventKind
from aladdin_mpi.runtime import crash
from aladdin_mpi.runtime.cuts import PREEMPTED, PeerCuts, WorkerCuts, ask_to_stop, signals
from aladdin_mpi.runtime.job import Settings, connect, connect_peers, relay, serve, start
from aladdin_mpi.runtime.loader import PartitionedLoader
from aladdin_mpi.runtime.opening import Session, open_driver
from aladdin_mpi.runtime.optimizer import distribute
from aladdin_mpi.runtime.options import (
    check_merging,
    check_plan,
    check_sharding,
    check_slow,
    check_wire,
    configure,
)
from aladdin_mpi.runtime.restart import restore_counters, restore_loader
from aladdin_mpi.runtime.sharded import per_optimizer

__all__ = [
    "DistributedOptimizer",
    "GlobalInfo",
    "agree",
    "device",
    "finish",
    "global_parameters",
    "init",
    "iteration",
    "local_rank",
    "log",
    "log_evaluation",
    "partition",
    "rank",
    "run_folder",
    "samples",
    "should_stop",
    "size",
    "split",
    "stop",
    "world_rank",
]


class GlobalInfo(NamedTuple):
    """What :func:`global_parameters` tells: merges contained, and [s] waited for the parameters."""

    version: int
    fetch_s: float


_session: Session | None = None


def _current() -> Session:
    """The session, also after it has ended."""
    if _session is None:
        raise ConfigError("aladdin_mpi.init() has not been called")
    return _session


def _running() -> Session:
    session = _current()
    if session.ended:
        raise ConfigError("aladdin_mpi.finish() has ended the run")
    return session


def init(
    algorithm: str = "aladdin",
    *,
    out: str | os.PathLike[str] | None = None,
    seed: int = 0,
    log: bool = True,
    log_variance: int = 0,
    on_nonfinite: str = "skip",
    progress: str = "auto",
    stall_s: float = 10.0,
    threads: int | None = None,
    config_text: str = "",
    samples_total: int = 0,
    slow_worker: Mapping[int, float] | None = None,
    checkpoint_epochs: float = 0.0,
    checkpoint_iterations: int = 0,
    checkpoint_minutes: float = 0.0,
    checkpoint_keep: int = 2,
    time_limit: float = 0.0,
    resume: str | os.PathLike[str] = "",
    servers: int = 1,
    max_shard_bytes: int = 0,
    shard_by: str = "memory",
    server_placement: str = "first",
    wire: str = "float32",
    merge_on_node: bool = False,
    **options: Any,
) -> None:
    """Start: MPI, roles, threads, the run's folder.  Collective over all ranks.

    On a server's rank it serves until training is over and then leaves the process: the
    script's code after it runs on workers only.  Algorithms of the other topologies have no server:
    all ranks are workers.

    Parameters
    ----------
    algorithm : str
        A name of the registry (``aladdin-mpi algorithms``), or ``package.module:ALGORITHM``.
    out : path, optional
        The run's folder, by default ``runs/<date>-<time>``.
    seed : int
        Orders the data, on all workers alike.
    log : bool
        Write the timing logs.
    log_variance : int
        Iterations between two measurements of how far the workers' parameters (those of the first
        optimizer) are apart; 0: none.
    on_nonfinite : {'skip', 'stop'}
        What to do with a NaN or an infinity.
    progress : {'auto', 'bar', 'lines', 'off'}
    stall_s : float
        [s] after which a silent rank is named.
    threads : int, optional
        Threads per rank; by default its share of the cores, unless ``OMP_NUM_THREADS`` is set.
    config_text : str
        Kept in the logs and the run's folder (YAML); by default the algorithm and its options.
    samples_total : int
        Samples of the whole run, for the progress bar.
    slow_worker : mapping of int to float, optional
        By worker: how many times longer its computing takes.  The missing time is slept, before
        ``step()``, and marked in the log.
    checkpoint_epochs, checkpoint_iterations, checkpoint_minutes : float
        Make a checkpoint every so often; 0: not for that reason.  One is made in any case before a
        run stops because of SIGUSR1, SIGTERM or ``time_limit``.
    checkpoint_keep : int
        Complete ones that are kept.
    time_limit : float
        [min] after which the run makes a checkpoint and stops; 0: never.  :func:`finish` then ends
        the process with exit code 75.
    resume : str or path
        Go on from a checkpoint: a run's folder, one of its checkpoints, or ``"auto"``, the last one
        in ``out`` if there is one.
    servers : int
        Ranks that serve, each a part of the parameters; 1 unless the algorithm has none.
    max_shard_bytes : int
        [bytes] of the ranges that the parameters are cut into, at most; 0: one range per server.
    shard_by : {'memory', 'layer'}
        Equal ranges, or whole layers.
    server_placement : {'first', 'spread'}
        The first ranks serve, or the first one of each of some nodes, at equal distances.
    wire : str
        How pushes travel: ``"float32"``, ``"bfloat16"``, ``"float16"``, and the largest elements of
        updates, ``"topk:FRACTION"``, or of gradients, ``"dgc:FRACTION[:ITERATIONS]"``.
    merge_on_node : bool
        On every node with room for it, one rank merges what the workers there push.
    **options
        The algorithm's options, such as ``period=4``.

    Raises
    ------
    ConfigError, LaunchError
    """
    global _session
    # parent_process() tells only after the script was imported
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(
            "aladdin-mpi: error: aladdin_mpi.init() was called in a DataLoader worker process, "
            "which imports the script again: put its code under if __name__ == '__main__':"
        )
    crash.guard.install()
    if _session is not None:
        raise ConfigError("aladdin_mpi.init() may be called once in a process")
    chosen = find(algorithm)
    config = configure(algorithm, options)
    for name, value, allowed in (
        ("on_nonfinite", on_nonfinite, ("skip", "stop")),
        ("progress", progress, ("auto", "bar", "lines", "off")),
        ("shard_by", shard_by, ("memory", "layer")),
        ("server_placement", server_placement, ("first", "spread")),
    ):
        if value not in allowed:
            raise ConfigError(f"{flag(name)} {value}: choose from {', '.join(allowed)}")
    settings = Settings(
        out=None if out is None else Path(out), seed=seed, log=log,
        log_variance=log_variance if log else 0, on_nonfinite=on_nonfinite, progress=progress,
        stall_s=stall_s, threads=threads,
        config_text=config_text or _as_yaml(algorithm, seed, slow_worker, config),
        samples_total=samples_total, description=f"{algorithm} {config}",
        slow_worker=check_slow(slow_worker or {}), resume=os.fspath(resume),
        plan=check_plan(
            checkpoint_epochs, checkpoint_iterations, checkpoint_minutes, checkpoint_keep,
            time_limit,
        ),
        sharding=check_sharding(chosen, servers, max_shard_bytes, shard_by, server_placement),
        wire=check_wire(chosen, config, wire),
        merge_on_node=check_merging(chosen, config, wire, merge_on_node),
    )  # fmt: skip
    served = chosen.topology is Topology.SERVER
    signals.watch()
    job = start(settings, servers if served else 0, chosen)
    for index in settings.slow_worker:
        if index >= len(job.roles.workers):
            error = ConfigError(
                f"--slow-worker {index}: there are {len(job.roles.workers)} workers, 0 to "
                f"{len(job.roles.workers) - 1}"
            )
            error.silent = job.roles.rank > 0
            raise error
    if job.roles.relay >= 0:
        sys.exit(PREEMPTED if relay(job, chosen, config) else 0)
    if job.roles.worker < 0:
        sys.exit(PREEMPTED if serve(job, settings, chosen, config) else 0)
    link, clock = (connect if served else connect_peers)(job, settings, "lockstep" in chosen.traits)
    _session = session = Session(job, chosen, config, settings, link, clock)
    writer = job.writer(settings.plan.keep)
    session.cuts = WorkerCuts(session, writer, settings.plan)
    if job.restart is not None:
        restore_counters(job.restart, clock, link, len(job.roles.workers))
        session.cuts.done = job.restart.number
    if not served:
        first = job.restart.number if job.restart else 0
        session.calls = PeerCuts(
            session.cuts, link, clock, settings.plan, chosen, first, writer
        )  # fmt: skip
    signals.call(partial(ask_to_stop, link))


def _as_yaml(
    algorithm: str, seed: int, slow_worker: Mapping[int, float] | None, config: Any
) -> str:
    """What is known of the configuration of a script's run."""
    values = {
        "algorithm": algorithm, "algorithm_options": asdict(config), "seed": seed,
        "slow_worker": dict(slow_worker or {}),
    }  # fmt: skip
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text


def rank() -> int:
    """This worker's index, 0 … size()−1."""
    return _current().rank


def size() -> int:
    """Workers of the run."""
    return _current().size


def world_rank() -> int:
    """MPI's rank of this process."""
    return _current().job.roles.rank


def local_rank() -> int:
    """Index of this worker among the workers of its node."""
    return _current().job.roles.local_rank


def device() -> torch.device:
    """This worker's device: local rank modulo the GPUs visible to it, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def run_folder() -> Path:
    """Where the run's logs and results go."""
    return _current().job.folder


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None = None,
    *,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    backward_passes_per_step: int = 1,
) -> torch.optim.Optimizer:
    """Make an optimizer distributed, in place.  Collective over all workers.

    All workers start from worker 0's parameters and buffers.  One call of ``step()`` is one
    iteration: gradient accumulation and clipping act before it.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any that needs no closure.
    model : torch.nn.Module
        Whose parameters the optimizer holds; its buffers (batch-norm statistics) reach the global
        model.
    named_parameters : iterable of (str, Parameter), optional
        In place of ``model``; then no buffers travel.
    backward_passes_per_step : int
        How many precede a step.  Only for speed: gradients that leave during the backward pass
        (``arsgd``, and where gradients are pushed) are sent once more where this is wrong; Horovod
        needs it to be right.

    Returns
    -------
    torch.optim.Optimizer
        The same object.

    Raises
    ------
    ModelError
        Also on a difference between the workers' models, which it names.
    """
    session = _running()
    driver = open_driver(session, optimizer, model, named_parameters, backward_passes_per_step)
    distribute(optimizer, driver)
    session.drivers.append(driver)
    session.clock.end_s = session.clock.ready_s = time.monotonic()
    return optimizer


def partition(loader: DataLoader[Any]) -> PartitionedLoader:
    """This worker's part of the data; the epoch ends when all workers together are through."""
    session = _running()
    made = PartitionedLoader(
        loader, session.clock, rank(), size(), session.settings.seed, should_stop
    )
    if made.length:
        session.link.tell(RequestKind.LENGTH, (float(made.length),))
        if session.calls is not None:
            session.calls.length = made.length
    if session.job.restart is not None:
        restore_loader(session.job.restart, len(session.loaders), made, size())
    session.loaders.append(made)
    return made


def log(loss: float | torch.Tensor | None = None, **columns: float) -> None:
    """Add to this step's row of the log; call it before ``optimizer.step()``."""
    session = _current()
    if loss is not None:
        session.clock.loss = loss.item() if torch.is_tensor(loss) else float(loss)
    for name, value in columns.items():
        session.log(name, value)


def split(forward_s: float, backward_s: float, *, emulated: bool = False) -> None:
    """Tell how computing splits, [s], for this step's row; ``emulated`` where it was slept."""
    clock = _current().clock
    clock.forward_s, clock.backward_s, clock.emulated = forward_s, backward_s, emulated


def samples() -> int:
    """Samples that all workers have consumed, as far as this worker knows; its own included."""
    return _current().clock.seen_samples()


def iteration() -> int:
    """Iterations that this worker has made, also before the run was resumed."""
    return _current().clock.iteration


def stop() -> None:
    """Ask all workers to stop after the step at hand."""
    _running().link.tell(RequestKind.STOP)


def should_stop() -> bool:
    """Somebody called :func:`stop`; a partitioned loader then ends by itself."""
    return bool(_current().link.notice.stop)


def agree(error: AladdinError | None) -> None:
    """Raise the error of the first worker that has one, on every worker.  Collective over
    workers.
    """
    session = _running()
    text = "" if error is None else str(error)
    for index, other in enumerate(session.link.exchange(text.encode())):
        if other:
            kind = type(error) if error is not None else ConfigError
            shared = kind(other.decode(errors="replace"))
            shared.silent = index != rank()
            raise shared


@contextmanager
def global_parameters(model: torch.nn.Module | None = None) -> Iterator[GlobalInfo]:
    """Inside, the model holds the server's global parameters and buffers; the local ones return
    after.

    Waits for them, outside the timed steps; other workers go on.  ``model`` is for readability: all
    distributed optimizers' models are meant.  Without a server nobody has them before the end:
    these are then this worker's own.
    """
    session = _running()
    if not session.served:
        with session.clock.outside(Phase.EVALUATE):
            yield GlobalInfo(-1, 0.0)
        return
    with session.clock.outside(Phase.EVALUATE):
        start = time.monotonic()
        saved = []
        version = 0
        for driver in session.drivers:
            frame = driver.end.fetch(lend=True)
            driver.buffers.gather()
            floats, counts = driver.buffers.floats.copy(), driver.buffers.counts.copy()
            saved.append((driver.params.swap(frame.params), floats, counts))
            driver.buffers.assign(frame.floats, frame.counts)
            version = frame.read_reply().version
        try:
            yield GlobalInfo(version, time.monotonic() - start)
        finally:
            for driver, (back, floats, counts) in zip(session.drivers, saved, strict=True):
                back()
                driver.buffers.assign(floats, counts)


def log_evaluation(
    epoch: float,
    loss: float,
    accuracy: float,
    duration_s: float,
    info: GlobalInfo | None = None,
) -> None:
    """Log an evaluation of the global model and show it in the progress."""
    session = _current()
    version, fetch_s = info if info is not None else (-1, float("nan"))
    row = (time.monotonic(), epoch, samples(), version, loss, accuracy, duration_s, fetch_s, 0)
    session.job.recorder.add("evals", row)
    if not session.served:
        session.job.progress.evaluation(epoch, loss, accuracy)
    elif not session.ended:
        session.link.tell(RequestKind.EVALUATION, (epoch, loss, accuracy))


def finish(*models: torch.nn.Module) -> None:
    """End: push what is left, wait for all workers; the models then hold the global parameters.

    Collective over all workers.  Where the run was stopped to be started again (SIGUSR1, SIGTERM,
    ``time_limit``), the process ends here, with exit code 75.
    """
    session = _running()
    session.clock.phase(Phase.FINISH)
    start = time.monotonic()
    preempted = session.link.notice.stop == Stop.PREEMPTED
    for driver in session.drivers:
        driver.finish()
    session.cuts.wait()
    job = session.job
    job.recorder.event(EventKind.LEAVE, rank(), float(session.clock.iteration))
    copies = session.link.close(job.measure_end)
    frames = per_optimizer([driver.end for driver in session.drivers], copies)
    for driver, frame in zip(session.drivers, frames, strict=False):
        driver.params.assign(frame.params)
        driver.buffers.assign(frame.floats, frame.counts)
    for driver in session.drivers:
        driver.close()
    version = frames[0].read_reply().version if frames else 0
    job.end(
        iterations=session.clock.iteration, samples=session.clock.own_samples, version=version,
        pushes=sum(driver.port.pushes for driver in session.drivers),
        reason="preempted" if preempted
        else f"finished; waited {time.monotonic() - start:.3f} s for the others",
    )  # fmt: skip
    session.ended = True
    if preempted:
        if rank() == 0:
            job.say(f"stopped with a checkpoint; start it again with --resume auto ({job.folder})")
        sys.exit(PREEMPTED)
