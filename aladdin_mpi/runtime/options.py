"""Options of an algorithm, from what a user wrote to the algorithm's checked configuration."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from aladdin_mpi.algorithms import REGISTRY, find
from aladdin_mpi.algorithms.base import Algorithm, Topology, flag
from aladdin_mpi.comm.libraries import horovod_problem
from aladdin_mpi.core.encoding import Dgc, TopK
from aladdin_mpi.core.encoding import find as find_encoding
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.runtime.cuts import Plan
from aladdin_mpi.runtime.sharded import Sharding

__all__ = [
    "check_merging",
    "check_plan",
    "check_sharding",
    "check_slow",
    "check_wire",
    "configure",
    "option_names",
    "option_type",
]

_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_EXPECTED = {int: "must be a whole number", float: "must be a number", bool: "must be yes or no"}


def option_names() -> list[str]:
    """The options of all algorithms, each name once."""
    return list(dict.fromkeys(f.name for a in REGISTRY.values() for f in fields(a.config)))


def option_type(config: type, name: str) -> type:
    """The type of a field of an algorithm's ``Config``, without its None."""
    hint = get_type_hints(config)[name]
    if get_origin(hint) in (Union, UnionType):
        return next(part for part in get_args(hint) if part is not NoneType)
    return hint


def configure(algorithm: str, given: Mapping[str, object]) -> Any:
    """Make the configuration of an algorithm.

    Parameters
    ----------
    algorithm : str
        A name of the registry.
    given : mapping
        Values by option name, of the right type or as text.

    Returns
    -------
    dataclass
        The algorithm's frozen ``Config``.

    Raises
    ------
    ConfigError
        No such algorithm or option, or a value that is not allowed.
    """
    config = find(algorithm).config
    known = [f.name for f in fields(config)]
    values: dict[str, object] = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f"{flag(name)}: is no option of --algorithm {algorithm}{_advice(name, known)}"
            )
        optional = NoneType in get_args(get_type_hints(config)[name])
        values[name] = (
            None
            if value is None and optional
            else _convert(flag(name), value, option_type(config, name))
        )
    made = config(**values)
    if getattr(made, "backend", None) == "auto":
        made = replace(made, backend="horovod" if horovod_problem() is None else "mpi")
    return made


def check_slow(given: Mapping[Any, Any]) -> dict[int, float]:
    """Factors by worker, checked.

    Raises
    ------
    ConfigError
    """
    found: dict[int, float] = {}
    for index, factor in given.items():
        try:
            found[int(index)] = float(factor)
            good = int(index) >= 0 and 1 <= float(factor) < math.inf
        except (TypeError, ValueError):
            good = False
        if not good:
            raise ConfigError(
                f"--slow-worker {index}:{factor}: give INDEX:FACTOR, a worker from 0 and a factor "
                "of at least 1, such as 3:10"
            )
    return found


def check_plan(
    epochs: float, iterations: int, minutes: float, keep: int, time_limit: float
) -> Plan:
    """When to make checkpoints, checked.

    Raises
    ------
    ConfigError
    """
    for name, value, least in (
        ("checkpoint_epochs", epochs, 0), ("checkpoint_iterations", iterations, 0),
        ("checkpoint_minutes", minutes, 0), ("checkpoint_keep", keep, 1),
        ("time_limit", time_limit, 0),
    ):  # fmt: skip
        if not (isinstance(value, int | float) and value >= least and math.isfinite(value)):
            raise ConfigError(f"{flag(name)} {value}: must be a number of at least {least}")
    return Plan(float(epochs), int(iterations), float(minutes), int(keep), float(time_limit))


def check_sharding(
    algorithm: Algorithm, servers: int, max_bytes: int, by: str, placement: str
) -> Sharding:
    """How the parameters are shared out among servers, checked.

    Raises
    ------
    ConfigError
    """
    for name, value, least in (("servers", servers, 1), ("max_shard_bytes", max_bytes, 0)):
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{flag(name)} {value}: must be a whole number of at least {least}")
    if algorithm.topology is not Topology.SERVER and servers > 1:
        raise ConfigError(
            f"--servers {servers}: --algorithm {algorithm.name} has no server; leave it out"
        )
    if by == "layer" and max_bytes:
        raise ConfigError(
            f"--max-shard-bytes {max_bytes}: --shard-by layer keeps layers whole; leave out one"
        )
    return Sharding(servers, max_bytes, by, placement)


def check_wire(algorithm: Algorithm, config: Any, wire: str) -> str:
    """How pushes are encoded, checked.

    Raises
    ------
    ConfigError
    """
    encoding = find_encoding(wire)
    if wire != "float32" and algorithm.topology is not Topology.SERVER:
        raise ConfigError(
            f"--wire {wire}: --algorithm {algorithm.name} has no server; leave it out"
        )
    push = getattr(config, "push", "gradient" if "server_applies" in algorithm.traits else "")
    if isinstance(encoding, TopK) and push != "update":
        raise ConfigError(
            f"--wire {wire}: what is not sent would be lost where no updates are pushed; use "
            "--wire dgc:FRACTION for gradients, --algorithm aladdin --push update, or --wire "
            "bfloat16"
        )
    if isinstance(encoding, Dgc) and push != "gradient":
        raise ConfigError(
            f"--wire {wire}: is for pushed gradients (asp, bsp, ssp, dssp, shat, aladdin --push "
            "gradient); use --wire topk:FRACTION for aladdin --push update, or --wire bfloat16"
        )
    return wire


def check_merging(algorithm: Algorithm, config: Any, wire: str, merge: bool) -> bool:
    """Whether nodes merge the pushes of their workers, checked.

    Raises
    ------
    ConfigError
    """
    if merge and algorithm.topology is not Topology.SERVER:
        raise ConfigError(
            f"--merge-on-node: --algorithm {algorithm.name} has no server; leave it out"
        )
    if merge and isinstance(find_encoding(wire), Dgc):
        raise ConfigError(
            f"--merge-on-node: --wire {wire} keeps what every worker has not sent by itself; use "
            "--wire bfloat16, or leave one of them out"
        )
    if merge and getattr(config, "push", "update") != "update":
        raise ConfigError(
            f"--merge-on-node: --algorithm {algorithm.name} --push {config.push} counts every "
            "worker's gradients by themselves; use --push update, or leave it out"
        )
    return bool(merge)


def _convert(where: str, value: object, kind: type) -> object:
    """``value`` as ``kind``; a :class:`ConfigError` where it cannot be one."""
    try:
        if kind is bool:
            return value if isinstance(value, bool) else _TRUTH[str(value).lower()]
        if kind is str:
            return str(value)
        if isinstance(value, bool) or kind not in (int, float):
            raise ValueError
        number = float(str(value))
        if not math.isfinite(number) or (kind is int and number != int(number)):
            raise ValueError
        return int(number) if kind is int else number
    except (KeyError, ValueError):
        allowed = _EXPECTED.get(kind, f"must be of type {kind.__name__}")
        raise ConfigError(f"{where} {value}: {allowed}") from None


def _advice(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {flag(near[0])}?" if near else "; it has " + ", ".join(map(flag, known))
