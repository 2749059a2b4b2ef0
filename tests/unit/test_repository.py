"""Habits of the repository that are easily lost."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES_OF_AN_ALGORITHM = 150
GENERATED = {"__pycache__", "build", "runs"}

# Written in pieces, so that this file does not find itself.
PRIVATE = [re.compile(r"(?<![\w})~.-])/" + r"work/"), re.compile("shared" + "/design")]
"""Places that exist on nobody else's machine."""


def files() -> list[Path]:
    """Return the files that are in the repository, or would be added to it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        paths = [ROOT / name for name in shown.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):  # unpacked from an archive, or no git here
        paths = [
            path
            for path in ROOT.rglob("*")
            if not any(
                part in GENERATED
                or part.endswith(".egg-info")
                or part.startswith((".venv", ".git"))
                for part in path.relative_to(ROOT).parts
            )
        ]
    return sorted(path for path in paths if path.is_file())


def private_lines(path: Path) -> list[str]:
    """Return the lines of a text file that name a private place."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []
    return [
        f"{path.name}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if any(pattern.search(line) for pattern in PRIVATE)
    ]


def test_no_file_names_a_private_place() -> None:
    found = [line for path in files() for line in private_lines(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "number"),
    [("cd /" + "work/main", 1), ("see shared" + "/design/4", 1), ("~/work/x, $HOME/work/y", 0)],
)
def test_private_places_are_recognised(tmp_path: Path, text: str, number: int) -> None:
    path = tmp_path / "notes.md"
    path.write_text(text)
    assert len(private_lines(path)) == number


def test_algorithms_are_short() -> None:
    texts = {
        path.name: path.read_text(encoding="utf-8")
        for path in (ROOT / "aladdin_mpi" / "algorithms").glob("*.py")
    }
    lengths = {
        name: len(text.splitlines()) for name, text in texts.items() if "\nALGORITHM = " in text
    }
    assert lengths, "no algorithms"
    too_long = {k: v for k, v in lengths.items() if v > MAX_LINES_OF_AN_ALGORITHM}
    assert not too_long, f"more than {MAX_LINES_OF_AN_ALGORITHM} lines: {too_long}"


def test_readme_begins_with_the_two_commands() -> None:
    beginning = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:20])
    assert "make demo" in beginning
    assert "make test" in beginning


def test_changelog_knows_the_version() -> None:
    source = (ROOT / "aladdin_mpi" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'__version__ = "(.+)"', source)
    assert found is not None
    assert f"## [{found.group(1)}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_no_timed_wait_on_a_simple_queue() -> None:
    """``SimpleQueue.get(timeout=…)`` can wait for ever when its thread loses the core (3.11)."""
    users = [
        path.name
        for path in (ROOT / "aladdin_mpi").rglob("*.py")
        if "SimpleQueue(" in path.read_text(encoding="utf-8")
    ]
    assert users == []


def test_no_receive_from_anybody_is_posted() -> None:
    """MPICH may never complete one whose message comes while it is posted (decision 006)."""
    users = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "aladdin_mpi").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and "recv" in ast.unparse(node.func).lower()
        and "ANY_SOURCE" in ast.unparse(node)
    ]
    assert users == []
