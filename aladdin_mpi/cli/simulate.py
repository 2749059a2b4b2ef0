"""``aladdin-mpi simulate``: what to expect of links and algorithms, before there is a cluster."""

from __future__ import annotations

import csv as csv_module
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aladdin_mpi.cli.errors import writing
from aladdin_mpi.cli.virtual import TRAINING, Runs, training_options, virtual_table
from aladdin_mpi.config import RunConfig
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.simulation.answers import ALGORITHMS, advice, sweep
from aladdin_mpi.simulation.outcome import Outcome
from aladdin_mpi.simulation.setting import DISTRIBUTIONS, IN_FLIGHT, Setting

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["simulate"]

WIDTH = 110
"""Columns below which a terminal wraps the lines itself."""

PRICE = "Iterations are counted here, not what they are worth: staleness has a price (--train)."

GIGABIT = 1e9 / 8
POSITIVE = click.FloatRange(0, min_open=True)
NOT_NEGATIVE = click.FloatRange(0)


class Numbers(click.ParamType):
    """Whole numbers of at least 1, separated by commas."""

    name = "N,N,…"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(int(part) for part in value.replace(",", " ").split())
        except ValueError:
            found = ()
        if not found or min(found) < 1:
            raise ConfigError(
                f"{param.opts[0]} {value}: must be whole numbers of at least 1, such as 4,8,16"
            )
        return found


@click.command()
@click.option("--from-run", type=click.Path(path_type=Path),
              help="folder of a run whose log tells what is not given here")  # fmt: skip
@click.option("--workers", type=Numbers(), help="how many; several: rows for each  [8]")
@click.option("--servers", type=Numbers(), help="ditto  [1, 2, 4, … until their links carry all]")
@click.option("--algorithm", "algorithms", multiple=True, metavar="|".join(ALGORITHMS),
              help="may be given again; with --train any of them  [these]")  # fmt: skip
@click.option("--payload", type=POSITIVE, help="parameters as they travel, in MB  [32]")
@click.option("--rate", type=POSITIVE, help="of a server's link, each way, in Gb/s  [10]")
@click.option("--worker-rate", type=POSITIVE, help="of a worker's link  [as a server's]")
@click.option("--latency", type=NOT_NEGATIVE, help="of a message, in ms  [0.05]")
@click.option("--reply-latency", type=NOT_NEGATIVE, help="of a reply, in ms  [as --latency]")
@click.option("--overhead", type=NOT_NEGATIVE,
              help="of a push beside transfer and merge, in ms  [1]")  # fmt: skip
@click.option("--merge-rate", type=POSITIVE, help="what a server merges, in GB/s  [10]")
@click.option("--shards", type=click.IntRange(1), help="parts of the parameters  [one per server]")
@click.option("--compute", type=POSITIVE, help="an iteration without communication, in ms  [100]")
@click.option("--distribution", type=click.Choice(DISTRIBUTIONS),
              help="of its times  [normal]")  # fmt: skip
@click.option("--spread", type=NOT_NEGATIVE, help="their standard deviation over the mean  [0.05]")
@click.option("--slow-worker", multiple=True, metavar="INDEX:FACTOR",
              help="computes FACTOR times as long; may be given again")  # fmt: skip
@click.option("--period", type=click.IntRange(1), help="iterations between two replies  [4]")
@click.option("--in-flight", type=click.Choice(IN_FLIGHT),
              help="pushes of a worker on their way (aladdin)  [auto]")  # fmt: skip
@click.option("--overlap", type=click.FloatRange(0, 1),
              help="share of computing while gradients travel (bsp, asp, arsgd)  [0]")  # fmt: skip
@click.option("--iterations", type=click.IntRange(8), help="of a worker  [64 to 2000]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--train", "trains", is_flag=True,
              help="train in virtual time, and compare accuracies")  # fmt: skip
@training_options
@click.option("--set", "sets", multiple=True, metavar="NAME=VALUE",
              help="--train: an option of an algorithm; may be given again")  # fmt: skip
@click.option("--csv", "csv_path", type=click.Path(path_type=Path),
              help="also write the table to this file")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="print the figures as JSON instead")
def simulate(
    from_run: Path | None,
    workers: tuple[int, ...] | None,
    servers: tuple[int, ...] | None,
    algorithms: tuple[str, ...],
    trains: bool,
    sets: tuple[str, ...],
    csv_path: Path | None,
    as_json: bool,
    seed: int,
    **given: Any,
) -> None:
    """Simulate workers, servers and the links between them; needs no MPI.

    Prints, for each algorithm, the time of a step, the speed-up over one worker, how full the links
    are, how stale a push is, and how many servers the model needs.  With --train it also trains, in
    the same virtual time, with the algorithms' own code.
    """
    training = {name: given.pop(name) for name in TRAINING}
    names = algorithms or tuple(ALGORITHMS)
    runs = _runs(training, sets, given, seed, not from_run) if trains else None
    if runs is None:
        _check_timing(names, training, sets)
    found: dict[str, Any] = {}
    measured: list[Outcome] = []
    if from_run:
        from aladdin_mpi.cli.calibrate import calibrate

        run = calibrate(from_run)
        found, measured = dict(run.values), [run.measured]
        if run.notes and (given["payload"] is None or given["rate"] is None):
            raise ConfigError(f"--from-run {from_run}: {run.notes[0]}")
        if workers is not None:
            del found["slow"]
        workers, servers = workers or (run.num_workers,), servers or (run.servers,)
    base = _setting(found, given, seed)
    workers = workers or (8,)
    if runs is None:
        outcomes = sweep(base, workers, servers or (), names)
        lines = [*advice(base, outcomes), PRICE]
        outcomes = measured + outcomes
        rows: list[dict[str, Any]] = [outcome.to_json() for outcome in outcomes]
        table = _table(outcomes)
    else:
        trained = runs.train(base, workers, servers or (1,), names)
        lines = []
        rows = [one.to_json() for one in trained]
        table = virtual_table(trained, _number)
    _show(base, table, rows, lines, as_json)
    if csv_path:
        _write(csv_path, rows)
        click.echo(f"table: {csv_path}", err=as_json)


def _check_timing(names: Sequence[str], training: dict[str, Any], sets: Sequence[str]) -> None:
    """Refuse what only a training can use."""
    for name in names:
        if name not in ALGORITHMS:
            raise ConfigError(
                f"--algorithm {name}: its timing is not modelled; choose from "
                f"{', '.join(ALGORITHMS)}, or give --train"
            )
    for name, value in training.items():
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: needs --train")
    if sets:
        raise ConfigError(f"--set {sets[0]}: needs --train")


def _runs(
    training: dict[str, Any], sets: Sequence[str], given: dict[str, Any], seed: int, free: bool
) -> Runs:
    """What to train; ``free``: no run's log tells the payload."""
    options = {}
    for name in ("period", "in_flight"):
        if given[name] is not None:
            options[name] = str(given[name])
    for pair in sets:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {pair}: give NAME=VALUE, such as preset=paper")
        options[name.replace("-", "_")] = value
    config = RunConfig.build({**training, "seed": seed})
    return Runs(config, options, own_payload=free and given["payload"] is None)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    """A line per row; what has parts is left to JSON."""
    flat = [{k: v for k, v in row.items() if not isinstance(v, list)} for row in rows]
    with writing("--csv", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv_module.DictWriter(file, list(flat[0]))
            writer.writeheader()
            writer.writerows(flat)


DEFAULTS: dict[str, Any] = {
    "payload_bytes": 32e6, "bytes_per_s": 10 * GIGABIT, "latency_s": 5e-5, "overhead_s": 1e-3,
    "compute_s": 0.1, "distribution": "normal", "spread": 0.05,
}  # fmt: skip

UNITS: dict[str, tuple[str, float]] = {
    "payload": ("payload_bytes", 1e6), "rate": ("bytes_per_s", GIGABIT),
    "worker_rate": ("worker_bytes_per_s", GIGABIT), "latency": ("latency_s", 1e-3),
    "reply_latency": ("reply_latency_s", 1e-3), "overhead": ("overhead_s", 1e-3),
    "merge_rate": ("merge_bytes_per_s", 1e9), "compute": ("compute_s", 1e-3),
}  # fmt: skip
"""Option: field of the setting, and what its unit is there."""


def _setting(found: dict[str, Any], given: dict[str, Any], seed: int) -> Setting:
    """Defaults, what a run's log told, and options, which win over it."""
    values = DEFAULTS | found
    for name, value in given.items():
        if name == "slow_worker" or value is None:
            continue
        field, unit = UNITS.get(name, (name, None))
        values[field] = value if unit is None else value * unit
    if given["compute"] is not None or given["distribution"] or given["spread"] is not None:
        values["measured_s"] = ()
    if given["slow_worker"]:
        values["slow"] = _slow(given["slow_worker"])
    most = max(values["slow"], default=-1) + 1 if "slow" in values else 1
    return Setting(num_workers=max(most, 1), seed=seed, **values)


def _slow(pairs: Sequence[str]) -> dict[int, float]:
    found = {}
    for pair in " ".join(pairs).replace(",", " ").split():
        index, _, factor = pair.partition(":")
        try:
            found[int(index)] = float(factor)
        except ValueError:
            raise ConfigError(f"--slow-worker {pair}: give INDEX:FACTOR, such as 3:10") from None
    return found


def _show(
    base: Setting, table: Table, rows: list[dict[str, Any]], lines: list[str], as_json: bool
) -> None:
    if as_json:
        setting = {
            name: value for name, value in asdict(base).items()
            if name not in ("num_workers", "servers", "shards", "iterations", "measured_s")
        }  # fmt: skip
        click.echo(json.dumps({"setting": setting, "outcomes": rows, "answers": lines}, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True)


def _table(outcomes: list[Outcome]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("workers", "algorithm", "servers", "step ms", "speed-up", "blocked", "link in",
                 "link out", "per push", "staleness", "95 %", "reply age"):  # fmt: skip
        table.add_column(name, justify="left" if name == "algorithm" else "right", no_wrap=True)
    for o in outcomes:
        table.add_row(
            str(o.workers), o.algorithm, str(o.servers or "–"), _number(1e3 * o.step_s),
            _number(o.speedup), _percent(o.blocked), _percent(o.link_in), _percent(o.link_out),
            _number(o.iterations_per_push), _number(o.staleness), _number(o.staleness_95),
            _number(o.reply_age),
        )  # fmt: skip
    return table


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * max(value, 0.0):.0f} %"
