"""``aladdin-mpi report``: how a run went."""

from __future__ import annotations

import json
from pathlib import Path

import click

from aladdin_mpi.cli.errors import writing

__all__ = ["report"]


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(path_type=Path), help="also write one page with pictures")
@click.option("--csv", type=click.Path(path_type=Path), help="also write the tables to this folder")
@click.option("--json", "as_json", is_flag=True, help="print the figures as JSON instead")
@click.option(
    "--one-worker", type=click.Path(path_type=Path), help="run of one worker, for the speed-up"
)
def report(
    run: Path, html: Path | None, csv: Path | None, as_json: bool, one_worker: Path | None
) -> None:
    """Print how RUN (a run's folder) went, also while it goes on, and after it was killed."""
    from rich.console import Console

    from aladdin_mpi.analysis import load_run, metrics
    from aladdin_mpi.analysis.report import page, screen, write_csv

    loaded = load_run(run)
    single = load_run(one_worker) if one_worker else None
    if as_json:
        values = metrics.overview(loaded, single).to_json()
        click.echo(json.dumps(values | {"problems": metrics.problems(loaded)}, indent=2))
    else:
        Console(highlight=False).print(screen(loaded, single))
    if html:
        with writing("--html", html):
            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(page(loaded, single), encoding="utf-8")
        click.echo(f"page: {html}", err=as_json)
    if csv:
        with writing("--csv", csv):
            paths = write_csv(loaded, csv)
        click.echo(f"tables: {', '.join(path.name for path in paths)} in {csv}", err=as_json)
