"""What each rank logs.

:mod:`~aladdin_mpi.record.schema` says what, :mod:`~aladdin_mpi.record.recorder` collects it beside
the training, :mod:`~aladdin_mpi.record.hdf5` writes it.
"""
