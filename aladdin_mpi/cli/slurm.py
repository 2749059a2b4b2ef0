"""``aladdin-mpi slurm``: a job for Slurm, ready to submit."""

from __future__ import annotations

import subprocess

import click

from aladdin_mpi.cli.slurm_script import LAUNCHERS, MPIS, ScriptOptions, script
from aladdin_mpi.errors import ConfigError, LaunchError

__all__ = ["slurm"]

SUBMIT_LIMIT_S = 60.0


@click.command(
    help="""Print a script for sbatch that trains; the arguments of train follow after --.

    \b
    aladdin-mpi slurm --nodes 4 --gpus-per-node 4 -- --dataset imagefolder --model resnet50

    It writes a checkpoint every ten minutes and before its time is over, is queued again then, and
    goes on where it was.  With --submit it is handed to sbatch at once.
    """,
    context_settings={"max_content_width": 100},
)
@click.option("--nodes", type=int, default=2, show_default=True, metavar="N")
@click.option(
    "--gpus-per-node", type=int, default=0, show_default=True, metavar="N", help="0: train on CPUs"
)
@click.option(
    "--tasks-per-node", type=int, metavar="N",
    help="ranks on each node, one of all serves; with GPUs: workers on each node, one for each GPU "
    "if not given, and the server is one more  [4 without GPUs]",
)  # fmt: skip
@click.option("--cpus-per-task", type=int, default=4, show_default=True, metavar="N")
@click.option("--time", default=ScriptOptions.time, show_default=True, metavar="D-HH:MM:SS")
@click.option("--account", default="", metavar="NAME", help="who pays")
@click.option("--partition", default="", metavar="NAME")
@click.option("--mpi", default="mpich", show_default=True, metavar="|".join(MPIS))
@click.option("--launcher", default="srun", show_default=True, metavar="|".join(LAUNCHERS))
@click.option("--job-name", default=ScriptOptions.job_name, show_default=True, metavar="NAME")
@click.option("--submit", is_flag=True, help="submit it, and print the job's number instead")
@click.argument("training", nargs=-1)
def slurm(
    nodes: int,
    gpus_per_node: int,
    tasks_per_node: int | None,
    cpus_per_task: int,
    time: str,
    account: str,
    partition: str,
    mpi: str,
    launcher: str,
    job_name: str,
    submit: bool,
    training: tuple[str, ...],
) -> None:
    if tasks_per_node is None:
        tasks_per_node = max(gpus_per_node, 0) or ScriptOptions.tasks_per_node
    servers, relay = _others(training, gpus_per_node > 0)
    options = ScriptOptions(
        nodes=nodes, gpus_per_node=gpus_per_node, tasks_per_node=tasks_per_node,
        cpus_per_task=cpus_per_task, time=time, account=account, partition=partition,
        mpi=mpi, launcher=launcher, job_name=job_name,
        servers=servers, relay=relay, training=training or ScriptOptions.training,
    )  # fmt: skip
    text = script(options)
    click.echo(_submit(text) if submit else text, nl=submit)


def _others(training: tuple[str, ...], gpus: bool) -> tuple[int, bool]:
    """Check the arguments of train, which would else fail hours later; how many servers it has, and
    whether nodes have a relay.
    """
    from aladdin_mpi.algorithms import find
    from aladdin_mpi.algorithms.base import Topology
    from aladdin_mpi.cli.train import parse

    config = parse(training)
    if gpus and config.servers > 1 and config.server_placement == "spread":
        raise ConfigError(
            "--server-placement spread: with --gpus-per-node the servers are tasks more on the "
            "first node; leave it out"
        )
    served = find(config.algorithm).topology is Topology.SERVER
    return config.servers if served else 0, config.merge_on_node


def _submit(text: str) -> str:
    """Hand a script to sbatch and return the job's number."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=text, capture_output=True, text=True,
            timeout=SUBMIT_LIMIT_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise LaunchError(
            "--submit: there is no sbatch on the PATH; log in to a node of the cluster, or leave "
            "--submit out and keep what is printed for sbatch"
        ) from None
    except OSError as error:
        raise LaunchError(f"--submit: sbatch cannot be run ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"--submit: sbatch has not answered for {SUBMIT_LIMIT_S:.0f} s; does squeue answer?"
        ) from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise LaunchError(
            f"--submit: sbatch refuses ({said}); sinfo shows partitions and nodes, and your "
            "account may allow some of them only"
        )
    number = done.stdout.strip().split(";")[0]
    if not number.isdecimal():
        raise LaunchError(f"--submit: sbatch answers {done.stdout.strip()!r}, which is no number")
    return number
