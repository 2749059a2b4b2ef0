"""``aladdin-mpi salvage``: save what can be read of damaged logs."""

from __future__ import annotations

import click

from aladdin_mpi.analysis.salvage import salvage as save

__all__ = ["salvage"]


@click.command()
@click.argument("run", type=click.Path())
@click.option(
    "-o", "--out", type=click.Path(), metavar="FOLDER",
    help="where to; it must not exist (default: RUN-salvaged)",
)  # fmt: skip
def salvage(run: str, out: str | None) -> None:
    """Save what can be read of the damaged logs of RUN into a new folder, and say what was lost.

    Good logs and config.yaml are copied; the files of RUN are not touched.
    """
    folder, logs = save(run, out)
    for log in logs:
        for line in log.lines or [f"{log.name}: {'copied' if log.copied else 'all rows saved'}"]:
            click.echo(line)
    click.echo(f"saved in {folder}")
