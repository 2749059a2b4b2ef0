"""The page that shows how to add an algorithm: its file works as it is printed."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from lockstep import Blocked, Lockstep

from aladdin_mpi.algorithms import REGISTRY, find
from aladdin_mpi.algorithms.base import Algorithm
from aladdin_mpi.cli.main import main
from aladdin_mpi.config import RunConfig
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.messages import Merge, Push, Send
from aladdin_mpi.record.schema import EventKind
from aladdin_mpi.runtime.options import configure

pytestmark = pytest.mark.timeout(120)

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "adding-an-algorithm.md").read_text(encoding="utf-8")
NAME = "mypackage.downpour:ALGORITHM"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's file where the page says, on the path."""
    (text,) = blocks("python")
    package = tmp_path / "mypackage"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "downpour.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("mypackage.downpour", "mypackage"):
        sys.modules.pop(name, None)


def team(n: int = 2, **options: int) -> Lockstep:
    """Workers for whom the server moves while they wait."""
    run = Lockstep(n, size=1, algorithm=NAME, **options)
    for driver, _ in run.drivers:
        driver.end.wait_change = lambda timeout_s: run.turn()
    return run


def test_the_update_rule_by_hand() -> None:
    """n = 2, π = 2: every step is merged with 1/2, every second one fetches x̃."""
    run = team(period=2)
    run.step(0, 1.0)
    run.turn()
    assert run.server[0] == 0.5 and run.x(0)[0] == 1.0, "x̃ + Δ/n; x_0 is its own"
    run.step(1, 4.0)
    run.turn()
    assert run.server[0] == 2.5 and run.x(1)[0] == 4.0
    run.step(0, 2.0)
    assert run.server[0] == 3.5 and run.x(0)[0] == 3.5, "x̃ with its own step, and worker 1's"
    run.step(1, 2.0)
    assert run.server[0] == 4.5 and run.x(1)[0] == 4.5
    run.step(0, 1.0)
    run.turn()
    assert run.server[0] == 5.0, "Δ is the step alone: what was fetched is not pushed back"
    assert run.x(0)[0] == 4.5
    assert [push.wants_reply for push in run.pushes] == [False, False, True, True, False]
    assert [push.version for push in run.pushes] == [0, 0, 0, 0, 3]
    run.finish()
    assert run.server[0] == run.steps.sum() / 2
    assert [push.last for push in run.pushes[-2:]] == [True, True]
    assert sum(push.iterations for push in run.pushes) == 5


def test_it_waits_for_nothing_but_its_own_reply() -> None:
    run = Lockstep(2, algorithm=NAME, period=3)
    run.hold.add("reply")
    for _ in range(2):
        run.step(0, 1.0)
        run.turn()
    with pytest.raises(Blocked):
        run.step(0, 1.0)
    run = team(period=1)
    for _ in range(5):
        run.step(0, 1.0)  # worker 1 makes no step at all
    assert run.server[0] == run.x(0)[0] == 2.5


def test_a_nan_is_not_pushed_and_the_next_step_asks_instead() -> None:
    run = team(period=2)
    run.step(0, 2.0)
    run.turn()
    run.step(0, np.nan)
    assert run.x(0)[0] == 2.0 and len(run.pushes) == 1
    run.step(0, 2.0)
    assert run.x(0)[0] == run.server[0] == 2.0
    assert run.pushes[-1].wants_reply
    run.recorder.flush()
    assert run.file.rows("events")["kind"].tolist() == [EventKind.NONFINITE_PUSH]


def test_the_server_alone() -> None:
    server = importlib.import_module("mypackage.downpour").Server(None, 4)
    assert server.on_push(Push(1, 1)) == [Merge("global", 0.25)]
    asks = Push(1, 2, wants_reply=True)
    assert server.on_push(asks) == [Merge("global", 0.25), Send(1, 1.0)]
    assert server.on_leave(1) == [] and server.state_dict() == {}


def test_state_and_options() -> None:
    run = team(period=3)
    run.step(0, 1.0)
    worker = run.drivers[0][0].algorithm
    assert worker.state_dict() == {"since": 1, "handled": 0, "version": 0}
    run.drivers[1][0].algorithm.load_state_dict(worker.state_dict())
    assert run.drivers[1][0].algorithm.since == 1
    assert configure(NAME, {"period": "8"}).period == 8
    with pytest.raises(ConfigError, match="--period 0: must be at least 1"):
        configure(NAME, {"period": 0})


def test_the_pages_file_of_options_is_read(folder: Path) -> None:
    (text,) = blocks("yaml")
    file = folder / "run.yaml"
    file.write_text(text)
    config = RunConfig.from_file(file)
    assert config.algorithm == NAME
    assert configure(config.algorithm, config.algorithm_options).period == 8
    assert yaml.safe_load(text)["algorithm_options"] == {"period": 8}


def test_the_command_prints_it() -> None:
    result = CliRunner().invoke(main, ["algorithms", NAME], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{NAME}  server; 4 workers: mpiexec -n 5\n")
    assert re.search(r"--period +4 +iterations between two fetches", result.stdout)
    assert "x̃ ← x̃ + Δ_i/n" in result.stdout and "NIPS 2012" in result.stdout


def test_the_page_knows_the_package() -> None:
    """The tables have every trait, and the package every file and test that is named."""
    traits = re.findall(r"^\| `(\w+)` \| ", PAGE, re.MULTILINE)
    assert sorted(traits) == sorted(Algorithm.TRAITS)
    for page in (PAGE, (DOCS / "algorithms.md").read_text(encoding="utf-8")):
        for link in re.findall(r"\]\(([^):]+)\)", page):
            assert (DOCS / link).exists(), link
    row = find(NAME)
    assert row.name not in REGISTRY, "take another example"
