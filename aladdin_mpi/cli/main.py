"""``aladdin-mpi``: the group of commands, each imported only when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import click

from aladdin_mpi._version import __version__
from aladdin_mpi.cli import errors

__all__ = ["main"]

COMMANDS = {
    "train": ("aladdin_mpi.cli.train", "train", "Train a model; start it with mpiexec."),
    "algorithms": ("aladdin_mpi.cli.algorithms", "algorithms", "List the algorithms."),
    "report": ("aladdin_mpi.cli.report", "report", "Say how a run went."),
    "compare": ("aladdin_mpi.cli.compare", "compare", "Put several runs side by side."),
    "salvage": ("aladdin_mpi.cli.salvage", "salvage", "Save what can be read of damaged logs."),
    "slurm": ("aladdin_mpi.cli.slurm", "slurm", "Make a job for Slurm, and submit it."),
    "simulate": ("aladdin_mpi.cli.simulate", "simulate", "Say what to expect of links."),
    "timeline": ("aladdin_mpi.cli.timeline", "timeline", "Write a trace of a run, for Perfetto."),
    "watch": ("aladdin_mpi.cli.watch", "watch", "Show how a run in progress goes."),
    "doctor": ("aladdin_mpi.cli.doctor", "doctor", "Check this machine's installation."),
}
"""Name: module, attribute, one line of help."""


class LazyGroup(click.Group):
    """A group whose help imports none of its commands, and whose errors are single lines."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = "aladdin-mpi",
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line; see :func:`aladdin_mpi.cli.errors.run`."""

        def command() -> object:
            return super(LazyGroup, self).main(args, prog_name, complete_var, False, **extra)

        return errors.run(command) if standalone_mode else command()


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="aladdin-mpi", message="%(prog)s %(version)s")
def main() -> None:
    """Data-parallel training of PyTorch models over MPI, in which workers never wait.

    \b
    mpiexec -n 5 aladdin-mpi train --dataset digits --model mlp    # a server, four workers
    aladdin-mpi train --help                                       # all options
    """
