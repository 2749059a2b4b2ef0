"""The folder of a run: whether it can be made, and what is written there besides the logs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import nn

from aladdin_mpi.config import HostError

__all__ = ["DEFAULT_OUT", "MODEL_FILE", "check_out", "save_model"]

DEFAULT_OUT = Path("runs")
"""Where the folders of runs without ``--out`` are made."""

MODEL_FILE = "model.pt"


def check_out(out: Path | None, again: bool = False) -> None:
    """Raise a :class:`HostError` where the folder ``out`` (None: ``runs``) cannot take a run.

    ``again``: the run may go on in it.  Nothing is left behind: a folder is made in the nearest one
    that exists, and removed.
    """
    folder = out if out is not None else DEFAULT_OUT
    nearest = folder
    try:
        if out is not None and not again and any(out.glob("rank*.h5")):
            raise HostError(
                f"--out {out}: holds the logs of another run; name a new folder, or go on with "
                "--resume auto"
            )
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
        with tempfile.TemporaryDirectory(prefix=".writable-", dir=nearest):
            pass
    except OSError as error:
        reason = f"{nearest}: {error.strerror}"
        raise HostError(
            f"--out {folder}: cannot be written ({reason}); name a folder that can"
        ) from None


def save_model(model: nn.Module, folder: Path) -> Path:
    """Write the state dict beside, then rename; tensors are copies, not views of one vector."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MODEL_FILE
    beside = path.with_suffix(".tmp")
    torch.save({k: v.detach().cpu().clone() for k, v in model.state_dict().items()}, beside)
    os.replace(beside, path)
    return path
