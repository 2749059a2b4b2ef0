"""``aladdin-mpi simulate --train``: options of the training, and its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from aladdin_mpi.config import RunConfig
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.simulation.setting import Setting

if TYPE_CHECKING:
    from rich.table import Table

    from aladdin_mpi.simulation.training import Trained

__all__ = ["TRAINING", "Runs", "training_options", "virtual_table"]

TRAINING = (
    "dataset", "data_dir", "model", "batch_size", "epochs", "lr", "momentum", "weight_decay",
    "nesterov", "lr_scaling", "warmup_epochs", "milestones", "gamma",
)  # fmt: skip
"""Options of ``aladdin-mpi train`` that have the same meaning here."""

Command = TypeVar("Command", bound=Callable[..., Any])


def training_options(command: Command) -> Command:
    """Give a command the options named in :data:`TRAINING`; the configuration checks their text."""
    for name in reversed(TRAINING):
        spec = RunConfig.model_fields[name]
        default = "" if spec.default in (None, (), False) else f"  [{spec.default}]"
        help = f"--train: {spec.description}{default}"
        flag = "--" + name.replace("_", "-")
        if spec.annotation is bool:
            option = click.option(flag, name, is_flag=True, default=None, help=help)
        else:
            option = click.option(flag, name, type=str, metavar="VALUE", help=help)
        command = option(command)
    return command


@dataclass(frozen=True)
class Runs:
    """What is to be trained.

    Attributes
    ----------
    config : RunConfig
        Data, model, optimizer, schedule.
    options : dict of str to str
        Options of the algorithms, each for those that have it.
    own_payload : bool
        The payload is the model's own, not the setting's.
    """

    config: RunConfig
    options: dict[str, str]
    own_payload: bool

    def train(
        self, base: Setting, workers: Sequence[int], servers: Sequence[int], names: Sequence[str]
    ) -> list[Trained]:
        """Train every case; those without servers once per number of workers.

        Raises
        ------
        ConfigError, DataError
        """
        from aladdin_mpi.algorithms import find
        from aladdin_mpi.algorithms.base import Topology
        from aladdin_mpi.core.schedule import Schedule
        from aladdin_mpi.simulation.replicas import Task
        from aladdin_mpi.simulation.training import train
        from aladdin_mpi.workload.data import load_dataset
        from aladdin_mpi.workload.models import build_model

        c = self.config
        chosen = [(find(name), self._configure(name)) for name in names]
        self._check_options(names)
        bundle = load_dataset(c.dataset, c.data_dir, c.seed)

        def build() -> Any:
            return build_model(c.model, bundle.input_shape, bundle.num_classes, c.seed)

        if self.own_payload:
            base = replace(base, payload_bytes=4.0 * sum(p.numel() for p in build().parameters()))
        found = []
        for n in workers:
            schedule = Schedule(
                c.lr, n, c.lr_scaling, c.warmup_epochs, tuple(c.milestones), c.gamma
            )
            task = Task(
                build, bundle.train, bundle.test, c.batch_size, c.epochs, schedule, c.momentum,
                c.weight_decay, c.nesterov, c.seed,
            )  # fmt: skip
            for algorithm, config in chosen:
                for count in servers if algorithm.topology is Topology.SERVER else servers[:1]:
                    shards = base.shards if base.shards > base.servers else 0
                    setting = replace(base, num_workers=n, servers=count, shards=shards)
                    found.append(train(setting, algorithm, config, task))
        return found

    def _configure(self, name: str) -> Any:
        from aladdin_mpi.algorithms import find
        from aladdin_mpi.runtime.options import configure

        known = {field.name for field in fields(find(name).config)}
        given: dict[str, object] = {k: v for k, v in self.options.items() if k in known}
        if "backend" in known:
            given["backend"] = "mpi"  # all of them are the same sum here
        config = configure(name, given)
        if getattr(config, "adascale", False):
            raise ConfigError("--set adascale: is not simulated; leave it out")
        return config

    def _check_options(self, names: Sequence[str]) -> None:
        from aladdin_mpi.algorithms import find

        known = {field.name for name in names for field in fields(find(name).config)}
        for name, value in self.options.items():
            if name not in known:
                raise ConfigError(
                    f"--set {name}={value}: none of {', '.join(names)} has this option; "
                    "aladdin-mpi algorithms lists them"
                )


def virtual_table(trained: Sequence[Trained], number: Callable[[float], str]) -> Table:
    """Accuracy and timing of each training."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("workers", "algorithm", "servers", "accuracy", "seconds", "step ms", "speed-up",
                 "per push", "staleness", "reply age", "thrown away"):  # fmt: skip
        table.add_column(name, justify="left" if name == "algorithm" else "right", no_wrap=True)
    for one in trained:
        o, last = one.outcome, one.evaluations[-1]
        table.add_row(
            str(o.workers), o.algorithm, str(o.servers or "–"), f"{last.accuracy:.4f}",
            number(last.time_s), number(1e3 * o.step_s), number(o.speedup),
            number(o.iterations_per_push), number(o.staleness), number(o.reply_age),
            str(one.thrown_away),
        )  # fmt: skip
    return table
