"""What the last lines of a run of the suite say, and who gets a second try."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import second_try
from suite_outcome import SLOW, id_of

SUPPORT = Path(second_try.__file__).parent
TESTS = """
import pytest
from suite_outcome import not_judged, not_run

def test_passes(request):
    not_run(request.node, "no browser")
    not_judged(request.node, "7 rejected, 100 wanted")

def test_says_more(request):
    not_judged(request.node, "8 rejected, 100 wanted")

@pytest.mark.parametrize("n", [1, 2])
def test_is_skipped(n):
    pytest.skip("no GPU")

def test_fails():
    assert 1 == 2, "a reason"

@pytest.fixture
def broken():
    raise OSError("no port")

def test_has_no_start(broken):
    pass
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run pytest with our plugin, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-p", "suite_outcome", "--outcome", "o.json"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_what_was_not_run_is_counted_by_reason_and_failures_are_written(
    tmp_path: Path, workers: Sequence[str]
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    code, text = run(tmp_path, *workers, "test_some.py")
    assert code == 1, text
    assert re.findall(r"^NOT RUN .*", text, re.MULTILINE) == [
        "NOT RUN 2: no GPU",
        "NOT RUN 1: no browser",
    ]
    assert re.findall(r"^NOT JUDGED .*", text, re.MULTILINE) == [
        "NOT JUDGED 1: test_some.py::test_passes: 7 rejected, 100 wanted",
        "NOT JUDGED 2: test_some.py::test_says_more: 8 rejected, 100 wanted",
    ]
    outcome = json.loads((tmp_path / "o.json").read_text())
    (tests, worker, cpu) = outcome.pop("files").pop("test_some.py")
    assert tests == 6
    assert worker > 0 <= cpu
    assert isinstance(outcome.pop("slow"), list)
    assert outcome == {
        "exit_status": 1,
        "failed": {
            "test_some.py::test_fails": "call: AssertionError: a reason",
            "test_some.py::test_has_no_start": "setup: OSError: no port",
        },
    }


BLOCKED = """
import subprocess

def test_waits_for_a_child_that_does_not_end():
    with subprocess.Popen(["sleep", "300"]) as child:
        try:
            child.wait()
        finally:
            print(child.pid)

def test_passes():
    pass
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["one process", "a worker"])
def test_a_test_that_waits_for_ever_fails_and_the_next_one_runs(
    tmp_path: Path, workers: Sequence[str]
) -> None:
    (tmp_path / "test_some.py").write_text(BLOCKED)
    bound = ("-p", "bounded_tests", "--longest", "2")
    code, text = run(tmp_path, *bound, *workers, "test_some.py")
    assert code == 1
    assert "it has not ended within 2 s" in text
    assert "1 failed, 1 passed" in text
    os.kill(int(re.findall(r"^\d+$", text, re.MULTILINE)[0]), signal.SIGKILL)


def test_a_file_that_cannot_be_read_is_no_failed_test(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name")
    code, text = run(tmp_path, "test_broken.py")
    assert code == 2, text
    assert second_try.second_try(tmp_path / "o.json", lambda test: True) == 1


def outcome(folder: Path, failed: int, exit_status: int = 1) -> Path:
    file = folder / "outcome.json"
    tests = {f"tests/test_{i}.py::test": f"call: reason {i}" for i in range(failed)}
    file.write_text(json.dumps({"exit_status": exit_status, "failed": tests}))
    return file


def test_up_to_three_failed_tests_run_once_more_and_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    assert second_try.second_try(outcome(tmp_path, 3), lambda test: not seen.append(test)) == 0
    assert seen == [f"tests/test_{i}.py::test" for i in range(3)], "each once"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-7:-1] == [
        text
        for i in range(3)
        for text in (
            f"SECOND TRY tests/test_{i}.py::test",
            f"  its first failure: call: reason {i}",
        )
    ]


@pytest.mark.parametrize(
    ("failed", "exit_status", "why"),
    [
        (4, 1, "4 tests failed"),
        (1, 2, "exit status 2"),
        (0, 1, "exit status 1"),
    ],
)
def test_others_get_none(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    failed: int,
    exit_status: int,
    why: str,
) -> None:
    def never(test: str) -> bool:
        raise AssertionError(test)

    assert second_try.second_try(outcome(tmp_path, failed, exit_status), never) == 1
    assert why in capsys.readouterr().out
    assert second_try.second_try(tmp_path / "none.json", never) == 1


def test_a_test_that_fails_alone_too_fails_the_suite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = "tests/test_1.py::test"
    assert second_try.second_try(outcome(tmp_path, 3), lambda test: test != broken) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"FAILED TWICE: {broken}"


def test_a_test_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_some.py").write_text("def test_a(): pass\ndef test_b(): assert 0")
    monkeypatch.chdir(tmp_path)
    assert second_try.runs_alone("test_some.py::test_a")
    assert not second_try.runs_alone("test_some.py::test_b")


@pytest.mark.parametrize(
    ("nodeid", "distributed", "name"),
    [
        ("tests/a.py::test_b[x]@/work/tests/a.py", True, "tests/a.py::test_b[x]"),
        ("tests/a.py::test_b[me@home]@vllm", True, "tests/a.py::test_b[me@home]"),
        ("tests/a.py::test_b[me@home]", True, "tests/a.py::test_b[me@home]"),
        ("tests/a.py::test_b", True, "tests/a.py::test_b"),
        ("tests/a.py::test_b[me@home", False, "tests/a.py::test_b[me@home"),
    ],
)
def test_a_failed_test_is_named_so_that_pytest_finds_it_again(
    nodeid: str, distributed: bool, name: str
) -> None:
    report: Any = SimpleNamespace(nodeid=nodeid, **({"node": "gw0"} if distributed else {}))
    assert id_of(report) == name


def test_what_check_leaves_out_is_there() -> None:
    for line in SLOW.read_text().split():
        file, *_, name = line.split("::")
        assert name == "runTest" or f"def {name}(" in (SUPPORT.parents[1] / file).read_text(), line
