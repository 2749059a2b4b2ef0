"""The list of algorithms: complete, readable at any width and in a pipe, without MPI."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len

from aladdin_mpi.algorithms import REGISTRY, bsp, ssp
from aladdin_mpi.algorithms.base import Algorithm, Topology, flag, option
from aladdin_mpi.cli.main import main

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]
WIDE = 200


def call(*args: str, width: int = WIDE) -> Result:
    environ = {"COLUMNS": str(width), "FORCE_COLOR": None, "TTY_COMPATIBLE": None}
    return CliRunner().invoke(main, ["algorithms", *args], env=environ, prog_name="aladdin-mpi")


def parts(text: str) -> dict[str, str]:
    """What is said of each algorithm, by name; a name begins in the first column."""
    found = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    return {part.split()[0]: part for part in found if part}


def test_every_algorithm_is_listed_with_all_its_options() -> None:
    result = call()
    assert result.exit_code == 0
    listed = parts(result.stdout)
    assert list(listed) == list(REGISTRY)
    for name, row in REGISTRY.items():
        text = listed[name]
        ranks = 5 if row.topology is Topology.SERVER else 4
        first = text.splitlines()[0]
        assert re.search(rf" {row.topology.value}\b", first)
        assert ("(no server)" in first) == (ranks == 4)
        assert first.endswith(f"; 4 workers: mpiexec -n {ranks}")
        assert row.summary in text and row.source in text
        assert ("torch.optim.SGD" in text) == ("server_applies" in row.traits)
        lines = {line.split()[0]: line for line in text.splitlines()[1:] if line.strip()}
        for spec in fields(row.config):
            line = lines[flag(spec.name)]
            assert spec.metadata["help"] in line
            for choice in spec.metadata["choices"]:
                assert choice in line
            if isinstance(spec.default, bool):
                assert line.split()[1] == ("yes" if spec.default else "no")
            elif spec.default is not None:
                assert line.split()[1] == str(spec.default)
        assert ("no options" in text) == (not fields(row.config))


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_nothing_is_cut_at_any_width(width: int) -> None:
    wide, narrow = call().stdout, call(width=width).stdout
    assert sorted(narrow.split()) == sorted(wide.split())
    assert max(map(cell_len, narrow.splitlines())) <= max(width, 60)
    assert " \n" not in narrow, "blanks at the end would wrap to empty lines"


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("width", [20, WIDE])
def test_one_is_shown_with_its_rule(name: str, width: int) -> None:
    shown = call(name, width=width).stdout
    module = sys.modules[REGISTRY[name].config.__module__]
    assert module.__doc__ is not None
    assert shown.endswith(inspect.cleandoc(module.__doc__) + "\n")
    assert shown.startswith(name + "  ")
    assert shown.count("mpiexec -n") == 1


def test_an_unknown_name_is_one_line() -> None:
    result = call("none-such")
    (line,) = result.stderr.splitlines()
    assert line.startswith("aladdin-mpi: error: --algorithm none-such: unknown; choose from")
    assert result.exit_code == 2 and result.stdout == ""


@dataclass(frozen=True)
class OwnConfig:
    period: int = option(7, "[bold]steps[/bold]")
    of_its_own: bool = option(True, "what no other has")


OWN = Algorithm(
    "own", "a summary", "nobody 2020", Topology.SERVER, OwnConfig, ssp.BoundedWorker, bsp.Server
)


def test_ones_own_algorithm_is_shown_by_module_and_attribute() -> None:
    result = call(f"{__name__}:OWN")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{__name__}:OWN  server")
    assert "a summary" in result.stdout and "nobody 2020" in result.stdout
    assert re.search(r"--period +7 +\[bold\]steps\[/bold\]", result.stdout), "no markup"
    assert re.search(r" of_its_own +yes +.*algorithm_options", result.stdout), "train has no flag"
    assert result.stdout.endswith(f"{__doc__}\n")
    assert "not an Algorithm" in call(f"{__name__}:ROOT").stderr


def test_in_a_pipe_it_is_plain_and_needs_no_mpi() -> None:
    code = (
        "import sys; from aladdin_mpi.cli.main import main\n"
        "try: main(['algorithms'])\n"
        "except SystemExit: pass\n"
        "print('LOADED', [m for m in sys.modules if m.startswith(('mpi4py', 'horovod'))])"
    )
    environ = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS")}
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True,
        env={**environ, "TERM": "xterm-256color"}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "\x1b" not in shown.stdout and shown.stderr == ""
    text, _, loaded = shown.stdout.partition("LOADED ")
    assert loaded.strip() == "[]"
    assert list(parts(text)) == list(REGISTRY)
    assert sorted(text.split()) == sorted(call().stdout.split())


def test_the_page_has_a_row_for_each_algorithm() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (\w+) \|", page, re.MULTILINE))
    assert rows == {name: row.topology.value for name, row in REGISTRY.items()}
