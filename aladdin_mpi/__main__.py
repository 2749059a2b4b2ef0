"""``python -m aladdin_mpi`` is ``aladdin-mpi``."""

from aladdin_mpi.cli.main import main

if __name__ == "__main__":
    main(prog_name="aladdin-mpi")
