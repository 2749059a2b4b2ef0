"""``aladdin-mpi watch``: how a run in progress goes, in another terminal."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aladdin_mpi.errors import RecordError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from aladdin_mpi.analysis.guarded import GuardedWatcher
    from aladdin_mpi.analysis.watch import View

__all__ = ["watch"]

LOOK_S = 1.0
LINE_S = 5.0
"""[s] between two looks at the files, and between two lines where there is no terminal."""

OPEN_S = 2.0
"""[s] a file that a run is just creating may be unreadable."""


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="show it once, as it is now")
@click.option("--wait", is_flag=True, help="wait for a run that has not started yet")
def watch(run: Path, once: bool, wait: bool) -> None:
    """Show how RUN (a run's folder) goes, until it ends or Ctrl-C is pressed.

    It only reads: the run does not notice.  Where the output is no terminal, a line is printed
    every few seconds.
    """
    from rich.console import Console

    from aladdin_mpi.analysis.guarded import GuardedWatcher

    console = Console(highlight=False)
    try:
        with GuardedWatcher(run) as watcher:
            view = _first(watcher, run, wait)
            if once:
                console.print(_screen(view, console))
            elif console.is_terminal:
                _live(watcher, view, console)
            else:
                _lines(watcher, view)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # whoever reads the lines has enough; nor can what is left be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _first(watcher: GuardedWatcher, run: Path, wait: bool) -> View:
    """The first view, as soon as there are files."""
    began, said = time.monotonic(), False
    while True:
        try:
            return watcher.look()
        except RecordError:
            just_made = time.monotonic() - began < OPEN_S and any(run.glob("rank*.h5"))
            if not (wait or just_made):
                raise
        if wait and not said:
            said = True
            click.echo(f"waiting for the first files of {run}", err=True)
        time.sleep(LOOK_S / 4)


def _live(watcher: GuardedWatcher, view: View, console: Console) -> None:
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(_screen(view, console), refresh=True)
            if view.state != "running":
                return
            time.sleep(LOOK_S)
            view = watcher.look()


def _lines(watcher: GuardedWatcher, view: View) -> None:
    from aladdin_mpi.cli.watch_screen import line

    due = 0.0
    while True:
        if time.monotonic() >= due or view.state != "running":
            due = time.monotonic() + LINE_S
            click.echo(line(view))
        if view.state != "running":
            return
        time.sleep(LOOK_S)
        view = watcher.look()


def _screen(view: View, console: Console) -> RenderableType:
    from aladdin_mpi.cli.watch_screen import screen

    return screen(view, console, console.height - 1)
