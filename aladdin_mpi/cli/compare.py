"""``aladdin-mpi compare``: several runs side by side."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aladdin_mpi.cli.errors import writing

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

__all__ = ["compare"]

SHARES = ("accuracy", "blocked")


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--within", type=click.FloatRange(0, min_open=True),
              help="seconds, for 'accuracy in'  [the quickest run's]")  # fmt: skip
@click.option("--accuracy", type=click.FloatRange(0, 1),
              help="0 to 1, for 'seconds to'  [what all reached]")  # fmt: skip
@click.option("--csv", type=click.Path(path_type=Path), help="also write the table to this file")
@click.option("--figures", type=click.Path(path_type=Path), help="also draw into this folder")
@click.option("--format", "kind", type=click.Choice(["svg", "png", "pdf"]), default="svg",
              show_default=True, help="of the figures")  # fmt: skip
def compare(
    runs: tuple[Path, ...],
    within: float | None,
    accuracy: float | None,
    csv: Path | None,
    figures: Path | None,
    kind: str,
) -> None:
    """Put RUNS (folders) side by side; those that differ in the seed only are one row."""
    from rich.console import Console

    from aladdin_mpi.analysis import load_run
    from aladdin_mpi.analysis.compare import slow_downs, summary

    loaded = [load_run(run) for run in runs]
    console = Console(highlight=False)
    table = summary(loaded, within, accuracy)
    console.print(_table(table))
    slow = slow_downs(loaded)
    if len(slow):
        console.print("\nSamples per second with one worker slower, over those with all alike")
        console.print(_slow_table(slow))
    for run in loaded:
        for note in run.notes:
            console.print(f"{run.name}: {note}")
    if csv:
        with writing("--csv", csv):
            csv.parent.mkdir(parents=True, exist_ok=True)
            flat = table.copy()
            flat.columns = [" ".join(filter(None, names)) for names in table.columns]
            flat.to_csv(csv, index_label="configuration")
        console.print(f"table: {csv}")
    if figures:
        from aladdin_mpi.analysis import figures as drawing

        with writing("--figures", figures):
            figures.mkdir(parents=True, exist_ok=True)
            for name in drawing.ACROSS_RUNS:
                path = figures / f"{name}.{kind}"
                getattr(drawing, name)(loaded).savefig(path, dpi=150, bbox_inches="tight")
                console.print(f"figure: {path}")


def _table(frame: pd.DataFrame) -> Table:
    from rich.table import Table

    names = list(dict.fromkeys(name for name, _ in frame.columns))
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", min_width=20)
    for name in names:
        table.add_column(name, justify="right")
    for label, row in frame.iterrows():
        cells = [f"{int(row['runs', ''])}"]
        cells += [_figure(name, row[name, "mean"], row[name, "sd"]) for name in names[1:]]
        table.add_row(str(label), *cells)
    return table


def _figure(name: str, mean: float, deviation: float) -> str:
    if math.isnan(mean):
        return "–"
    share = name.startswith(SHARES)
    scale, digits = (100.0, 1) if share else (1.0, 2 if mean < 100 else 0)
    text = f"{scale * mean:.{digits}f}"
    if not math.isnan(deviation):
        text += f" ± {scale * deviation:.{digits}f}"
    return text + (" %" if share else "")


def _slow_table(frame: pd.DataFrame) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for factor in frame.columns:
        table.add_column("all alike" if factor == 1 else f"×{factor:g}", justify="right")
    for label, row in frame.iterrows():
        table.add_row(str(label), *("–" if math.isnan(v) else f"{v:.2f}" for v in row))
    return table
