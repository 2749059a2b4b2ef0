"""The text of a job for Slurm, as one pure function of its options.

``slurm/train_cpu.sbatch`` and ``slurm/train_gpu_ib.sbatch`` are what it returns for
:data:`CPU_DEFAULTS` and :data:`GPU_DEFAULTS`::

    python -m aladdin_mpi.cli.slurm_script slurm
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aladdin_mpi.errors import ConfigError

__all__ = ["CPU_DEFAULTS", "GPU_DEFAULTS", "LAUNCHERS", "MPIS", "ScriptOptions", "script"]

MPIS = ("mpich", "openmpi")
LAUNCHERS = ("srun", "mpirun")
WIDTH = 100
NOTES_AT = 40
"""Column of a comment behind a line that is to be edited."""

_TIME = re.compile(r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2}|UNLIMITED|INFINITE)", re.IGNORECASE)
_WORD = re.compile(r"[\w.+@%:/=,-]+")


@dataclass(frozen=True)
class ScriptOptions:
    """What a job asks for.

    Parameters
    ----------
    nodes : int
    tasks_per_node : int
        Tasks of MPI on each node, of which the first ones serve.  With GPUs: workers on each node;
        the servers are tasks more, on the first.
    gpus_per_node : int
        0: trains on CPUs.
    cpus_per_task : int
    time, job_name : str
    account, partition : str
        Empty: the cluster's default.
    mpi, launcher : str
        Of :data:`MPIS` and :data:`LAUNCHERS`.
    servers : int
        How many the training has; 0 where the algorithm has none.
    relay : bool
        Every node has one; with GPUs it is one more task there.
    training : sequence of str
        Arguments of ``aladdin-mpi train``.

    Raises
    ------
    ConfigError
        Slurm would not take it.
    """

    nodes: int = 2
    tasks_per_node: int = 4
    gpus_per_node: int = 0
    cpus_per_task: int = 4
    time: str = "04:00:00"
    job_name: str = "aladdin"
    account: str = ""
    partition: str = ""
    mpi: str = "mpich"
    launcher: str = "srun"
    servers: int = 1
    relay: bool = False
    training: Sequence[str] = (
        "--dataset", "digits", "--model", "mlp", "--algorithm", "aladdin",
        "--epochs", "20", "--batch-size", "32", "--lr", "0.05",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("nodes", "tasks_per_node", "cpus_per_task"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)}: must be at least 1")
        if self.gpus_per_node < 0:
            raise ConfigError(
                f"--gpus-per-node {self.gpus_per_node}: must be at least 0; 0 trains on CPUs"
            )
        if self.gpus_per_node and self.tasks_per_node % self.gpus_per_node:
            raise ConfigError(
                f"--tasks-per-node {self.tasks_per_node}: must be a multiple of --gpus-per-node "
                f"{self.gpus_per_node}, so that all GPUs have as many workers; leave it out for one"
            )
        tasks = self.nodes * self.tasks_per_node + (self.servers if self.gpus_per_node else 0)
        if tasks < max(2, self.servers + 1):
            raise ConfigError(
                f"--tasks-per-node {self.tasks_per_node}: on {self.nodes} node(s) that is too few "
                f"for {self.servers} server(s) and a worker"
            )
        if not _TIME.fullmatch(self.time):
            raise ConfigError(
                f"--time {self.time}: Slurm reads minutes, hours:minutes:seconds or "
                "days-hours:minutes:seconds, such as 04:00:00 or 2-12:00:00"
            )
        for name in ("job_name", "account", "partition"):
            text = getattr(self, name)
            if not _WORD.fullmatch(text) and (text or name == "job_name"):
                raise ConfigError(
                    f"{_flag(name)} {text!r}: must be one word of letters, digits and . _ - + @ :"
                )
        for name, allowed in (("mpi", MPIS), ("launcher", LAUNCHERS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{_flag(name)} {getattr(self, name)}: choose from {', '.join(allowed)}"
                )


CPU_DEFAULTS = ScriptOptions()
GPU_DEFAULTS = ScriptOptions(gpus_per_node=4, cpus_per_task=8)


def script(options: ScriptOptions) -> str:
    """Return the text of the job, for sbatch."""
    parts = [_head(options), *_variables(options), EDGE, SETTINGS]
    if options.gpus_per_node:
        parts += [GPU_CHECKS, GPU_LAYOUT, _start(GPU_SRUN), RUN]
    else:
        parts += [CPU_LAYOUT, _start(CPU_SRUN), RUN]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


# -- what a user edits ----------------------------------------------------------------------------


def _head(options: ScriptOptions) -> str:
    gpus = options.gpus_per_node
    where = (
        "GPU nodes with InfiniBand: a worker for every GPU, and a server" if gpus else "CPU nodes"
    )
    tasks = options.tasks_per_node + (options.servers + options.relay if gpus else 0)
    signal = "B:USR1@120" if options.launcher == "mpirun" else "USR1@120"
    several = options.servers > 1
    note = "one of all tasks serves, the others train"
    if several:
        note = f"{options.servers} of all tasks serve, the others train"
    if gpus:
        note = "workers and one more, for the server on the first"
        if several:
            note = f"workers and {options.servers} more, for the servers on the first"
        note = note if options.servers else "workers"
    if options.relay:
        note += "; on each node one merges"
    lines = [
        "#!/bin/bash",
        f"# Train with aladdin_mpi on {where}.",
        "# Copy this file, edit what is above the line, and hand it to sbatch.",
        "",
        f"#SBATCH --job-name={options.job_name}",
        f"#SBATCH --nodes={options.nodes}",
        _noted(f"#SBATCH --ntasks-per-node={tasks}", note),
    ]
    if gpus:
        lines += [f"#SBATCH --gpus-per-node={gpus}"]
    lines += [f"#SBATCH --cpus-per-task={options.cpus_per_task}", f"#SBATCH --time={options.time}"]
    for name, value in (("account", options.account), ("partition", options.partition)):
        lines += [f"#SBATCH --{name}={value}" if value else f"##SBATCH --{name}=..."]
    lines += [
        "#SBATCH --output=%x-%j.out",
        _noted("#SBATCH --open-mode=append", "a job that was requeued writes on in the same file"),
        "#SBATCH --requeue",
        _noted(f"#SBATCH --signal={signal}", "time for a checkpoint; with mpirun: B:USR1@120"),
    ]
    return "\n".join(lines)


def _variables(options: ScriptOptions) -> Iterator[str]:
    lines = [
        _noted(f"MPI={options.mpi}", "mpich or openmpi: the one that mpi4py loads"),
        _noted(f"LAUNCHER={options.launcher}", "srun or mpirun"),
        _noted("MPI_TYPE=", "srun's --mpi; empty: pmi2 for mpich, pmix for openmpi"),
    ]
    if options.gpus_per_node:
        note = "0 for an algorithm without one; as many as --servers says"
        lines += [_noted(f"SERVERS={options.servers}", note)]
    lines += [
        _noted("CPU_BIND=cores", "for srun; verbose,cores shows it, map_ldom:... chooses"),
        _noted("OUT=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID", "stays the same when the job is requeued"),
        "TRAINING=(",
        *_wrapped(options.training),
        ")",
    ]
    yield "\n".join(lines)
    lines = [
        "# Your Python with aladdin_mpi, the same on every node, and its MPI; for instance:",
        "# module load mpich" if options.mpi == "mpich" else "# module load openmpi",
        "# source ~/venv/bin/activate",
    ]
    if options.gpus_per_node:
        lines += [UCX.strip("\n")]
    yield "\n".join(lines)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _noted(line: str, note: str) -> str:
    """A line with a comment behind it, which sbatch and bash ignore."""
    return f"{line:<{NOTES_AT - 1}} # {note}"


def _wrapped(words: Sequence[str]) -> Iterator[str]:
    """The words, quoted for bash, an option and its values never apart unless they are too long."""
    groups: list[str] = []
    for word in map(shlex.quote, words):
        if groups and not word.startswith("--"):
            groups[-1] += f" {word}"
        else:
            groups.append(word)
    line = " "
    for group in groups:
        if len(line) + 1 + len(group) > WIDTH and line.strip():
            yield line
            line = " "
        line += f" {group}"
    if line.strip():
        yield line


UCX = """
# Worth a look: nvidia-smi topo -m (which cores are near a GPU), ucx_info -d (cards), ulimit -l.
# Only InfiniBand and shared memory, so that a job fails instead of falling back to TCP:
export UCX_TLS=rc,sm,self
# export UCX_NET_DEVICES=mlx5_0:1       # which card, where a node has several: ucx_info -d
"""


# -- what a user leaves as it is ------------------------------------------------------------------

EDGE = f"""
# {" nothing to edit below ":-^{WIDTH - 2}}
"""

SETTINGS = """
# Without InfiniBand: Open MPI's one-sided messages may not go over UCX; and MPICH's addresses for
# UCX can be too long for srun ("value not properly terminated in client request").
if ! ls /sys/class/infiniband/* >/dev/null 2>&1; then
  export OMPI_MCA_osc=^ucx
  [ "$LAUNCHER" = mpirun ] || export MPIR_CVAR_CH4_NETMOD=ofi
fi
"""

GPU_CHECKS = """
ulimit -l unlimited 2>/dev/null || echo "$SLURM_JOB_NAME: locked memory is limited to" \\
  "$(ulimit -l) KiB: InfiniBand and pinned host memory want it unlimited; ask the site" >&2
"""

CPU_LAYOUT = """
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" |
  sed "s/$/:$SLURM_NTASKS_PER_NODE/" | paste -sd,)
tasks=$SLURM_NTASKS
"""

GPU_LAYOUT = """
# The first ranks serve; they are on the first node, beside as many workers as any other node has.
workers=$((SLURM_NTASKS_PER_NODE - SERVERS)) here=$SLURM_NTASKS_PER_NODE tasks=0 hosts=
hostfile=$(mktemp)
trap 'rm -f "$hostfile"' EXIT
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  for ((i = 0; i < here; i++)); do echo "$node"; done >> "$hostfile"
  hosts+=${hosts:+,}$node:$here tasks=$((tasks + here)) here=$workers
done
# Every task sees one GPU, which no other worker of its node has; the server sees one, too, and
# leaves it alone. With mpirun all see all, and aladdin_mpi gives each worker its own.
gpus=$(seq -s, 0 $((${SLURM_GPUS_PER_NODE##*:} - 1)))
"""

CPU_SRUN = ("srun", '--distribution=block:block --cpu-bind="$CPU_BIND"')
GPU_SRUN = (
    'env -u SLURM_NTASKS_PER_NODE SLURM_HOSTFILE="$hostfile" srun',
    '--distribution=arbitrary --cpu-bind="$CPU_BIND" --gpu-bind=map_gpu:"$gpus"',
)


def _start(srun: tuple[str, str]) -> str:
    command, binding = srun
    return f"""
cpus=$SLURM_CPUS_PER_TASK
[ "$MPI" = openmpi ] && type=pmix || type=pmi2
case $LAUNCHER-$MPI in
  # When a task has gone, the others have a minute: none waits for a lost one, none is cut off.
  srun-mpich | srun-openmpi)
    start=({command} --mpi="${{MPI_TYPE:-$type}}"
      --ntasks="$tasks" --cpus-per-task="$cpus" --kill-on-bad-exit=0 --wait=60
      {binding}) ;;
  mpirun-mpich) start=(mpirun -hosts "$hosts" -n "$tasks" -bind-to core:"$cpus") ;;
  mpirun-openmpi)
    start=(mpirun --host "$hosts" -n "$tasks" --map-by slot:PE="$cpus" --bind-to core) ;;
  *) echo "LAUNCHER=$LAUNCHER MPI=$MPI: no such pair; see the top of the script" >&2; exit 2 ;;
esac
"""


RUN = """
# The program that this shell finds; Open MPI's mpirun would look beside itself first.
aladdin=$(command -v aladdin-mpi) || {
  echo "aladdin-mpi is not on the PATH: load your environment above the line" >&2
  exit 127
}

# In the background, so that the shell takes signals: USR1 asks for a checkpoint and an end, and the
# launcher hands it on to all tasks. TERM means that Slurm ends the job, or requeues it, by itself.
"${start[@]}" "$aladdin" train --out "$OUT" --resume auto --checkpoint-minutes 10 \\
  "${TRAINING[@]}" &
launcher=$! signalled=1 ending=0
trap 'signalled=1; kill -USR1 $launcher' USR1
trap 'signalled=1 ending=1; kill -USR1 $launcher' TERM
while [ $signalled = 1 ]; do signalled=0; wait $launcher; status=$?; done

# 75: a checkpoint was written before the end of the training. The job waits for its next turn.
[ $status = 75 ] && [ $ending = 0 ] && scontrol requeue "$SLURM_JOB_ID"
exit $status
"""


def main(folder: str) -> None:
    """Write the two scripts of the repository."""
    for name, options in (("train_cpu", CPU_DEFAULTS), ("train_gpu_ib", GPU_DEFAULTS)):
        Path(folder, f"{name}.sbatch").write_text(script(options), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
