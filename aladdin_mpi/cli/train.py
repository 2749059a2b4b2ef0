"""``aladdin-mpi train``: its flags are :class:`RunConfig`'s fields and the algorithms' options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import click

from aladdin_mpi.algorithms import REGISTRY
from aladdin_mpi.algorithms.base import flag
from aladdin_mpi.cli.errors import single_host
from aladdin_mpi.config import RunConfig
from aladdin_mpi.runtime.folder import check_out
from aladdin_mpi.runtime.options import configure, option_names, option_type
from aladdin_mpi.runtime.train import check
from aladdin_mpi.runtime.train import train as run

__all__ = ["parse", "train"]

FROM_FILE = "config_file"


class FlagOption(click.Option):
    """An option that belongs to a section of the help; its text is checked by the configuration."""

    def __init__(self, names: list[str], section: str, **settings: Any) -> None:
        super().__init__(names, default=None, **settings)
        self.section = section


class TrainCommand(click.Command):
    """A command whose help has sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                section = getattr(parameter, "section", "Help")
                sections.setdefault(section, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _option(
    name: str, section: str, help: str, is_flag: bool, values: str, show: object
) -> FlagOption:
    default = "" if show is None or show == "" else f"  [{show}]"
    if is_flag:
        names = f"{flag(name)}/{flag('no_' + name)}"
        return FlagOption([name, names], section, help=help + default)
    return FlagOption([name, flag(name)], section, help=help + default, metavar=values, type=str)


def _run_options() -> Iterator[FlagOption]:
    """A flag for each field of the run's configuration."""
    for name, field in RunConfig.model_fields.items():
        if name == "algorithm_options":
            continue
        extra = field.json_schema_extra
        assert isinstance(extra, dict), name
        kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,))]
        words = [kind for kind in kinds if isinstance(kind, str)]
        show = field.default
        if isinstance(show, bool):
            show = "yes" if show else "no"
        elif isinstance(show, tuple):
            show = ",".join(map(str, show))
        if name == "milestones":
            values = "A,B,…"
        elif name == "algorithm":
            values = "|".join(sorted(REGISTRY))
        elif words:
            values = "|".join(words)
        else:
            values = {int: "N", float: "X", Path: "PATH"}.get(kinds[0], "NAME")
        help, group = str(field.description), str(extra["group"])
        if name == "slow_worker":
            yield FlagOption(
                [name, flag(name)], group, help=f"{help}; may be given again",
                metavar="INDEX:FACTOR", multiple=True,
            )  # fmt: skip
            continue
        yield _option(name, group, help, field.annotation is bool, values, show)


def _algorithm_options() -> Iterator[FlagOption]:
    """A flag for each option of an algorithm; one that several have is shown once."""
    for name in option_names():
        of = {
            key: (algorithm.config, spec)
            for key, algorithm in REGISTRY.items()
            for spec in fields(algorithm.config)
            if spec.name == name
        }
        assert name not in RunConfig.model_fields, f"{name} is an option of the run, too"
        kinds = {option_type(config, name) for config, _ in of.values()}
        assert len({kind is bool for kind in kinds}) == 1, f"{name} is a switch in some algorithms"
        spec = next(iter(of.values()))[1]
        values = "|".join(spec.metadata.get("choices", ())) or (
            "N" if kinds == {int} else "X" if kinds <= {int, float} else "TEXT"
        )
        shown = [
            f"{key}: {_yes_no(spec.default)}" if len(REGISTRY) > 1 else _yes_no(spec.default)
            for key, (_, spec) in of.items()
            if spec.default is not None
        ]
        title = "Options of " + ", ".join(of)
        help = str(spec.metadata.get("help", ""))
        yield _option(name, title, help, kinds == {bool}, values, ", ".join(shown))


def _yes_no(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def parse(arguments: Sequence[str]) -> RunConfig:
    """Check arguments without training: those of the run and of its algorithm.

    Raises
    ------
    ConfigError, click.UsageError
    """
    config = _config(**train.make_context("train", list(arguments)).params)
    configure(config.algorithm, config.algorithm_options)
    return config


def _config(config_file: str | None, **flags: object) -> RunConfig:
    slow = flags["slow_worker"]
    assert isinstance(slow, tuple)
    flags["slow_worker"] = " ".join(slow) or None
    return RunConfig.build(flags, Path(config_file) if config_file else None, option_names())


def _run(**flags: Any) -> None:
    config = _config(**flags)
    options = configure(config.algorithm, config.algorithm_options)
    check(config)
    one_host = single_host()
    if one_host:  # on several the ranks could disagree, and some would wait for ever
        check_out(config.out, bool(config.resume))
    run(config, options, one_host)


train = TrainCommand(
    "train",
    callback=_run,
    help="""Train a model on a data set.

    Start it with the MPI's launcher.  With a server, one of the ranks of mpiexec -n 5 serves and
    four train; algorithms without one train on all (aladdin-mpi algorithms tells).
    What is given neither here nor in the file has the default in brackets.
    """,
    params=[
        FlagOption(
            [FROM_FILE, "--config"], "Help", metavar="FILE",
            help="YAML or TOML file with the names below as keys; flags win over it",
        ),
        *_run_options(),
        *_algorithm_options(),
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)  # fmt: skip
