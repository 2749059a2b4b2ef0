"""Horovod's build: the place of its wheel, and what is said where it cannot be made."""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import require
import suite

FOLDER = Path(__file__).resolve().parents[2] / ".ci"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("horovod_build", FOLDER / "horovod_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FOLDER))  # where it finds environment.py
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


@pytest.fixture
def facts(script: ModuleType) -> tuple:
    return script.Facts("cpython-311-x86_64-linux-gnu", "2.13.0+cpu", "mpich", "5.0.2", "")


def executable(path: Path, text: str = "#!/bin/sh\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def python_that_finds(path: Path, vendor: str, horovod: str = "") -> None:
    """Write a stand-in for the interpreter of an environment that answers the probe."""
    answer = f'["cpython-311", "2.13.0+cpu", "{vendor}", "5.0.2", "{horovod}"]'
    executable(path / "bin" / "python", f"#!/bin/sh\necho '{answer}'\n")


def modules_of_horovod() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "horovod"]


def test_wheel_has_a_place_for_each_python_torch_and_mpi(script: ModuleType, facts: tuple) -> None:
    key = script.cache_key(facts, "abc")
    assert key == f"{script.VERSION}-cpython-311-x86_64-linux-gnu-torch2.13.0+cpu-mpich5.0.2-abc"
    others = [
        facts._replace(abi="cpython-313-x86_64-linux-gnu"),
        facts._replace(torch="2.12.0+cpu"),
        facts._replace(mpi="openmpi"),
        facts._replace(mpi_version="5.0.3"),
    ]
    keys = [script.cache_key(other, "abc") for other in others] + [script.cache_key(facts, "abd")]
    assert len({key, *keys}) == 6
    assert script.cache_key(facts._replace(horovod="0.28.1"), "abc") == key


def test_place_of_a_wheel_is_a_plain_name(script: ModuleType, facts: tuple) -> None:
    assert "/" not in script.cache_key(facts._replace(mpi="Intel MPI", mpi_version="../1"), "abc")


def test_recipe_changes_with_the_toolchain_file(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = script.recipe()
    assert before == script.recipe()
    changed = tmp_path / "toolchain.cmake"
    changed.write_bytes(script.TOOLCHAIN.read_bytes() + b"#")
    monkeypatch.setattr(script, "TOOLCHAIN", changed)
    assert script.recipe() != before


def test_build_sees_the_environment_and_no_settings_of_others(script: ModuleType) -> None:
    base = {"PATH": "/bin", "HOROVOD_GPU_OPERATIONS": "NCCL", "MPI_HOME": "/opt/mpi", "CXX": "g++"}
    env = script.build_environment(base, Path("/place"), 2)
    assert env["PATH"] == "/place/bin:/bin"
    assert env["MAKEFLAGS"] == "-j2"
    assert env["CXX"] == "g++"
    assert {key for key in env if key.startswith("HOROVOD_")} == set(script.SETTINGS)
    assert "MPI_HOME" not in env


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("cmake version 3.25.1\n\nCMake suite", (3, 25)),
        ("cmake version 4.1.0-rc1", (4, 1)),
        ("", (0, 0)),
    ],
)
def test_version_of_cmake_is_read(script: ModuleType, text: str, version: tuple[int, int]) -> None:
    assert script.cmake_version(text) == version


def test_missing_tools_are_named_with_their_package(script: ModuleType, tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path)}
    with pytest.raises(script.Lacking, match=r"^no C\+\+ compiler \(apt-get install g\+\+\)$"):
        script.need_tools(env)
    executable(tmp_path / "g++")
    with pytest.raises(script.Lacking, match=r"^no make \(apt-get install make\)$"):
        script.need_tools(env)
    executable(tmp_path / "make")
    script.need_tools(env)
    script.need_tools({**env, "CXX": "g++ -m64"})
    with pytest.raises(script.Lacking, match="CXX=icpx is not there"):
        script.need_tools({**env, "CXX": "icpx"})


def test_missing_environment_is_an_error(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--mpi", "mpich", "--env", str(tmp_path / "place")]) == 1
    error = capsys.readouterr().err
    assert error == "horovod: there is no environment place: make horovod makes it\n"


def test_wrong_mpi_is_an_error(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    python_that_finds(place, "Open MPI")
    assert script.main(["--mpi", "mpich", "--env", str(place)]) == 1
    assert capsys.readouterr().err == "horovod: place holds openmpi and not mpich\n"


def test_reason_is_written_where_there_is_no_compiler(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place, reason = tmp_path / "place", tmp_path / "reason"
    python_that_finds(place, "MPICH")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CXX", raising=False)
    arguments = ["--env", str(place), "--cache", str(tmp_path), "--reason-file", str(reason)]
    assert script.main(arguments) == script.LACKING == suite.LACKING
    assert reason.read_text() == "no C++ compiler (apt-get install g++)"
    assert capsys.readouterr().err == f"horovod: {reason.read_text()}\n"


def test_stamp_decides_whether_anything_is_to_be_done(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    python_that_finds(place, "MPICH")
    horovod = script.Horovod(place, "mpich", tmp_path / "cache")
    done: list[str] = []

    def build(key: str, facts: tuple) -> Path:
        done.append("build")
        wheel = horovod.cache / key / "horovod-1.whl"
        executable(wheel)
        python_that_finds(place, "MPICH", script.VERSION)
        return wheel

    def check() -> None:
        done.append("check")

    def broken() -> None:
        raise script.SetupError("does not load")

    monkeypatch.setattr(horovod, "build", build)
    monkeypatch.setattr(horovod, "pip", lambda *arguments: None)
    monkeypatch.setattr(horovod, "check", broken)
    with pytest.raises(script.SetupError, match="does not load"):
        horovod.make()
    assert horovod.stamped() == ""
    monkeypatch.setattr(horovod, "check", check)
    horovod.make()  # a wheel that did not work is built anew
    assert done == ["build", "build", "check"]
    horovod.make()
    assert len(done) == 3
    horovod.stamp.unlink()  # an environment made afresh takes the wheel from the cache
    horovod.make()
    assert done[3:] == ["check"]


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        ("def init(): pass", ""),
        ("print('not built')", "Horovod was built without its extension for torch"),
        ("import absent_module", "Horovod lacks absent_module"),
        (
            "raise ImportError('libmpi.so.40: cannot open\\nmore')",
            "Horovod was not built for this MPI or torch: libmpi.so.40: cannot open",
        ),
    ],
)
def test_what_is_wrong_with_horovod_is_said(
    torch: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "torch.py").write_text(torch)
    for name in modules_of_horovod():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert require.no_horovod.__wrapped__() == reason
    finally:
        for name in modules_of_horovod():
            del sys.modules[name]
    assert capsys.readouterr().out == ""


def test_absent_horovod_is_left_out_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(require, "no_horovod", lambda: "no Horovod")
    monkeypatch.delenv("ALADDIN_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"left out: no Horovod \(make horovod\)"):
        require.horovod()
    monkeypatch.setenv("ALADDIN_REQUIRE", "all")
    with pytest.raises(pytest.fail.Exception, match=r"no Horovod"):
        require.horovod()


@pytest.mark.parametrize(
    ("status", "reason", "left_out", "failures"),
    [
        (0, "", [], []),
        (1, "", [], [("make horovod", "exit status 1")]),
        (suite.LACKING, "no make", [("Horovod", "no make")], []),
        (suite.LACKING, "", [], [("make horovod", "exit status 3")]),
    ],
)
def test_suite_leaves_out_what_the_machine_lacks_and_counts_the_rest_as_failures(
    status: int, reason: str, left_out: list, failures: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = suite.Suite(argparse.Namespace(budget=10, env=[("mpich", Path("/place"))]))

    def command(stage: str, argv: list[str], env: dict[str, str]) -> tuple[int, str]:
        assert argv[-4:-1] == ["--env", "/place", "--reason-file"]
        if reason:
            Path(argv[-1]).write_text(reason)
        return status, f"exit status {status}"

    monkeypatch.setattr(stages, "command", command)
    stages.make_horovod("mpich")
    assert stages.results[0].left_out == left_out
    assert stages.results[0].failures == failures
