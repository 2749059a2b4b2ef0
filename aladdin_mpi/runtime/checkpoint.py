"""Checkpoints on disk: one folder each, one file per rank.

    checkpoints/000012/rank0003.pt            rank 3's part of checkpoint 12
    checkpoints/000012/checkpoint.json        what it is of; written by rank 0
    checkpoints/ended/rank0003.pt             the part of a worker that had ended

A file is written beside, flushed to the disk and renamed; a checkpoint counts once all its files
are there, so that a killed writer never spoils an older one.  Files are read with
``weights_only``: nothing in them is executed.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch

from aladdin_mpi.errors import CheckpointError

__all__ = ["FOLDER", "SCHEMA_VERSION", "Writer", "complete", "head", "latest", "numbers", "read"]

FOLDER = "checkpoints"
SCHEMA_VERSION = 1
"""Raised when a field is renamed, removed or changes its meaning."""

ENDED = "ended"
HEAD = "checkpoint.json"

State = dict[str, Any]


def _folder(run: Path, number: int) -> Path:
    return run / FOLDER / f"{number:06d}"


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank:04d}.pt"


def numbers(run: Path) -> list[int]:
    """Of the checkpoints in a run's folder, complete or not, in order."""
    return sorted(int(path.name) for path in (run / FOLDER).glob("[0-9]*") if path.name.isdecimal())


def head(run: Path, number: int) -> dict[str, Any]:
    """What a checkpoint is of: ``world_size``, the ranks in ``servers``, and those in ``left`` that
    had ended.

    Raises
    ------
    CheckpointError
    """
    path = _folder(run, number) / HEAD
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        servers, left = ([int(r) for r in found[name]] for name in ("servers", "left"))
        return {"world_size": int(found["world_size"]), "servers": servers, "left": left}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None


def complete(run: Path, number: int) -> bool:
    """Whether every rank's part is there."""
    try:
        known = head(run, number)
    except CheckpointError:
        return False
    ranks, left = range(known["world_size"]), known["left"]
    return all(_path(run, number, rank, rank in left).exists() for rank in ranks)


def latest(run: Path) -> int:
    """Number of the last complete checkpoint; 0: there is none."""
    return next((n for n in reversed(numbers(run)) if complete(run, n)), 0)


def _path(run: Path, number: int, rank: int, left: bool) -> Path:
    here = _file(_folder(run, number), rank)
    return _file(run / FOLDER / ENDED, rank) if left and not here.exists() else here


def read(run: Path, number: int, rank: int) -> State:
    """A rank's part of a checkpoint.

    Raises
    ------
    CheckpointError
        It is not there, is damaged, or was written by another version of this package.
    """
    return _load(_path(run, number, rank, True))


def _load(path: Path) -> State:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        version = state["schema_version"]
    except Exception as error:  # whatever torch finds in a damaged file
        text = " ".join(str(error).split())[:120]
        raise CheckpointError(
            f"{path}: cannot be read ({text}); remove its folder to resume from the one before"
        ) from None
    if version != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path}: has schema version {version}, this package reads {SCHEMA_VERSION}; resume "
            "with the version of aladdin_mpi that wrote it"
        )
    loaded: State = state
    return loaded


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside, flush to the disk, rename."""
    beside = path.with_suffix(".tmp")
    with beside.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Writer:
    """Writes this rank's parts from a thread of its own, one after the other.

    Parameters
    ----------
    run : Path
        The run's folder.
    rank, world_size : int
    servers : sequence of int
        Ranks of the servers.
    keep : int
        Complete checkpoints that are kept; whoever writes heads removes older ones.
    on_written : callable
        ``on_written(number, seconds)``, on the writer's thread.
    on_failure : callable
        Takes a line that says why a part could not be written; the run goes on.
    """

    def __init__(
        self,
        run: Path,
        rank: int,
        world_size: int,
        servers: Sequence[int],
        keep: int,
        on_written: Callable[[int, float], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._run, self._rank, self._world_size, self._keep = run, rank, world_size, keep
        self._servers = list(servers)
        self._on_written, self._on_failure = on_written, on_failure
        self._thread = ThreadPoolExecutor(1, "aladdin-checkpoint")
        self._last: Future[None] | None = None

    def write(self, number: int, state: State) -> None:
        """Begin to write ``state`` (tensors and plain values), now the writer's."""
        self._do(self._write, _folder(self._run, number), number, state)

    def write_ended(self, state: State) -> None:
        """The same for a worker that makes no step any more."""
        self._do(self._write, self._run / FOLDER / ENDED, 0, state)

    def write_head(self, number: int, left: Sequence[int]) -> None:
        """Say, on rank 0, which workers had ended; the others' parts make the checkpoint whole."""
        self._do(self._write_head, number, list(left))

    def wait(self) -> None:
        """Until everything is on the disk."""
        if self._last is not None:
            self._last.result()

    def _do(self, task: Callable[..., None], *arguments: Any) -> None:
        self._last = self._thread.submit(self._guarded, task, *arguments)

    def _guarded(self, task: Callable[..., None], *arguments: Any) -> None:
        try:
            task(*arguments)
        except (OSError, RuntimeError) as error:  # torch hides the system's error in the latter
            text = getattr(error, "strerror", None) or " ".join(str(error).split())[:160]
            self._on_failure(
                f"cannot write a checkpoint to {self._run / FOLDER}: {text}; the run goes on, the "
                "one before is kept"
            )

    def _write(self, folder: Path, number: int, state: State) -> None:
        start = time.monotonic()
        whole = {
            "schema_version": SCHEMA_VERSION, "number": number, "rank": self._rank,
            "world_size": self._world_size, **state,
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        _replace(_file(folder, self._rank), lambda file: torch.save(whole, file))
        if number:
            self._on_written(number, time.monotonic() - start)

    def _write_head(self, number: int, left: list[int]) -> None:
        workers = [r for r in range(self._world_size) if r not in self._servers]
        head = {
            "schema_version": SCHEMA_VERSION, "number": number, "world_size": self._world_size,
            "servers": self._servers, "left": [workers[i] for i in left], "unix_s": time.time(),
        }  # fmt: skip
        folder = _folder(self._run, number)
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / HEAD, lambda file: file.write(json.dumps(head, indent=1).encode()))
        self._prune(number)

    def _prune(self, newest: int) -> None:
        """Remove what is older than the last ``keep`` complete ones; the newest may still wait for
        other ranks.
        """
        older = [n for n in numbers(self._run) if n < newest]
        whole = [n for n in older if complete(self._run, n)]
        oldest = whole[-self._keep :][:1]
        for number in older:
            if oldest and number < oldest[0]:
                shutil.rmtree(_folder(self._run, number), ignore_errors=True)
