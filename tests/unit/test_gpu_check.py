"""``bench/gpu_check.py``: what it makes of a trace, and what it says without a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu_check.py"


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # its classes look themselves up
    spec.loader.exec_module(module)
    return module


def event(category: str, name: str, start: float, length: float, **args: int) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": args}


def test_overlap_of_copies_and_kernels(gpu_check: ModuleType) -> None:
    trace = [
        event("kernel", "gemm", 0, 1000),
        event("kernel", "relu", 500, 1000),  # until 1500, on another stream
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1000, 1000, bytes=3_000_000),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 3000, 1000, bytes=3_000_000),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 100, 200, bytes=500_000),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 50, bytes=1),
        event("cpu_op", "aten::copy_", 0, 9000),
        {"ph": "M", "name": "process_name"},
    ]
    found = gpu_check.overlap(trace)
    assert found == {"DtoH": (2, 6.0, 2.0, 0.25), "HtoD": (1, 0.5, 0.2, 1.0)}
    assert gpu_check.overlap([]) == {}


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 2
    assert not run.stdout
    assert run.stderr.count("\n") == 1
    assert "sees no GPU: nothing was checked or measured" in run.stderr
