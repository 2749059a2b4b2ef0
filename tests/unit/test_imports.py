"""The rooms of the package, and which way imports go between them.

    errors, messages, config -> core -> {algorithms | comm | record | workload | optim}
        -> runtime -> cli
    record.{schema, layout, reading, reader} -> analysis -> cli
    {core, algorithms} -> simulation -> cli

The rooms in the middle never import one another, only ``comm`` imports MPI, and
``import aladdin_mpi`` is light: a DataLoader worker that is started by spawn must not call
MPI_Init.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "aladdin_mpi"
SOURCE = Path(__file__).resolve().parents[2] / PACKAGE

BASE = {"_version", "errors", "messages", "config"}
MIDDLE = {"algorithms", "comm", "record", "workload", "optim"}
ROOMS: dict[str, set[str]] = {
    "_version": set(),
    "errors": {"_version"},
    "messages": {"_version", "errors"},
    "config": {"_version", "errors", "messages"},
    "core": BASE,
    **{room: BASE | {"core"} for room in MIDDLE},
    "runtime": BASE | MIDDLE | {"core"},
    "analysis": BASE | {f"record.{part}" for part in ("schema", "layout", "reading", "reader")},
    "simulation": BASE | {"core", "algorithms"},
    "cli": BASE | MIDDLE | {"core", "runtime", "analysis", "simulation", "__init__"},
    # The package itself offers the public API (lazily), and python -m the command line.
    "__init__": BASE | {"core", "runtime"},
    "__main__": {"cli"},
}
"""Room -> what it may import besides itself."""

RESERVED = {
    "mpi4py": {"comm"},
    "horovod": {"comm"},
    "h5py": {"record", "analysis"},
}
"""Library -> the only rooms that may import it."""

FORBIDDEN = {"analysis": {"torch"}, "record.schema": {"torch"}, "__init__": {"torch"}}
"""Module or room -> libraries that it may not import."""

HEAVY = ("mpi4py", "horovod", "h5py", "torch", "numba", "sklearn", "pandas", "matplotlib")


def imported(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of everything a module imports, wherever it does.

    ``from a import b`` gives ``a.b``, since ``b`` may be a module. ``import_module`` with a
    constant name counts as well.
    """
    parts = module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            start: list[str] = []
            if node.level:
                start = parts[: len(parts) - node.level + is_package]
            name = ".".join(start + ([node.module] if node.module else []))
            for alias in node.names:
                yield node.lineno, f"{name}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            called = node.func
            attribute = called.attr if isinstance(called, ast.Attribute) else None
            function = called.id if isinstance(called, ast.Name) else attribute
            argument = node.args[0]
            if function in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield node.lineno, str(argument.value)


def wrong_arrows(source: Path) -> list[str]:
    """Return one line for each import of the package in a folder that goes the wrong way."""
    wrong = []
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source).with_suffix("")
        inner = ".".join(relative.parts)  # record.schema, core.__init__, errors
        room = relative.parts[0]
        is_package = relative.name == "__init__"
        module = ".".join([PACKAGE, *(relative.parts[:-1] if is_package else relative.parts)])
        if room not in ROOMS:
            wrong.append(f"{inner}: {room} is not a room of the package")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for line, name in imported(tree, module, is_package):
            problem = judge(source, inner, room, name)
            if problem:
                wrong.append(f"{inner}:{line}: {problem}")
    return wrong


def judge(source: Path, inner: str, room: str, name: str) -> str:
    """Return what is wrong about a module's import of ``name``; nothing if it may."""
    top, *rest = name.split(".")
    if top != PACKAGE:
        if room not in RESERVED.get(top, {room}):
            return f"only {', '.join(sorted(RESERVED[top]))} may import {top}"
        if top in FORBIDDEN.get(inner, set()) | FORBIDDEN.get(room, set()):
            return f"may not import {top}"
        return ""
    # A name that is no module comes from the package itself.
    is_module = bool(rest) and (
        (source / rest[0]).is_dir() or (source / f"{rest[0]}.py").is_file() or rest[0] in ROOMS
    )
    target = rest[0] if is_module else "__init__"
    allowed = ROOMS[room] | {room}
    if target in allowed or ".".join(rest[:2]) in allowed:
        return ""
    return f"{room} may not import {'.'.join(rest[:2]) if is_module else PACKAGE}"


def test_arrows_of_the_package() -> None:
    wrong = wrong_arrows(SOURCE)
    assert not wrong, "imports that go the wrong way:\n" + "\n".join(wrong)


def test_middle_rooms_know_nothing_of_each_other() -> None:
    for room in MIDDLE:
        assert not ROOMS[room] & (MIDDLE | {"runtime", "cli", "analysis", "simulation"})


PLANTED = [
    ("core/flat.py", "import mpi4py.MPI", "only comm may import mpi4py"),
    ("core/flat.py", "from aladdin_mpi.comm import mailbox", "core may not import comm.mailbox"),
    ("core/flat.py", "from ..algorithms.base import Worker", "core may not import algorithms"),
    ("algorithms/a.py", "from aladdin_mpi import record", "algorithms may not import record"),
    ("algorithms/a.py", "from .. import comm", "algorithms may not import comm"),
    ("algorithms/__init__.py", "from ..workload import data", "algorithms may not import workload"),
    (
        "comm/a.py",
        "def f():\n    import aladdin_mpi.record.hdf5",
        "comm may not import record.hdf5",
    ),
    ("comm/a.py", "from aladdin_mpi.runtime import worker", "comm may not import runtime.worker"),
    ("runtime/a.py", "from mpi4py import MPI", "only comm may import mpi4py"),
    ("runtime/a.py", "import horovod.torch as hvd", "only comm may import horovod"),
    ("runtime/a.py", "from aladdin_mpi.cli import main", "runtime may not import cli.main"),
    ("runtime/a.py", "from aladdin_mpi import __version__", "runtime may not import aladdin_mpi"),
    ("messages.py", "from aladdin_mpi.config import RunConfig", "messages may not import config"),
    ("analysis/a.py", "from aladdin_mpi.record.hdf5 import R", "analysis may not import record."),
    ("analysis/a.py", "import torch", "may not import torch"),
    ("simulation/a.py", "from aladdin_mpi.comm import roles", "simulation may not import comm."),
    ("core/a.py", "import h5py", "only analysis, record may import h5py"),
    ("runtime/a.py", "import_module('mpi4py')", "only comm may import mpi4py"),
    ("cellar/a.py", "", "cellar is not a room"),
]


@pytest.mark.parametrize(("file", "text", "expected"), PLANTED)
def test_a_planted_wrong_arrow_is_found(
    tmp_path: Path, file: str, text: str, expected: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    (found,) = wrong_arrows(tmp_path)
    assert expected in found


ALLOWED = [
    ("core/a.py", "import numpy, torch\nfrom aladdin_mpi.errors import ConfigError"),
    ("core/a.py", "from .flat import x\nfrom . import shards\nfrom ..messages import Push"),
    ("algorithms/a.py", "from aladdin_mpi.core import kernels\nfrom .base import Algorithm"),
    ("comm/a.py", "from mpi4py import MPI\nimport horovod.torch"),
    ("analysis/a.py", "from aladdin_mpi.record.schema import X\nimport h5py, pandas"),
    ("analysis/a.py", "from aladdin_mpi.record import schema"),
    ("simulation/a.py", "from aladdin_mpi.algorithms import REGISTRY"),
    ("runtime/a.py", "from aladdin_mpi.comm.mailbox import Mailbox\nfrom ..record import hdf5"),
    ("cli/a.py", "from aladdin_mpi import __version__\nfrom aladdin_mpi.simulation import x"),
    ("__init__.py", "from aladdin_mpi._version import __version__\nfrom .runtime import session"),
    ("__main__.py", "from aladdin_mpi.cli.main import main"),
]


@pytest.mark.parametrize(("file", "text"), ALLOWED)
def test_right_arrows_are_allowed(tmp_path: Path, file: str, text: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    assert wrong_arrows(tmp_path) == []


def loaded_by(statement: str, names: tuple[str, ...]) -> list[str]:
    """Return which modules a statement loads in a fresh interpreter."""
    code = f"import sys; {statement}; print([n for n in {names!r} if n in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    found: list[str] = ast.literal_eval(shown.stdout)
    return found


def test_import_of_the_package_is_light() -> None:
    assert (SOURCE / "__init__.py").is_file()
    assert loaded_by(f"import {PACKAGE}", HEAVY) == []


def test_schema_and_analysis_need_neither_torch_nor_mpi() -> None:
    for name in ("record/schema.py", "analysis/__init__.py"):
        if (SOURCE / name).is_file():
            module = ".".join([PACKAGE, *Path(name).with_suffix("").parts])
            statement = f"import {module.removesuffix('.__init__')}"
            assert loaded_by(statement, ("torch", "mpi4py")) == [], statement


def test_in_process_links_need_no_mpi() -> None:
    assert loaded_by(f"import {PACKAGE}.comm.inprocess", ("mpi4py",)) == []


def test_simulation_needs_no_mpi_and_its_timing_no_torch() -> None:
    assert loaded_by(f"import {PACKAGE}.simulation.training", ("mpi4py",)) == []
    statement = f"import {PACKAGE}.cli.simulate, {PACKAGE}.simulation.answers"
    assert loaded_by(statement, ("torch", "mpi4py")) == []
