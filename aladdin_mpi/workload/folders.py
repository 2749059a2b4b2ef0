"""Where a data set's files are looked for, and what is said when they are not there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from aladdin_mpi.errors import DataError

__all__ = ["ENVIRONMENT", "find_folder"]

ENVIRONMENT = "ALADDIN_DATA"
"""Environment variable: the folder that holds a folder per data set."""


def find_folder(
    dataset: str,
    data_dir: Path | None,
    *,
    subfolders: Sequence[str],
    wanted: Iterable[Sequence[str]],
    advice: str,
    system: Sequence[Path] = (),
) -> Path:
    """Return the first folder that holds all files of a data set.

    Parameters
    ----------
    dataset : str
        Its name, for the message.
    data_dir : Path or None
        The user's choice: this folder and its ``subfolders`` are searched, and no others.  Without
        one, the ``subfolders`` of ``$ALADDIN_DATA`` and the ``system`` folders are.
    subfolders : sequence of str
        Names that the data set's folder usually has.
    wanted : iterable of sequences of str
        The names that must exist in the folder; of each inner sequence, any one is enough.
    advice : str
        What the user can do, the end of the message.
    system : sequence of Path, optional
        Folders that packages of the operating system install into.

    Raises
    ------
    DataError
        No folder holds all of them.
    """
    wanted = [tuple(names) for names in wanted]
    base = os.environ.get(ENVIRONMENT)
    if data_dir is not None:
        folders = [data_dir, *(data_dir / name for name in subfolders)]
        where = f"--data-dir {data_dir}: "
    else:
        folders = [Path(base) / name for name in subfolders] if base else []
        folders += system
        where = f"--data-dir is not given and ${ENVIRONMENT} is {base or 'not set'}: "
    for folder in folders:
        if all(any((folder / name).exists() for name in names) for names in wanted):
            return folder
    expected = ", ".join(names[0] for names in wanted)
    raise DataError(f"{where}{dataset} not found, expected {expected}; {advice}")
