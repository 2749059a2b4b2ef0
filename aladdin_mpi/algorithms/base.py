"""The contract of an algorithm: one file, one line in the registry.

An algorithm is a frozen :class:`Algorithm` naming its topology, its options (a frozen dataclass
that checks itself), a :class:`Worker` and, with servers, a :class:`Server`.  The worker decides
whether and when the local optimizer runs.  The server is pure: a push in, instructions out; to
whom it replies *is* the synchronization policy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, Protocol

from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import LocalUpdate
from aladdin_mpi.errors import CheckpointError, ConfigError
from aladdin_mpi.messages import Action, Push

__all__ = [
    "Algorithm",
    "Server",
    "Stateful",
    "Topology",
    "Worker",
    "check",
    "choose",
    "fill",
    "flag",
    "option",
]

State = dict[str, Any]


class Topology(Enum):
    """Who talks to whom: workers to servers, all together, or worker to worker."""

    SERVER = "server"
    COLLECTIVE = "collective"
    PEER = "peer"


class Worker(Protocol):
    """A worker's half of an algorithm; one object per optimizer.

    ``port`` is a :class:`~aladdin_mpi.core.port.Port` where there is a server, else a
    :class:`~aladdin_mpi.core.port.PeerPort`.
    """

    def step(
        self, params: FlatParams, local_update: LocalUpdate, port: Any, iteration: int
    ) -> None:
        """One call of the user's ``optimizer.step()``; gradients are complete."""

    def before_forward(self, params: FlatParams) -> None:
        """Called before the next forward pass."""

    def finish(self, params: FlatParams, port: Any) -> None:
        """With a server: push what has not been pushed yet, marked as the last push; may wait for
        a free slot.  Without: end together with the others, all with the same parameters.
        """

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


class Server(Protocol):
    """A server's half: pure decisions.  No MPI, no clock, no files."""

    def on_push(self, push: Push) -> list[Action]:
        """What to do with a push that has arrived."""

    def on_leave(self, worker: int) -> list[Action]:
        """A worker trains no longer (its last push was handled before)."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


def option(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    """A field of an algorithm's ``Config``: its default, one line of help, the values allowed."""
    return field(default=default, metadata={"help": help, "choices": choices})


def flag(name: str) -> str:
    """How a field is written on the command line."""
    return "--" + name.replace("_", "-")


def check(config: object, name: str, condition: bool, allowed: str) -> None:
    """Raise a one-line :class:`ConfigError` unless ``condition`` holds for field ``name``."""
    if not condition:
        raise ConfigError(f"{flag(name)} {getattr(config, name)}: {allowed}")


def choose(config: Any) -> None:
    """Check every field with choices against them."""
    for spec in fields(config):
        given, choices = getattr(config, spec.name), spec.metadata.get("choices")
        if choices and given is not None:
            check(config, spec.name, given in choices, "choose from " + ", ".join(choices))


def fill(config: Any, presets: dict[str, dict[str, Any]]) -> None:
    """Complete a frozen configuration in its ``__post_init__``.

    Every field with choices is checked against them; then those that are None take the value of
    the preset that ``config.preset`` names.
    """
    choose(config)
    for name, value in presets[config.preset].items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, value)


class Stateful:
    """What most halves share: a state of the attributes named in ``STATE``, and nothing to do
    before a forward pass or when a worker leaves.

    The state is what a later step depends on after a restart, at which no message is on its way:
    numbers of messages and waiting workers do not belong to it.
    """

    STATE: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> State:
        parts = {name: getattr(self, name) for name in self.STATE}
        return {
            name: part.state_dict() if isinstance(part, Stateful) else copy.deepcopy(part)
            for name, part in parts.items()
        }

    def load_state_dict(self, state: State) -> None:
        lacking = [name for name in self.STATE if name not in state]
        if lacking:
            raise CheckpointError(
                "--resume: the checkpoint was made with another version of the algorithm (it lacks "
                f"{', '.join(lacking)}): go on with that version, or start anew with another --out"
            )
        for name in self.STATE:
            part = getattr(self, name)
            if isinstance(part, Stateful):
                part.load_state_dict(state[name])
            else:
                setattr(self, name, copy.deepcopy(state[name]))

    def before_forward(self, params: FlatParams) -> None:
        """The gradient is taken at the local parameters as they are."""

    def on_leave(self, worker: int) -> list[Action]:
        """Nobody waits for a worker that has left."""
        return []


@dataclass(frozen=True)
class Algorithm:
    """One row of the registry.

    Attributes
    ----------
    name, summary, source : str
        What it is called on the command line, in one line, and the paper.
    topology : Topology
    config : type
        Frozen dataclass of its options; constructing it checks them.
    worker : callable
        ``worker(config, params, num_workers) -> Worker``.
    server : callable or None
        ``server(config, num_workers) -> Server``.
    traits : frozenset of str
        Properties that the runtime relies on and the conformance tests hold it to:

        - ``equals_sgd_at_one_worker``: one worker makes the steps of its local optimizer.
        - ``keeps_the_mean``: communication alone does not change the mean of what all hold;
          ``keeps_the_sum``: nor the sum of the workers' parameters and the server's.
        - ``lockstep``: all workers make as many iterations, so that they share data evenly.
        - ``server_applies``: the server steps with SGD; the workers' optimizer must be SGD.
        - ``synchronous``: n workers make the steps of one with the joined batch.
        - ``waits_for_answers``: a worker waits for the answer to every push, and for nobody else.
        - ``waits_for_stragglers``: a slow worker slows all others down.
    """

    name: str
    summary: str
    source: str
    topology: Topology
    config: type
    worker: Callable[..., Worker]
    server: Callable[..., Server] | None = None
    traits: frozenset[str] = frozenset()

    TRAITS: ClassVar[frozenset[str]] = frozenset(
        {
            "equals_sgd_at_one_worker",
            "keeps_the_mean",
            "keeps_the_sum",
            "lockstep",
            "server_applies",
            "synchronous",
            "waits_for_answers",
            "waits_for_stragglers",
        }
    )

    def __post_init__(self) -> None:
        assert self.traits <= self.TRAITS, self.traits - self.TRAITS
