"""The scripts of ``slurm/``, edited as a user would: nothing below the line is touched."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import launching

__all__ = ["EDGE", "SCRIPTS", "SMALL", "edited", "said", "write"]

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "slurm"
EDGE = " nothing to edit below "
SMALL = "--dataset digits --model mlp --epochs 1 --batch-size 32"
"""A training that takes a second, without its algorithm."""


def edited(
    name: str,
    options: Mapping[str, int | str | Sequence[int | str]],
    variables: Mapping[str, str],
    environment: str = "",
) -> str:
    """Return a script of the repository with other values at its top.

    Parameters
    ----------
    name : str
        Of ``slurm/<name>.sbatch``.
    options : mapping
        Of ``#SBATCH --<key>=<value>``.  An option that is not there is added; of one that is there
        several times, as in a heterogeneous job, a sequence gives all values.
    variables : mapping
        Values as bash is to read them; those that are not there are an error.
    environment : str
        What stands where the user's environment is loaded.
    """
    text = (SCRIPTS / f"{name}.sbatch").read_text(encoding="utf-8")
    top, edge, rest = text.partition(next(line for line in text.splitlines() if EDGE in line))
    for key, wanted in options.items():
        values = [wanted] if isinstance(wanted, int | str) else list(wanted)
        pattern = re.compile(rf"^##?SBATCH --{key}=\S+", re.MULTILINE)
        if not pattern.search(top):
            top = top.replace("#SBATCH", f"#SBATCH --{key}={values[0]}\n#SBATCH", 1)
            continue
        assert len(pattern.findall(top)) == len(values), (key, values)
        for value in values:
            top = pattern.sub(f"#sbatch --{key}={value}", top, count=1)
        top = top.replace("#sbatch", "#SBATCH")
    for key, value in variables.items():
        old = r"\([^)]*\)" if value.startswith("(") else r"\S*"
        pattern = re.compile(rf"^((?:export )?{key}=){old}", re.MULTILINE)
        assert len(pattern.findall(top)) == 1, f"{name}: {key} is not there, or not once"
        before, assignment, after = pattern.split(top)
        top = before + assignment + value + after
    top = top.replace("# source ~/venv/bin/activate", environment)
    return top + edge + rest


def write(
    folder: Path,
    name: str,
    options: Mapping[str, int | str | Sequence[int | str]],
    variables: Mapping[str, str],
    programs: Path,
    label: str = "",
) -> Path:
    """Write a script, edited for this MPI, into a folder; its output goes to ``<label>.out``."""
    label = label or name
    out = {"job-name": label, "output": f"{label}.out"}
    if "array" in (SCRIPTS / f"{name}.sbatch").read_text():
        out["output"] = f"{label}-%a.out"
    path = folder / f"{label}.sbatch"
    values = {"MPI": launching.family(), **variables}
    first_on_path = f"export PATH={shlex.quote(str(programs))}:$PATH"
    path.write_text(edited(name, {**out, **options}, values, first_on_path))
    return path


def said(stand_in: Path, job: str, restart: int = 0) -> list[dict[str, Any]]:
    """Return what the tasks of a job have said, by rank."""
    paths = stand_in.glob(f"{job}-{restart}-*.json")
    return sorted((json.loads(path.read_text()) for path in paths), key=lambda task: task["rank"])
