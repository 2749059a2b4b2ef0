"""The test runner's own arithmetic: what counts as passed, failed and left out."""

from pathlib import Path

import require
import suite

REPORT = """<?xml version="1.0"?>
<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_good" file="tests/unit/test_a.py"/>
<testcase classname="tests.unit.test_a" name="test_bad" file="tests/unit/test_a.py">
  <failure message="assert 1 == 2&#10;more">...</failure></testcase>
<testcase classname="tests.unit.test_a" name="test_bad" file="tests/unit/test_a.py">
  <error message="failed on teardown">...</error></testcase>
<testcase classname="tests.unit.test_a" name="test_root" file="tests/unit/test_a.py">
  <skipped type="pytest.skip" message="left out: needs root"/></testcase>
<testcase classname="tests.unit.test_a" name="test_spin" file="tests/unit/test_a.py">
  <skipped type="pytest.skip" message="left out: needs root"/></testcase>
<testcase classname="tests.unit.test_b" name="test_odd" file="tests/unit/test_b.py">
  <skipped type="pytest.skip" message="needs mpiexec -n 2"/></testcase>
</testsuite></testsuites>
"""


def read(folder: Path) -> suite.Result:
    path = folder / "junit.xml"
    path.write_text(REPORT)
    result = suite.Result("unit", seconds=1.0)
    suite.read_junit(path, result)
    return result


def test_report_is_counted(tmp_path: Path) -> None:
    result = read(tmp_path)
    assert result.passed == 1
    assert result.failures == [("tests/unit/test_a.py::test_bad", "assert 1 == 2")]
    assert len(result.left_out) == 3


def test_summary_lists_what_was_left_out_and_closes_with_the_sums(tmp_path: Path) -> None:
    other = suite.Result("mpi -n 2", "mpich", passed=4)
    text, well = suite.summary([read(tmp_path), other], require_all=False)
    assert "unit: tests/unit/test_a.py (2 tests): needs root" in text
    assert "unit: tests/unit/test_b.py::test_odd: needs mpiexec -n 2" in text
    assert text.splitlines()[-1] == "5 passed, 1 failed, 3 skipped"
    assert not well


def test_left_out_is_a_failure_only_where_all_is_required() -> None:
    result = suite.Result("cluster", "mpich", passed=1, left_out=[("tests/cluster", "needs root")])
    assert suite.summary([result], require_all=False)[1]
    assert not suite.summary([result], require_all=True)[1]


def test_tests_without_a_gpu_are_listed_and_no_failure() -> None:
    why = f"{require.NO_GPU} (torch.cuda.is_available() is false)"
    result = suite.Result("unit", passed=1, left_out=[("tests/unit/test_a.py::test_b", why)])
    text, well = suite.summary([result], require_all=True)
    assert well
    assert f"test_b: {why}" in text
    assert "has failed" not in text
    result.left_out.append(("tests/unit/test_a.py::test_c", "no mpiexec"))
    text, well = suite.summary([result], require_all=True)
    assert not well
    assert "this run has failed" in text


def test_nothing_at_all_is_no_success() -> None:
    assert not suite.summary([], require_all=False)[1]
