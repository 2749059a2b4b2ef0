"""All options of a run in one validated object, from flags, a YAML or TOML file, or both.

Every field is a flag of ``aladdin-mpi train`` and a key of the file, and its description is the
flag's help.  Options of the chosen algorithm are kept as given: the algorithm checks its own.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from aladdin_mpi.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same module under its older name
    import tomli as tomllib

__all__ = ["HostError", "RunConfig", "read_file"]


class HostError(ConfigError):
    """A mistake that may be one on this host only, such as a missing file."""


def _field(group: str, default: Any, help: str, **limits: Any) -> Any:
    """A field with its group in the help, its default, one line of help and its limits."""
    return Field(default, description=help, json_schema_extra={"group": group}, **limits)


class RunConfig(BaseModel):
    """The options of a run; the descriptions of the fields say what they mean.

    :meth:`build` and :meth:`from_file` raise a :class:`ConfigError` of one line that names flag or
    key, value and what is allowed; the constructor raises pydantic's own error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dataset: str = _field(
        "Data and model",
        "digits",
        "digits, fashion-mnist, cifar10, imagefolder, synthetic, or package.module:callable",
    )
    data_dir: Path | None = _field("Data and model", None, "folder of the data set's files")
    model: str = _field(
        "Data and model",
        "mlp",
        "mlp, cnn, resnet20, vgg-small, one of torchvision's, or package.module:callable",
    )
    batch_size: int = _field("Data and model", 32, "samples in a worker's batch", ge=1)
    workers: int = _field("Data and model", 0, "loader processes per worker; 0: none", ge=0)

    algorithm: str = _field("Algorithm", "aladdin", "how the workers are synchronized")
    algorithm_options: dict[str, Any] = _field("Algorithm", {}, "the algorithm's own options")

    servers: int = _field(
        "Servers", 1, "ranks that serve, each a part of the parameters; the others are workers",
        ge=1,
    )  # fmt: skip
    max_shard_bytes: int = _field(
        "Servers", 0, "bytes of a part at most; 0: one part per server", ge=0
    )
    shard_by: Literal["memory", "layer"] = _field(
        "Servers", "memory", "cut into equal parts, or keep layers whole"
    )
    wire: str = _field(
        "Servers",
        "float32",
        "how pushes travel: float32, bfloat16, float16, topk:FRACTION (of updates) or "
        "dgc:FRACTION[:ITERATIONS] (of gradients)",
    )
    merge_on_node: bool = _field(
        "Servers", False, "on every node, one rank more merges what its workers push"
    )
    server_placement: Literal["first", "spread"] = _field(
        "Servers", "first", "the first ranks serve, or first ranks of nodes at equal distances"
    )

    epochs: float = _field("Length", 5.0, "passes of all workers together over the data", gt=0)
    max_iterations: int | None = _field("Length", None, "end after so many steps per worker", ge=1)

    optimizer: Literal["sgd", "adam", "adamw", "lars", "lamb"] = _field(
        "Optimizer", "sgd", "local optimizer"
    )
    lr: float = _field("Optimizer", 0.05, "learning rate of one worker", gt=0)
    momentum: float = _field("Optimizer", 0.9, "momentum of SGD and LARS", ge=0, lt=1)
    weight_decay: float = _field("Optimizer", 0.0, "weight decay", ge=0)
    nesterov: bool = _field("Optimizer", False, "Nesterov's momentum")
    trust_coefficient: float = _field("Optimizer", 0.001, "LARS's trust coefficient", gt=0)
    clip_norm: float | None = _field("Optimizer", None, "largest norm of the gradient", gt=0)
    accumulate: int = _field("Optimizer", 1, "batches whose gradients make one step", ge=1)

    lr_scaling: Literal["none", "linear"] = _field(
        "Schedule", "none", "linear: train at lr times the number of workers"
    )
    warmup_epochs: float = _field("Schedule", 0.0, "epochs of gradual warm-up", ge=0)
    milestones: tuple[float, ...] = _field("Schedule", (), "epochs where the rate drops: 30,60,80")
    gamma: float = _field("Schedule", 0.1, "factor of each drop", gt=0, le=1)

    seed: int = _field("Run", 0, "the seed that all others are derived from", ge=0, lt=2**63)
    out: Path | None = _field("Run", None, "folder of the run; runs/<time> when not given")
    log: bool = _field("Run", True, "write the timing of every iteration to files")
    log_variance: int = _field(
        "Run", 0, "measure how far the workers are apart, every N iterations; 0: never", ge=0
    )
    progress: Literal["auto", "bar", "lines", "off"] = _field("Run", "auto", "progress display")
    eval_every: int = _field("Run", 1, "epochs between evaluations; 0: only at the end", ge=0)
    eval_batch_size: int = _field("Run", 512, "samples in a batch of an evaluation", ge=1)
    on_nonfinite: Literal["skip", "stop"] = _field("Run", "skip", "what to do about NaN and Inf")
    stall_s: float = _field("Run", 10.0, "name a rank that is silent for so many seconds", gt=0)

    checkpoint_epochs: float = _field(
        "Checkpoints", 0.0, "make one every N passes over the data; 0: never", ge=0
    )
    checkpoint_iterations: int = _field(
        "Checkpoints", 0, "make one every N iterations of a worker; 0: never", ge=0
    )
    checkpoint_minutes: float = _field(
        "Checkpoints", 0.0, "make one every N minutes; 0: never", ge=0
    )
    checkpoint_keep: int = _field("Checkpoints", 2, "complete ones that are kept", ge=1)
    resume: str = _field(
        "Checkpoints", "", "auto (in --out, if there is one), or the folder of a run or checkpoint"
    )
    time_limit: float = _field(
        "Checkpoints", 0.0, "minutes until it stops with one, exit code 75; 0: never", ge=0
    )

    slow_worker: dict[int, float] = _field(
        "Computing", {}, "INDEX:FACTOR: sleep so that its computing takes FACTOR times as long"
    )
    threads: int | None = _field("Computing", None, "threads per rank; by its cores", ge=1)
    channels_last: bool = _field("Computing", False, "keep images in channels-last order")
    amp: Literal["none", "bf16"] = _field("Computing", "none", "automatic mixed precision")
    emulate_compute: float = _field(
        "Computing", 0.0, "milliseconds to sleep instead of forward and backward; 0: train", ge=0
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: object, info: ValidationInfo) -> object:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and annotation is not bool:
            raise ValueError("takes no yes or no")
        return value

    @field_validator("milestones", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return value.replace(",", " ").split()
        return [value] if isinstance(value, int | float) else value

    @field_validator("slow_worker", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        if isinstance(value, str):
            value = value.replace(",", " ").split()
        if isinstance(value, list | tuple):
            pairs = [str(pair).split(":") for pair in value]
            if any(len(pair) != 2 for pair in pairs):
                raise ValueError("give INDEX:FACTOR, such as 3:10")
            return {index: factor for index, factor in pairs}
        return value

    @field_validator("slow_worker")
    @classmethod
    def _slower(cls, value: dict[int, float]) -> dict[int, float]:
        if any(index < 0 or factor < 1 for index, factor in value.items()):
            raise ValueError("a worker from 0 and a factor of at least 1, such as 3:10")
        return value

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> RunConfig:
        if self.nesterov and (self.optimizer != "sgd" or self.momentum == 0):
            raise ValueError(
                "--nesterov: needs --optimizer sgd and a momentum above 0, here "
                f"--optimizer {self.optimizer} --momentum {self.momentum}"
            )
        return self

    @classmethod
    def build(
        cls,
        flags: Mapping[str, object],
        file: Path | None = None,
        option_names: Collection[str] = (),
    ) -> RunConfig:
        """Merge a file with flags, which win, and check the result.

        Parameters
        ----------
        flags : mapping
            Values by field name, or by an algorithm's option name; None stands for "not given".
        file : Path, optional
            YAML or TOML file, see :meth:`from_file`.
        option_names : collection of str
            Options of algorithms, which may stand beside the fields.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        from_file = read_file(file) if file else {}
        known = [*cls.model_fields, *option_names]
        values: dict[str, object] = {}
        options: dict[str, object] = {}
        for source, content in ((f"--config {file}: ", from_file), ("", given)):
            nested = content.get("algorithm_options") or {}
            if not isinstance(nested, Mapping):
                raise ConfigError(
                    f"{source}algorithm_options {_show(nested)}: give names and values"
                )
            options.update({_name(name): value for name, value in nested.items()})
            for name, value in content.items():
                if name in cls.model_fields:
                    values[name] = value
                elif name in option_names:
                    if name in nested:
                        raise ConfigError(
                            f"{source}{name}: is there twice, alone and nested; keep one"
                        )
                    options[name] = value
                else:
                    raise ConfigError(f"{source}{name}: no such option{_did_you_mean(name, known)}")
        try:
            return cls.model_validate({**values, "algorithm_options": options})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ConfigError(_explain(first, given, file)) from None

    @classmethod
    def from_file(cls, path: Path | str, option_names: Collection[str] = ()) -> RunConfig:
        """Read a YAML or TOML file.

        Keys are the names of the fields.  Options of the algorithm stand among them, as far as
        ``option_names`` knows them, or below ``algorithm_options``.
        """
        return cls.build({}, Path(path), option_names)

    def to_yaml(self) -> str:
        """All options, also those with their default, as a file that :meth:`from_file` reads."""
        values = self.model_dump(mode="json")
        text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        return text


def read_file(path: Path) -> dict[str, object]:
    """Read names and values from a YAML (.yaml, .yml) or TOML (.toml) file; ``-`` becomes ``_``."""
    where = f"--config {path}"
    if path.suffix not in (".yaml", ".yml", ".toml"):
        raise ConfigError(f"{where}: the name must end in .yaml, .yml or .toml")
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise HostError(f"{where}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where}: is no valid {path.suffix[1:].upper()} ({reason})") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: holds {type(content).__name__}; give options as name: value")
    return {_name(name): value for name, value in content.items()}


_TYPES = {"int": "a whole number", "float": "a number", "bool": "yes or no", "path": "a path"}
_LIMITS = {"gt": "above {}", "ge": "at least {}", "lt": "below {}", "le": "at most {}"}


def _explain(error: ErrorDetails, given: Mapping[str, object], file: Path | None) -> str:
    """One line from one of pydantic's errors: where, value, what is allowed."""
    kind, context = error["type"], error.get("ctx", {})
    if not error["loc"]:
        return str(context.get("error", error["msg"]))
    name = str(error["loc"][0])
    flag = "--" + name.replace("_", "-")
    where = flag if name in given else f"--config {file}: {name}"
    limits = [text.format(context[key]) for key, text in _LIMITS.items() if key in context]
    expected = next((text for key, text in _TYPES.items() if kind.startswith(key + "_")), "")
    if kind == "literal_error":
        allowed = f"choose from {context['expected'].replace(' or ', ', ')}".replace("'", "")
    elif limits:
        allowed = "must be " + " and ".join(limits)
    elif kind == "value_error":
        allowed = str(context["error"])
    else:
        allowed = f"must be {expected}" if expected else error["msg"][:1].lower() + error["msg"][1:]
    return f"{where} {_show(error['input'])}: {allowed}"


def _did_you_mean(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else "; aladdin-mpi train --help lists them"


def _name(key: object) -> str:
    return str(key).replace("-", "_")


def _show(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "…"
