"""``aladdin-mpi doctor``: what this machine's installation looks like, and what to do about it."""

from __future__ import annotations

import click

from aladdin_mpi.cli.checks import Finding, Level, all_checks

__all__ = ["doctor"]

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "red"}


@click.command()
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=60.0, show_default=True, metavar="SECONDS",
    help="how long one check may take; a broken MPI can hang",
)  # fmt: skip
def doctor(timeout: float) -> None:
    """Check Python, torch, MPI, its launcher, shared memory and cores; needs no launcher.

    The exit code is 1 where training cannot work.
    """
    worst = Level.OK
    for finding in all_checks(timeout):
        _print(finding)
        worst = max(worst, finding.level)
    if worst is Level.ERROR:
        raise click.exceptions.Exit(1)


def _print(finding: Finding) -> None:
    level = click.style(f"{finding.level.name.lower():<8}", fg=_COLOURS[finding.level])
    advice = f" -> {finding.advice}" if finding.advice else ""
    click.echo(f"{level} {finding.what}: {finding.found}{advice}")
