"""Going on from a checkpoint: which one, and what this rank takes from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aladdin_mpi.algorithms.base import Topology
from aladdin_mpi.core.flat import FlatBuffers, FlatParams
from aladdin_mpi.errors import CheckpointError, ConfigError
from aladdin_mpi.runtime import checkpoint
from aladdin_mpi.runtime.clock import StepClock
from aladdin_mpi.runtime.loader import PartitionedLoader
from aladdin_mpi.runtime.state import from_plain, restore_rng

__all__ = [
    "Restart",
    "describe",
    "find",
    "locate",
    "restore_counters",
    "restore_loader",
    "restore_parameters",
    "restore_state",
]


@dataclass(frozen=True)
class Restart:
    """Where this rank goes on from.

    Attributes
    ----------
    number : int
        Of the checkpoint.
    state : dict
        This rank's part; of another worker's where there were fewer (``own`` is False).
    own : bool
        The part is this rank's own.
    same : bool
        As many workers as then.
    seen : int
        Samples that all workers had consumed.
    """

    number: int
    state: dict[str, Any]
    own: bool
    same: bool
    seen: int


def locate(resume: str, out: Path | None) -> tuple[Path, int]:
    """The run's folder, and the checkpoint asked for (0: the last complete one).

    Parameters
    ----------
    resume : str
        ``auto``, a run's folder, or that of one of its checkpoints.
    out : Path or None

    Raises
    ------
    ConfigError
    """
    if resume == "auto":
        if out is None:
            raise ConfigError("--resume auto: name the run's folder with --out")
        return out, 0
    path, number = Path(resume), 0
    if path.parent.name == checkpoint.FOLDER and path.name.isdecimal():
        path, number = path.parent.parent, int(path.name)
    if not (path / checkpoint.FOLDER).is_dir():
        raise ConfigError(
            f"--resume {resume}: holds no checkpoints; give a run's folder, one of its "
            f"{checkpoint.FOLDER}/NUMBER, or auto"
        )
    if out is not None and out.absolute() != path.absolute():
        raise ConfigError(
            f"--resume {resume}: the run goes on in its own folder; leave out --out {out}"
        )
    return path, number


def find(
    comm: Any, run: Path, asked: int, required: bool,
    rank_of: Callable[[int, list[int]], tuple[int, bool]],
    algorithm: str, servers: int, members: int, say: Callable[[str], None],
) -> Restart | None:  # fmt: skip
    """This rank's part of the last checkpoint that every rank can read.  Collective.

    Parameters
    ----------
    asked : int
        The only one that will do; 0: the last.
    required : bool
        There must be one.
    rank_of : callable
        ``rank_of(world_size then, servers then) -> (rank, own)``: whose part this rank takes.
    members : int
        Ranks that have a part.

    Raises
    ------
    CheckpointError
        There is none, though required, or it is another algorithm's, or of other servers.
    """
    candidates: list[int] = []
    problem = ""
    if comm.rank == 0:
        found = [n for n in checkpoint.numbers(run) if checkpoint.complete(run, n)]
        candidates = [n for n in reversed(found) if asked in (0, n)]
        problem = _other_servers(run, candidates, servers)
    candidates, problem = comm.bcast((candidates, problem), 0)
    if problem:
        refused = CheckpointError(problem)
        refused.silent = comm.rank > 0
        raise refused
    error: CheckpointError | None = None
    for number in candidates:
        state, own, error = _try(run, number, rank_of)
        if not any(comm.allgather(error is not None)):
            assert state is not None
            return _restart(comm, number, state, own, servers, algorithm, members)
        if error is not None:
            say(str(error))
    if required:
        missing = CheckpointError(
            f"--resume {run}: no complete checkpoint"
            + (f" {asked}" if asked else "")
            + " that every rank can read; start the run anew in another folder"
        )
        missing.silent = comm.rank > 0
        raise missing
    return None


def _other_servers(run: Path, candidates: list[int], servers: int) -> str:
    """One line where the last checkpoint is of another number of servers."""
    if not candidates:
        return ""
    then = len(checkpoint.head(run, candidates[0])["servers"])
    if then == servers or not (then and servers):  # or it is another algorithm's
        return ""
    return (
        f"--servers {servers}: checkpoint {candidates[0]} of {run} was made with {then}, each with "
        f"its part of the parameters; resume with --servers {then}"
    )


def _try(
    run: Path, number: int, rank_of: Callable[[int, list[int]], tuple[int, bool]]
) -> tuple[dict[str, Any] | None, bool, CheckpointError | None]:
    try:
        head = checkpoint.head(run, number)
        rank, own = rank_of(head["world_size"], head["servers"])
        return checkpoint.read(run, number, rank), own, None
    except CheckpointError as error:
        return None, False, error


def _restart(
    comm: Any, number: int, state: dict[str, Any], own: bool, servers: int, algorithm: str,
    members: int,
) -> Restart:  # fmt: skip
    if state["algorithm"] != algorithm:
        error = CheckpointError(
            f"--algorithm {algorithm}: the checkpoint is of {state['algorithm']}; resume with that"
        )
        error.silent = comm.rank > 0
        raise error
    if servers:
        mine = sum(state["worker_samples"]) if state["role"] == "server" else None
        seen = comm.bcast(mine, 0)
    elif state["world_size"] == members:
        seen = sum(comm.allgather(state["own_samples"]))
    else:
        seen = comm.bcast(state["own_samples"] * state["world_size"], 0)
    return Restart(number, state, own, state["world_size"] == members, int(seen))


def describe(restart: Restart, run: Path, workers: int, servers: int) -> str:
    """One line for the user."""
    then = restart.state["world_size"] - servers
    text = f"goes on from checkpoint {restart.number} of {run}: {restart.seen} samples"
    if then != workers:
        text += (
            f"; {then} worker(s) then, {workers} now: parameters and sample count are kept, worker "
            "i takes the optimizer of worker i or 0, the current epoch is shared out anew"
        )
    return text


def restore_counters(restart: Restart, clock: StepClock, link: Any, num_workers: int) -> None:
    """Iterations and samples of this worker."""
    state, worker = restart.state, link.worker
    clock.iteration, clock.epoch = state["iteration"], state["epoch"]
    link.steps = clock.iteration
    if restart.same:
        clock.own_samples, clock.samples = state["own_samples"], state["unpushed_samples"]
    else:
        share, rest = divmod(restart.seen, num_workers)
        clock.own_samples = share + (worker < rest)
    link.own_samples = clock.own_samples


def restore_parameters(
    restart: Restart, topology: Topology, at: int, end: Any, params: FlatParams,
    buffers: FlatBuffers, num_workers: int,
) -> None:  # fmt: skip
    """Those of optimizer ``at``; collective.

    The server's global model; where there is none, what this worker had (in lockstep), or the mean
    of what all had, as messages that were on their way are lost.

    Raises
    ------
    CheckpointError
        They are another model's.
    """
    if topology is Topology.SERVER:
        frame = end.fetch()
        params.assign(frame.params)
        buffers.assign(frame.floats, frame.counts)
        return
    state = restart.state
    if at >= len(state["parameters"]) or params.size != len(state["parameters"][at]):
        raise CheckpointError("--resume: the checkpoint was made with another model")
    x, floats = (from_plain(state[name][at]) for name in ("parameters", "floats"))
    if topology is Topology.PEER or not restart.same:
        end.start_sum(x).wait()
        x /= num_workers
        if floats.size:
            end.start_sum(floats).wait()
            floats /= num_workers
    params.assign(x)
    buffers.assign(floats, from_plain(state["counts"][at]))


def restore_state(
    restart: Restart, topology: Topology, at: int, optimizer: torch.optim.Optimizer, worker: Any,
    port: Any,
) -> None:  # fmt: skip
    """The state of optimizer ``at``, the algorithm's where no messages of it are lost, and what its
    ``port`` has kept of gradients.

    Raises
    ------
    CheckpointError
        It is another optimizer's.
    """
    state = restart.state
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(state["optimizers"][at])
    except (ValueError, KeyError, IndexError) as error:
        raise CheckpointError(
            f"--resume: the checkpoint was made with another optimizer or model ({error})"
        ) from None
    if not restart.own:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    if topology is not Topology.PEER and restart.same:
        worker.load_state_dict(from_plain(state["algorithms"][at]))
        if "ports" in state:
            port.load_state_dict(from_plain(state["ports"][at]))


def restore_loader(restart: Restart, at: int, loader: PartitionedLoader, num_workers: int) -> None:
    """Where loader ``at`` was, and the random numbers from there on."""
    state = restart.state
    if at >= len(state["loaders"]):
        return
    place = dict(state["loaders"][at])
    if not restart.same and loader.length:
        taken = restart.seen - max(place["base"], 0) - place["epoch"] * loader.length
        place["taken"] = max(0, taken) // num_workers
    loader.resume(place, partial(restore_rng, state["rng"]) if restart.own else lambda: None)
