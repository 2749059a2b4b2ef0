"""A real Slurm on one machine: its nodes are virtual hosts, and it is gone when the block is left.

The controller and munge run on the first host, a slurmd on each.  ``h1`` has no GPU, the others
pretend to have some: devices that swallow what is written to them, which is all that Slurm needs to
hand them out and to set ``CUDA_VISIBLE_DEVICES``.  Configuration, keys, sockets and logs are in a
folder of its own; nothing outside it, and outside the hosts' namespaces, is changed.

::

    with SlurmCluster() as slurm:
        job = slurm.submit(Path("train.sbatch"))
        ended = slurm.wait(job, timeout=60)

Needs root, what :mod:`virtual_hosts` needs, and Debian's slurmctld, slurmd, slurm-client, munge and
libpmix2.  There is no accounting: ``sacct`` knows nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import launching
from virtual_hosts import VirtualHosts

__all__ = ["NEEDED_PROGRAMS", "Job", "SlurmCluster"]

NEEDED_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
CONTROLLER = "h1"

ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")

CONFIGURATION = """
ClusterName=virtual
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
# A job that was requeued waits for as long as its old credentials hold: 120 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=8
# Only processes that descend from a job are its own; no cgroups, which a container may not have.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Trust the numbers below, whatever the machine has.
SlurmdParameters=config_overrides
GresTypes=gpu
# Only backfill starts heterogeneous jobs, every 30 s by default.
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1
ReturnToService=1
KillWait=10
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n.spool
# Where PMIx keeps its sockets: the nodes share this machine's /tmp.
TmpFS={folder}/%n.tmp
PartitionName=all Nodes=ALL Default=YES
PartitionName=cpu Nodes={cpu_nodes}
PartitionName=gpu Nodes={gpu_nodes}
"""

# Debian's plugin for PMIx opens libpmix.so by its full path, and only libpmix-dev has that name.
# So a node sees a copy of the library's folder in which the name is there.
PMIX = "usr/lib/*/pmix2/lib"
SLURMD = """
while [ $# -gt 1 ]; do mount --bind "$1" "$2"; shift 2; done
exec slurmd -D -N "$1"
"""


class Job(NamedTuple):
    """What Slurm says of a job; ``restarts`` counts how often it was requeued."""

    number: str
    state: str
    exit_code: str
    restarts: int
    text: str

    def output(self) -> str:
        """Return what the job has printed."""
        found = re.search(r"StdOut=(\S+)", self.text)
        path = Path(found[1]) if found else Path()
        return path.read_text(errors="replace") if path.is_file() else ""


class SlurmCluster:
    """A Slurm with ``nodes`` nodes, up inside the ``with`` block.

    Parameters
    ----------
    nodes : int
        Number of nodes, ``h1`` and so on.
    cpus : int, optional
        CPUs that each node says it has; default: all, or four where there are less.  A task can be
        bound only to those that are there.
    gpus : int
        GPUs that each node but the first pretends to have.

    Attributes
    ----------
    hosts : VirtualHosts
        The nodes.
    folder : Path
        Configuration and logs.
    """

    def __init__(self, nodes: int = 4, cpus: int | None = None, gpus: int = 2) -> None:
        self.hosts = VirtualHosts(nodes)
        self.folder = Path()
        self._cpus, self._gpus = cpus or max(len(os.sched_getaffinity(0)), 4), gpus
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    # -- up and down ------------------------------------------------------------------------------

    def up(self, limit_s: float = 60.0) -> None:
        """Start everything, and wait until all nodes are idle."""
        self.hosts.up()
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)
        self._configure()
        key, socket = self.folder / "munge.key", self.folder / "munge.socket"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}"]
        munged += [f"--{what}-file={self.folder}/munge.{what}" for what in ("pid", "seed", "log")]
        end = time.monotonic() + limit_s
        self._start(CONTROLLER, munged)
        self._await("munged", socket.exists, end)
        self._start(CONTROLLER, ["slurmctld", "-D", "-c", "-i"])
        mounts = self._pmix()
        for node in self.hosts.names:
            self._start(node, ["sh", "-ec", SLURMD, "slurmd", *mounts, node])
        self._await("its nodes", self._all_idle, end)

    def _configure(self) -> None:
        names, gpus = self.hosts.names, range(self._gpus)
        (self.folder / "state").mkdir()
        for name in names:
            for kind in ("spool", "tmp"):
                (self.folder / f"{name}.{kind}").mkdir()
        text = CONFIGURATION.format(
            controller=CONTROLLER, address=self.hosts.addresses[CONTROLLER], folder=self.folder,
            cpu_nodes=names[0], gpu_nodes=",".join(names[1:]),
        )  # fmt: skip
        for name in names:
            has = f" Gres=gpu:{self._gpus}" if name != names[0] and self._gpus else ""
            text += f"NodeName={name} NodeAddr={self.hosts.addresses[name]} CPUs={self._cpus}"
            text += f" RealMemory=8000{has}\n"
        for i in gpus:
            os.mknod(self.folder / f"gpu{i}", 0o20666, os.makedev(1, 3))  # as /dev/null
        devices = [f"Name=gpu File={self.folder}/gpu{i}" for i in gpus]
        lines = [f"NodeName={','.join(names[1:])} {device}" for device in devices]
        (self.folder / "gres.conf").write_text("\n".join(lines) + "\n")
        # Not used, but slurmd looks for the kind that it is told, and may not find the default.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "slurm.conf").write_text(text.lstrip())

    def _pmix(self) -> list[str]:
        """Copy the library of PMIx, where its name is not there; return what to mount where."""
        mounts = []
        for number, lib in enumerate(Path("/").glob(PMIX)):
            if (lib / "libpmix.so.2").exists() and not (lib / "libpmix.so").exists():
                copy = self.folder / f"pmix{number}"
                shutil.copytree(lib, copy, symlinks=True)
                (copy / "libpmix.so").symlink_to("libpmix.so.2")
                mounts += [str(copy), str(lib)]
        return mounts

    def _start(self, host: str, argv: list[str]) -> None:
        """Start a daemon that stays in the foreground."""
        log = self.folder / f"start-{len(self._daemons)}.out"
        with open(log, "wb") as out:
            daemon = subprocess.Popen(
                [*self.hosts.inside(host), *argv], cwd=self.folder, env=self.environment(),
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        self._daemons.append(daemon)

    def _await(self, what: str, ready: Callable[[], bool], end: float) -> None:
        while not ready():
            if time.monotonic() > end or any(d.poll() is not None for d in self._daemons):
                raise OSError(f"Slurm did not start: {what}\n{self.logs()}")
            time.sleep(0.1)

    def _all_idle(self) -> bool:
        shown = self.call("sinfo", "-h", "-p", "all", "-t", "idle", "-o", "%D", check=False)
        return shown.stdout.strip() == str(len(self.hosts.names))

    def logs(self, lines: int = 15) -> str:
        """Return the ends of all logs of the daemons."""
        parts = []
        for path in sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")]):
            text = path.read_text(errors="replace").splitlines()
            parts += [f"--- {path.name}", *text[-lines:]]
        return "\n".join(parts)

    def down(self) -> None:
        """End jobs and daemons, and remove the hosts and the folder; may be called again.

        What runs on the hosts is killed with them, so the jobs need not be cancelled one by one.
        """
        for daemon in reversed(self._daemons):
            if daemon.poll() is None:
                daemon.terminate()
        end = time.monotonic() + 2
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(max(end - time.monotonic(), 0.1))
        self.hosts.down()
        for daemon in self._daemons:
            if daemon.poll() is None:
                daemon.kill()
            daemon.wait()
        self._daemons.clear()
        if self.folder.name:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = Path()

    # -- clients ----------------------------------------------------------------------------------

    def environment(self, extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """Return the environment for clients and, as sbatch hands it on, for jobs."""
        # One machine, so one cache of compiled kernels, whatever the hosts' names.
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        env = launching.environment(
            {
                "SLURM_CONF": str(self.folder / "slurm.conf"),
                "NUMBA_CACHE_DIR": str(caches / "aladdin_mpi" / "virtual-hosts"),
                **(extra or {}),
            }
        )
        path = env["PATH"].split(os.pathsep) + SYSTEM_PATH.split(os.pathsep)
        env["PATH"] = os.pathsep.join(dict.fromkeys(path))
        return env

    def call(
        self,
        *argv: str | Path,
        check: bool = True,
        timeout: float = 60,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a client on the first node: ``call("squeue", "-h")``."""
        inside = self.hosts.inside(CONTROLLER)
        if cwd is not None:
            inside = [f"--wd={cwd}" if word.startswith("--wd=") else word for word in inside]
        done = subprocess.run(
            [*inside, *map(str, argv)], capture_output=True, text=True, timeout=timeout,
            env=self.environment(env), stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise OSError(f"{argv}: exit status {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def submit(
        self,
        script: Path,
        *options: str,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> str:
        """Submit a script from a folder (default: where it is) and return the job's number."""
        done = self.call(
            "sbatch", "--parsable", *options, script.absolute(), env=env, cwd=cwd or script.parent
        )
        return done.stdout.strip().split(";")[0]

    def job(self, job: str) -> Job:
        """Return what Slurm knows of a job, or of one task of an array (``12_3``)."""
        text = self.call("scontrol", "-o", "show", "job", job).stdout.splitlines()[0]
        found = dict(re.findall(r"(\w+)=(\S*)", text))
        return Job(
            found["JobId"], found["JobState"], found["ExitCode"], int(found["Restarts"]), text
        )

    def wait(self, job: str, timeout: float) -> Job:
        """Wait until a job has ended; one that was requeued has not.

        Heterogeneous jobs are started by backfill only, which does not look again at a job whose
        time has come unless something changes; on a real cluster something always does.
        """
        end = time.monotonic() + timeout
        while (found := self.job(job)).state not in ENDED:
            if found.state == "PENDING" and "HetJobId=" in found.text:
                self.call("scontrol", "update", f"jobid={job}", "comment=look", check=False)
            if time.monotonic() > end:
                steps = self.call("squeue", "--steps", check=False).stdout
                self.call("scancel", job, check=False)
                raise TimeoutError(
                    f"job {job} not ended after {timeout:g} s: {found.text}\n{steps}\n"
                    f"{found.output()}\n{self.logs()}"
                )
            time.sleep(0.2)
        return found

    def settle(self) -> None:
        """Cancel what a test has left, and wait until all nodes are idle."""
        if not self._all_idle():
            self.call("scancel", "--user=root")
            self._await("idle nodes", self._all_idle, time.monotonic() + 60)

    @contextlib.contextmanager
    def down_node(self, node: str) -> Iterator[None]:
        """Set a node down for as long as the ``with`` block takes."""
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        try:
            yield
        finally:
            self.call("scontrol", "update", f"nodename={node}", "state=resume")
            self._await("the node that was down", self._all_idle, time.monotonic() + 60)
