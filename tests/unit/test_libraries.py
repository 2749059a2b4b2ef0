"""Horovod where it is missing or broken: said in one line, and never chosen by itself."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from aladdin_mpi.comm.libraries import HorovodReducer, horovod_problem
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.runtime.options import configure


def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setitem(sys.modules, "horovod.torch", None)


def without_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", types.ModuleType("horovod"))
    monkeypatch.setitem(sys.modules, "horovod.torch", types.ModuleType("horovod.torch"))


def test_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch)
    assert "make horovod" in str(horovod_problem())
    assert configure("arsgd", {}).backend == "mpi"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError, match=r"--backend horovod: .* or use --backend mpi"):
        HorovodReducer(None, optimizer, [], 1)  # type: ignore[arg-type]


def test_built_without_its_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    without_extension(monkeypatch)
    assert "without its extension" in str(horovod_problem())
    assert configure("arsgd", {}).backend == "mpi"


def test_adascale_needs_the_norms_that_only_our_own_reducer_sees() -> None:
    assert configure("arsgd", {"adascale": True}).backend == "mpi"
    with pytest.raises(ConfigError, match="--adascale True: needs --backend mpi"):
        configure("arsgd", {"adascale": True, "backend": "ddp"})


@pytest.mark.parametrize("megabytes", [-1.0, 3000.0])
def test_buckets_have_a_size_that_can_be(megabytes: float) -> None:
    with pytest.raises(ConfigError, match=r"--bucket-mb .*: expected 0 to 2000"):
        configure("arsgd", {"bucket_mb": megabytes})
