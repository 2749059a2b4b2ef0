"""The run's configuration: files, flags, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from aladdin_mpi.algorithms import REGISTRY
from aladdin_mpi.config import HostError, RunConfig
from aladdin_mpi.core.schedule import Schedule
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.runtime.folder import check_out
from aladdin_mpi.runtime.options import configure, option_names

pytestmark = pytest.mark.timeout(60)

PAPER = Path(__file__).resolve().parents[2] / "examples" / "paper"


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "lr: 1e-3\nbatch-size: 64\nperiod: 2\nmodel: cnn\n")
    flags = {"lr": "0.5", "period": "8", "epochs": None}
    config = RunConfig.build(flags, path, option_names())
    assert (config.lr, config.batch_size, config.model) == (0.5, 64, "cnn")
    assert config.epochs == RunConfig().epochs
    assert config.algorithm_options == {"period": "8"}


def test_yaml_and_toml_say_the_same(tmp_path: Path) -> None:
    yaml = write(tmp_path, "lr: 1e-3\nmilestones: [1, 2.5]\nalgorithm_options:\n  period: 2\n")
    toml = write(
        tmp_path,
        "lr = 1e-3\nmilestones = [1, 2.5]\n[algorithm_options]\nperiod = 2\n",
        "run.toml",
    )
    assert RunConfig.from_file(yaml) == RunConfig.from_file(toml)


def test_nested_and_flat_options_of_the_algorithm_are_the_same(tmp_path: Path) -> None:
    nested = write(tmp_path, "algorithm_options: {period: 2}", "a.yaml")
    flat = write(tmp_path, "period: 2", "b.yaml")
    names = option_names()
    assert RunConfig.from_file(nested, names) == RunConfig.from_file(flat, names)
    both = write(tmp_path, "period: 2\nalgorithm_options: {period: 2}", "c.yaml")
    with pytest.raises(ConfigError, match="twice"):
        RunConfig.from_file(both, names)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    flags = {"milestones": "3,4.5", "out": "x/y", "period": 2, "clip_norm": "1", "log": False}
    config = RunConfig.build(flags, option_names=option_names())
    assert config.milestones == (3.0, 4.5)
    assert RunConfig.from_file(write(tmp_path, config.to_yaml())) == config


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_an_empty_file_is_all_defaults(tmp_path: Path, text: str) -> None:
    assert RunConfig.from_file(write(tmp_path, text)) == RunConfig()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"lr": "-1"}, "--lr -1: must be above 0"),
        ({"lr": "fast"}, "--lr fast: must be a number"),
        ({"lr": "nan"}, "--lr nan"),
        ({"batch_size": "0"}, "--batch-size 0: must be at least 1"),
        ({"batch_size": "1.5"}, "--batch-size 1.5: must be a whole number"),
        ({"momentum": "1"}, "--momentum 1: must be below 1"),
        ({"optimizer": "sdg"}, "--optimizer sdg: choose from sgd, adam, adamw"),
        ({"milestones": "30,x"}, "--milestones"),
        ({"nesterov": True, "momentum": "0"}, "--nesterov: needs"),
        ({"accumulate": "0"}, "--accumulate 0: must be at least 1"),
        ({"bathc_size": "1"}, "did you mean batch_size?"),
    ],
)
def test_a_wrong_flag_is_one_line(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.build(flags)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: -1", "run.yaml: lr -1: must be above 0"),
        ("lr:", "lr None: must be a number"),
        ("epochs: yes", "epochs True: takes no yes or no"),
        ("bathc_size: 1", "bathc_size: no such option; did you mean batch_size?"),
        ("perod: 1", "did you mean period?"),
        ("lr: [1, 2]", "lr [1, 2]: must be a number"),
        ("algorithm_options: 3", "algorithm_options 3"),
        ("- lr", "holds list"),
        ("lr: {", "is no valid YAML"),
        ("1: 2", "1: no such option"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_file(write(tmp_path, text), option_names())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot be read"):
        RunConfig.from_file(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="must end in"):
        RunConfig.from_file(write(tmp_path, "", "run.json"))


def test_no_option_has_two_owners() -> None:
    assert not set(option_names()) & set(RunConfig.model_fields)


def test_every_field_is_described() -> None:
    assert all(field.description for field in RunConfig.model_fields.values())


def test_options_of_the_algorithm_are_converted_and_checked() -> None:
    given = {"period": "2", "coalesce": "no", "server_momentum": "0.5", "in_flight": 1}
    config = configure("aladdin", given)
    assert (config.period, config.coalesce, config.server_momentum) == (2, False, 0.5)
    assert config.in_flight == "1"
    assert configure("aladdin", {"preset": "paper"}).push == "gradient"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"period": "0"}, "--period 0: must be at least 1"),
        ({"period": "2.5"}, "--period 2.5: must be a whole number"),
        ({"period": True}, "--period True: must be a whole number"),
        ({"coalesce": "perhaps"}, "--coalesce perhaps: must be yes or no"),
        ({"server_momentum": "nan"}, "--server-momentum nan: must be a number"),
        ({"alpha": "x"}, "--alpha x: choose from"),
        ({"perio": 2}, "--perio: is no option of --algorithm aladdin; did you mean --period?"),
    ],
)
def test_a_wrong_option_is_one_line(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure("aladdin", given)
    assert words in str(caught.value)
    with pytest.raises(ConfigError, match="unknown"):
        configure("no-such", {})


def test_out_that_cannot_be_written(tmp_path: Path) -> None:
    check_out(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    file = write(tmp_path, "")
    with pytest.raises(HostError, match=r"--out .*cannot be written"):
        check_out(file / "below")
    with pytest.raises(HostError, match="cannot be written"):
        check_out(file)
    (tmp_path / "rank0000.h5").touch()
    with pytest.raises(HostError, match="another run"):
        check_out(tmp_path)


@pytest.mark.parametrize("path", sorted(PAPER.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_of_the_paper(path: Path) -> None:
    config = RunConfig.from_file(path, option_names())
    options = configure(config.algorithm, config.algorithm_options)
    assert options == REGISTRY["aladdin"].config(period=4)
    schedule = Schedule(
        config.lr, 8, config.lr_scaling, config.warmup_epochs, config.milestones, config.gamma
    )
    cifar = config.dataset == "cifar10"
    assert config.batch_size == (128 if config.model == "resnet50" else 96)
    assert (config.momentum, config.weight_decay) == (0.9, 1e-4)
    assert schedule.peak_lr == pytest.approx(0.08 if cifar else 0.4)
    assert schedule.lr(config.epochs) == pytest.approx(schedule.peak_lr * (0.1 if cifar else 1e-3))
    assert config.epochs == (250 if cifar else 90)


def test_there_are_four_recipes() -> None:
    assert len(list(PAPER.glob("*.yaml"))) == 4
