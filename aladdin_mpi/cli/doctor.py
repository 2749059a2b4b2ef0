"""``aladdin-mpi doctor``: what this machine's installation looks like, and what to do about it."""

from __future__ import annotations

from pathlib import Path

import click

from aladdin_mpi.cli.checks import alone
from aladdin_mpi.cli.findings import Finding, Level
from aladdin_mpi.cli.jobcheck import check_job
from aladdin_mpi.errors import launched_together

__all__ = ["doctor"]

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "red"}


@click.command()
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=60.0, show_default=True, metavar="SECONDS",
    help="how long one check may take (in a job: all of a rank's own, and all that ranks do "
    "together); a broken MPI can hang",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FOLDER",
    help="try out the file system of this output folder",
)  # fmt: skip
def doctor(timeout: float, out: Path | None) -> None:
    """Check Python, torch, MPI, its launcher, network, memory, cores, GPUs, files; under mpiexec
    or srun also whether the ranks are alike and reach rank 0.

    The exit code is 1 where training cannot work.
    """
    if launched_together():
        worst = check_job(timeout, out, _print)
    else:
        worst = Level.OK
        for finding in alone(timeout, out):
            _print(finding)
            worst = max(worst, finding.level)
    if worst is Level.ERROR:
        raise SystemExit(1)  # click would only return the number of its own Exit


def _print(finding: Finding) -> None:
    level = click.style(f"{finding.level.name.lower():<8}", fg=_COLOURS[finding.level])
    advice = f" -> {finding.advice}" if finding.advice else ""
    click.echo(f"{level} {finding.what}: {finding.found}{advice}")
