"""Start programs under the MPI of the running environment, and end all of what was started.

Used by tests that start ``mpiexec`` themselves, by the test runner and by ``make demo``; only the
standard library is needed. From a shell: ``python tests/launching.py -n 5 python program.py``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

FAMILIES = ("mpich", "openmpi")
GRACE_S = 5.0
"""Time that a launcher has to end its ranks before everything is killed."""

# What a launcher sets for its ranks: a second launcher must not take itself for one of them.
INHERITED = ("PMI_", "PMIX_", "HYDI_", "OMPI_COMM_WORLD_", "PRTE_LAUNCHED", "MPI_LOCALRANKID")

OPENMPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_osc": "^ucx",
}


@dataclass(frozen=True)
class CompletedRun:
    """A run that has ended: exit status, what it printed, and its duration [s]."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


class RunFailed(AssertionError):
    """A run ended with a non-zero exit status, or did not end in time (``timed_out``)."""

    def __init__(self, what: str, run: CompletedRun, timed_out: bool = False) -> None:
        super().__init__(f"{what}\n--- stdout\n{run.stdout}\n--- stderr\n{run.stderr}")
        self.run = run
        self.timed_out = timed_out


def family() -> str:
    """Return the MPI in use, ``mpich`` or ``openmpi``.

    It is what ``ALADDIN_MPI`` names, else the one that is installed in the running environment,
    else the one on the search path.
    """
    named = os.environ.get("ALADDIN_MPI", "")
    if named:
        if named not in FAMILIES:
            raise ValueError(f"ALADDIN_MPI={named!r}: expected one of {', '.join(FAMILIES)}")
        return named
    tools = {"mpichversion": "mpich", "ompi_info": "openmpi"}
    for tool, name in tools.items():
        if (Path(sys.prefix) / "bin" / tool).exists():
            return name
    for tool, name in tools.items():
        if shutil.which(tool):
            return name
    raise FileNotFoundError("no MPI here: install aladdin_mpi[mpich] or aladdin_mpi[openmpi]")


def launcher(name: str = "mpiexec") -> str:
    """Return the path of the launcher: the environment's own, else the one on the search path."""
    own = Path(sys.prefix) / "bin" / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"no {name} here: install aladdin_mpi[mpich] or [openmpi]")
    return found


def command(n: int, argv: Sequence[str | Path]) -> list[str]:
    """Return the command line that starts ``argv`` on ``n`` ranks of this machine."""
    options = ["--bind-to", "none"] if family() == "openmpi" else []
    return [launcher(), *options, "-n", str(n), *(str(part) for part in argv)]


def environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return the environment for a launcher; entries of ``extra`` that are None are taken out."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(INHERITED)}
    env["PATH"] = os.pathsep.join([str(Path(sys.prefix) / "bin"), env.get("PATH", os.defpath)])
    if family() == "openmpi":
        for key, value in OPENMPI_SETTINGS.items():
            env.setdefault(key, value)
    for key, wanted in (extra or {}).items():
        env.pop(key, None)
        if wanted is not None:
            env[key] = wanted
    return env


def mpirun(
    n: int,
    argv: Sequence[str | Path],
    *,
    timeout: float,
    env: Mapping[str, str | None] | None = None,
    check: bool = True,
    cwd: str | Path | None = None,
) -> CompletedRun:
    """Run a program on ``n`` ranks and wait for its end.

    Parameters
    ----------
    n : int
        Number of ranks.
    argv : sequence of str or Path
        The program and its arguments, for instance ``[sys.executable, "program.py"]``.
    timeout : float
        Time limit [s]; when it has passed, everything that was started is killed.
    env : mapping, optional
        Entries added to the environment; None takes one out.
    check : bool
        Whether a non-zero exit status is an error.
    cwd : str or Path, optional
        Working directory.

    Raises
    ------
    RunFailed
        When the time limit has passed, or, with ``check``, when the exit status is not zero.
    """
    line = command(n, argv)
    start = time.monotonic()
    # Files, not pipes: what was printed before a kill stays, and a survivor cannot hold us up.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with Started(line, env=environment(env), cwd=cwd, stdout=out, stderr=err) as started:
            returncode = started.wait(timeout)
        seconds = time.monotonic() - start
        out.seek(0)
        err.seek(0)
        status = -signal.SIGKILL if returncode is None else returncode
        run = CompletedRun(status, out.read(), err.read(), seconds)
    if returncode is None:
        raise RunFailed(f"not ended after {timeout:g} s: {' '.join(line)}", run, timed_out=True)
    if check and returncode:
        raise RunFailed(f"exit status {returncode} of: {' '.join(line)}", run)
    return run


class Started:
    """A started command with all of its descendants; leaving the ``with`` block ends them all.

    The command gets a process group of its own, and its environment a mark, by which descendants
    are found that have left the group (Open MPI's ranks do).
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
    ) -> None:
        self.mark = f"ALADDIN_STARTED_{uuid.uuid4().hex}=1"
        key, value = self.mark.split("=")
        self.process = subprocess.Popen(
            argv,
            env={**env, key: value},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def wait(self, timeout: float) -> int | None:
        """Return the exit status, or None when the command has not ended in time."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def pids(self) -> list[int]:
        """Return the process numbers of all that was started and still runs."""
        mark = self.mark.encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def end(self, grace_s: float = GRACE_S) -> None:
        """End everything that was started: the launcher first, so that it can end its ranks."""
        if self.process.poll() is None:
            self.signal_group(signal.SIGTERM)
            self.wait(grace_s)
        # A pid found by its mark may in theory be another process by now; a mark makes it unlikely
        # enough, and a second look finds what was started during the first.
        for _ in range(3):
            self.signal_group(signal.SIGKILL)
            pids = self.pids()
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                break
            time.sleep(0.05)
        self.process.wait()

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the process group, if any of it is left.

        Once the leader was waited for, its number may be another's: then only the mark counts.
        """
        if self.process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, number)


def main(argv: Sequence[str]) -> int:
    """Replace this process by the launcher: ``-n N program arguments``."""
    if len(argv) < 3 or argv[0] != "-n" or not argv[1].isdigit():
        print("usage: python tests/launching.py -n N program [arguments]", file=sys.stderr)
        return 2
    try:
        line, env = command(int(argv[1]), argv[2:]), environment()
    except (FileNotFoundError, ValueError) as error:
        print(f"launching: {error}", file=sys.stderr)
        return 1
    print("+ mpiexec", *line[1:], flush=True)
    os.execve(line[0], line, env)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
