# make demo, make test: see "make help".

# What pip installs as torch, and the index for it alone (empty: pip's own configuration).
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# mpich or openmpi, for the demo and Horovod; MPIS: both or one, for the tests.
MPI ?= mpich
MPIS ?= mpich openmpi
# REQUIRE=all: install system tools first (root, Debian), and fail if anything was left out.
REQUIRE ?=
# Stages of the tests: lint unit launch mpi cluster slurm bench (empty: all).
ONLY ?=

# The first Python 3.10 to 3.13 that runs: one that has torch, else one that can make environments.
define FIND_PYTHON
for needs in torch ensurepip venv; do \
  for python in python3.13 python3.12 python3.11 python3.10 python3; do \
    "$$python" -c "import sys, importlib.util as u; \
sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 13) and u.find_spec('$$needs')))" \
      >/dev/null 2>&1 && { command -v "$$python"; exit 0; }; \
  done; \
done
endef
ifndef PYTHON
PYTHON := $(shell $(FIND_PYTHON))
endif

VENV = .venv-$(MPI)
ENVIRONMENT_OPTIONS = --torch "$(TORCH)" --torch-index "$(TORCH_INDEX)"

.PHONY: help demo test bench-quick horovod lint format clean python
.DEFAULT_GOAL := help

help:
	@echo "make demo     train a small network with ALADDIN on 4 workers, in a fresh environment"
	@echo "make test     all tests that this machine allows, and a list of what was left out"
	@echo "              REQUIRE=all   as root on Debian: install system tools, leave nothing out"
	@echo "              ONLY=unit     some stages only: lint unit launch mpi cluster slurm bench"
	@echo "              MPIS=mpich    with one MPI only"
	@echo "make bench-quick  ALADDIN, AR-SGD and SGP on virtual hosts with slow links (root, iproute2)"
	@echo "make horovod  build Horovod for MPI=mpich or openmpi and install it (needs a C++ compiler)"
	@echo "make lint     ruff and mypy;  make format: format the sources;  make clean: tidy up"
	@echo "Variables:    PYTHON=$(PYTHON) TORCH=$(TORCH) TORCH_INDEX=$(TORCH_INDEX) MPI=$(MPI)"

python:
	@test -n "$(PYTHON)" || { echo "No Python 3.10 to 3.13 found: make ... PYTHON=..." >&2; exit 1; }

demo: python
	@"$(PYTHON)" .ci/environment.py --mpi $(MPI) $(ENVIRONMENT_OPTIONS)
	@ALADDIN_MPI=$(MPI) $(VENV)/bin/python tests/launching.py -n 5 $(VENV)/bin/aladdin-mpi train \
	  --dataset digits --model mlp --algorithm aladdin \
	  --epochs 20 --batch-size 16 --lr 0.1 --momentum 0.9 \
	  --progress "$$([ -t 2 ] && echo bar || echo auto)" \
	  --out "runs/demo-$$(date +%Y%m%d-%H%M%S)"

test: python
	@if [ "$(REQUIRE)" = all ]; then .ci/system-tools; fi
	@"$(PYTHON)" tests/suite.py --mpis "$(MPIS)" --only "$(ONLY)" --require "$(REQUIRE)" \
	  $(ENVIRONMENT_OPTIONS)

bench-quick: python
	@"$(PYTHON)" .ci/environment.py --mpi $(MPI) $(ENVIRONMENT_OPTIONS)
	@ALADDIN_MPI=$(MPI) $(VENV)/bin/python bench/cluster/experiments.py quick

horovod: python
	@"$(PYTHON)" .ci/environment.py --mpi $(MPI) $(ENVIRONMENT_OPTIONS)
	@"$(PYTHON)" .ci/horovod_build.py --mpi $(MPI)

lint:
	@$(MAKE) --no-print-directory test ONLY=lint MPIS=$(MPI)

format: python
	@"$(PYTHON)" .ci/environment.py --mpi $(MPI) --extras dev $(ENVIRONMENT_OPTIONS)
	@$(VENV)/bin/ruff check --fix . ; $(VENV)/bin/ruff format .

clean:
	rm -rf .venv-mpich .venv-openmpi .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf build *.egg-info
	find aladdin_mpi tests bench examples .ci -name __pycache__ -type d -prune -exec rm -rf {} +
