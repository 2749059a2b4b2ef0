"""``aladdin-mpi algorithms``: what there is to choose from, with options, or one of it whole."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from aladdin_mpi.algorithms import REGISTRY, find
from aladdin_mpi.algorithms.base import Algorithm, Topology, flag
from aladdin_mpi.runtime.options import option_names, option_type

__all__ = ["algorithms"]

WIDTH = 60
"""Columns below which a terminal wraps the lines itself."""

WORKERS = 4
"""Workers of the example of how to start."""


@click.command(
    help="""List the algorithms and their options, or show NAME with its update rule.

    NAME is one of the list, or your own, package.module:ATTRIBUTE.  Where there is a server, it
    takes one rank more than there are workers.
    """
)
@click.argument("name", required=False)
def algorithms(name: str | None) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    with console.capture() as shown:
        for key in [name] if name else REGISTRY:
            _print(console, key, find(key))
        if name:
            _print_rule(console, name)
    console.out(re.sub(" +$", "", shown.get(), flags=re.MULTILINE), highlight=False, end="")


def _print(console: Console, key: str, row: Algorithm) -> None:
    """Name, topology, summary, source and options."""
    served = row.topology is Topology.SERVER
    where = f"  {row.topology.value}{'' if served else ' (no server)'}"
    start = f"; {WORKERS} workers: mpiexec -n {WORKERS + served}"
    console.print(Text.assemble((key, "bold cyan"), where, start))
    console.print(Padding(Text(row.summary), (0, 0, 0, 2)))
    if "server_applies" in row.traits:
        console.print(Padding(Text("the optimizer must be torch.optim.SGD"), (0, 0, 0, 2)))
    console.print(Padding(Text(row.source, "dim"), (0, 0, 0, 2)))
    table = Table.grid(padding=(0, 2, 0, 0))
    for cells in _options(row):
        table.add_row(*cells)
    if table.row_count:
        console.print(Padding(table, (0, 0, 0, 4)))
    else:
        console.print(Padding(Text("no options"), (0, 0, 0, 4)))
    console.print()


def _options(row: Algorithm) -> Iterator[tuple[Text, Text, Text]]:
    """Flag, default, and help with the values allowed."""
    flags = option_names()
    for spec in fields(row.config):
        is_switch = option_type(row.config, spec.name) is bool
        help = Text(str(spec.metadata.get("help", "")))
        choices = spec.metadata.get("choices", ())
        if choices:
            help.append(f" ({', '.join(choices)})")
        if spec.name not in flags:
            help.append(" (no flag: below algorithm_options in a file)")
        elif is_switch:
            help.append(f" (or {flag('no_' + spec.name)})")
        name = flag(spec.name) if spec.name in flags else spec.name
        yield Text(name, "green"), Text(_show(spec.default)), help


def _show(default: object) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return "" if default is None else str(default)


def _print_rule(console: Console, key: str) -> None:
    """What the algorithm's module says of itself."""
    module, colon, _ = key.partition(":")
    text = importlib.import_module(module if colon else find(key).config.__module__).__doc__
    if text:
        console.print(Text(inspect.cleandoc(text)), soft_wrap=True)
