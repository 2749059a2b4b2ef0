"""``aladdin-mpi timeline``: a run as a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path

import click

from aladdin_mpi.cli.errors import writing

__all__ = ["timeline"]


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="where to write; compressed where it ends in .gz  [default: RUN/trace.json]",
)  # fmt: skip
@click.option("--from", "first", type=float, metavar="SECONDS", help="since the run started")
@click.option("--to", "last", type=float, metavar="SECONDS", help="since the run started")
def timeline(run: Path, output: Path | None, first: float | None, last: float | None) -> None:
    """Write a trace of RUN, a run's folder: what every rank did when, and for whom.

    Open it in https://ui.perfetto.dev or chrome://tracing.  Arrows go from pushes to merges and
    from replies to the steps that mixed them in.  Cut long runs with --from and --to.
    """
    from aladdin_mpi.analysis.load import load_run  # pandas would slow every --help down
    from aladdin_mpi.analysis.timeline import write_timeline

    found = load_run(run)
    path = output or found.path / "trace.json"
    inf = float("inf")
    with writing("-o", path):
        written = write_timeline(
            found, path, -inf if first is None else first, inf if last is None else last
        )
    arrows = ", ".join(f"{n} {kind}" for kind, n in written.arrows.items() if n) or "no"
    click.echo(f"{path}: {written.events} events of {len(found.logs)} rank(s), {arrows} arrows")
    if written.left_out:
        found.notes.append(f"{written.left_out} arrow(s) left out: clocks disagree by more")
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
