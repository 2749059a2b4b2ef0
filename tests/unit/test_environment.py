"""The announcement of a large download of torch."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "environment.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(name: str, url: str) -> dict[str, dict[str, str]]:
    return {"metadata": {"name": name}, "download_info": {"url": url}}


def test_cuda_libraries_are_announced_with_the_way_out(script: ModuleType) -> None:
    installs = [
        entry("torch", "https://files/torch.whl"),
        entry("nvidia-cublas", "https://files/x"),
    ]
    text = script.large_notice("torch==2.13.0", installs)
    assert "several GB" in text
    assert "torch==2.13.0" in text
    assert "TORCH_INDEX=" in text


def test_small_downloads_are_not_announced(script: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "torch cpu.whl"
    wheel.write_bytes(b"1234")
    installs = [entry("torch", wheel.as_uri()), entry("sympy", "https://files/sympy.whl")]
    assert script.large_notice("torch", installs) == ""


def test_stamp_decides_whether_anything_is_to_be_done(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "setup.py").write_text("setup()")
    environment = script.Environment("mpich", ["dev"], "torch", "")
    done: list[str] = []

    def create() -> None:
        done.append("create")
        environment.python.parent.mkdir(parents=True, exist_ok=True)
        environment.python.touch()
        (environment.path / "bin" / "mpiexec").touch()

    monkeypatch.setattr(environment, "create", create)
    monkeypatch.setattr(environment, "install_torch", lambda: done.append("torch"))
    monkeypatch.setattr(environment, "pip", lambda *arguments: done.append(arguments[-1]))
    environment.make()
    assert done == ["create", "torch", f"{tmp_path}[dev,mpich]"]
    environment.make()
    assert len(done) == 3
    environment.extras.append("analysis")  # one more extra completes what is there
    environment.make()
    assert done[3:] == [f"{tmp_path}[analysis,dev,mpich]"]
    (tmp_path / "setup.py").write_text("setup(1)")  # anything else makes it afresh
    environment.make()
    assert done[4:] == ["create", "torch", f"{tmp_path}[analysis,dev,mpich]"]
