"""Optimizers for large batches: LARS, LAMB, and AdaScale's gain ratio.  No MPI, no files."""

from aladdin_mpi.optim.adascale import Gain
from aladdin_mpi.optim.lamb import LAMB
from aladdin_mpi.optim.lars import LARS

__all__ = ["LAMB", "LARS", "Gain"]
