"""Studying a run after it has ended, or while it goes on: needs neither torch nor MPI.

from aladdin_mpi.analysis import load_run, figures
run = load_run("runs/x")
run.steps.groupby("rank")["step_s"].median()
figures.time_split([run])
"""

from __future__ import annotations

from aladdin_mpi.analysis.load import Run, load_run

__all__ = ["Run", "load_run"]
