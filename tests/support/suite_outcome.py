"""The last lines of a run of the suite: minutes by kind of test, and what was not run or judged.

A plugin of pytest (tests/conftest.py). `--outcome FILE` writes what `second_try` needs, of each
file its tests, seconds of a worker and seconds of CPU, and which tests are slow. `--quick` leaves
those of `SLOW` out, a list that `python tests/support/suite_outcome.py FILE` makes of an outcome.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_NOT_RUN = "not run"
_NOT_JUDGED = "not judged"
_KIND = "kind"
_CPU = "cpu seconds"
SLOW = Path(__file__).parents[1] / "slow_tests.txt"
"""What `make check` has no time for: tests that took this long, all their cases together."""
_SLOW_SECONDS = 0.15
_WAITING = 0.25
"""What a second of a worker counts beside one of CPU."""
_BEFORE = pytest.StashKey[float]()
_ENGINES = {"vllm": "real vLLM", "sglang": "real SGLang", "ray": "real Ray"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcome", type=Path, help="write the failed tests to this file (JSON)")
    parser.addoption("--quick", action="store_true", help="leave out the tests of slow_tests.txt")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcome(config.getoption("outcome")), "asyncrl-outcome")


def not_run(item: pytest.Item, why: str) -> None:
    """Count a part that a test leaves out on this machine.

    Args:
        item: the test (`request.node`).
        why: one reason; tests with the same one are counted together.
    """
    item.user_properties.append((_NOT_RUN, why))


def not_judged(item: pytest.Item, why: str) -> None:
    """Note that a test could not judge a statement within its bound. It does not fail for that.

    Only a check of power may say so: that a mutant is caught, or that a sample has enough cases.

    Args:
        item: the test (`request.node`).
        why: what the test had when it gave up, and what it would have needed.
    """
    item.user_properties.append((_NOT_JUDGED, why))


def kind_of(item: pytest.Item) -> str:
    """The kind of test that its minutes are counted under (docs/testing.md)."""
    for marker, kind in _ENGINES.items():
        if item.get_closest_marker(marker) is not None:
            return kind
    folders = item.path.parts
    if item.get_closest_marker("library") is not None or "sinks" in folders:
        return "other libraries"
    if item.get_closest_marker("statistics") is not None:
        return "statistics"
    names = vars(getattr(item, "module", None) or object)
    if "command_line" in getattr(item, "fixturenames", ()) or "CommandLine" in names:
        return "whole runs"
    return "benchmarks" if "benchmarks" in folders else "the rest"


def _cpu_seconds() -> float:
    """Used so far by this process and by its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist appends groups to names
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.quick:
        slow = set(SLOW.read_text(encoding="utf-8").split())
        left_out = [item for item in items if _function_of(item.nodeid) in slow]
        items[:] = [item for item in items if _function_of(item.nodeid) not in slow]
        config.hook.pytest_deselected(items=left_out)


def _function_of(test: str) -> str:
    """The name of a test without its case."""
    return test.partition("[")[0].partition("@")[0]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    item.user_properties.append((_KIND, kind_of(item)))
    item.stash[_BEFORE] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    finally:
        item.user_properties.append((_CPU, round(_cpu_seconds() - item.stash[_BEFORE], 2)))


class _Outcome:
    """Collects reports in the process that prints the summary."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._failed = dict[str, str]()
        self._not_run = Counter[str]()
        self._not_judged = list[tuple[str, str]]()
        """Tests, and why."""
        self._minutes = defaultdict[str, list[float]](lambda: [0.0, 0.0, 0.0])
        """By kind: tests, minutes of a worker, minutes of CPU."""
        self._files = defaultdict[str, list[float]](lambda: [0.0, 0.0, 0.0])
        """The same of each file, in seconds."""
        self._functions = Counter[str]()
        """How slow each test is, all its cases together."""
        self._seconds = Counter[str]()
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.setdefault(id_of(report), _last_line(report))
        if report.skipped and not hasattr(report, "wasxfail"):
            self._not_run[_reason(report)] += 1
        if report.when == "teardown":
            properties = dict(report.user_properties)
            worker = self._seconds.pop(report.nodeid)
            cpu = float(properties.get(_CPU, 0.0))  # type: ignore[arg-type]
            for total, unit in (
                (self._minutes[str(properties.get(_KIND, "the rest"))], 60),
                (self._files[report.nodeid.split("::")[0]], 1),
            ):
                total[0] += 1
                total[1] += worker / unit
                total[2] += cpu / unit
            self._functions[_function_of(report.nodeid)] += max(cpu, worker * _WAITING)
            self._not_run.update(
                str(why) for name, why in report.user_properties if name == _NOT_RUN
            )
            self._not_judged += [
                (id_of(report), str(why))
                for name, why in report.user_properties
                if name == _NOT_JUDGED
            ]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed.setdefault(report.nodeid, "it cannot be collected")
        elif report.skipped:
            self._not_run[_reason(report)] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            files = dict(sorted(self._files.items(), key=lambda one: -one[1][2]))
            slow = sorted(one for one, t in self._functions.items() if t >= _SLOW_SECONDS)
            outcome = {
                "exit_status": int(exitstatus),
                "failed": self._failed,
                "files": files,
                "slow": slow,
            }
            self._file.write_text(json.dumps(outcome, indent=1), encoding="utf-8")

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if sum(total[1] for total in self._minutes.values()) > 1:
            terminalreporter.section("minutes by kind of test")
            terminalreporter.line(f"{'':18}{'tests':>7}{'worker':>9}{'CPU':>9}")
            for kind, (tests, worker, cpu) in sorted(
                self._minutes.items(), key=lambda one: -one[1][1]
            ):
                terminalreporter.line(f"{kind:18}{tests:7.0f}{worker:9.2f}{cpu:9.2f}")
        for why, count in sorted(self._not_run.items()):
            terminalreporter.line(f"NOT RUN {count}: {why}")
        for number, (test, why) in enumerate(sorted(self._not_judged), start=1):
            terminalreporter.line(f"NOT JUDGED {number}: {test}: {why}")


def id_of(report: pytest.TestReport) -> str:
    """By which pytest finds the test again: pytest-xdist has appended its group (`@vllm`)."""
    name, at, group = report.nodeid.rpartition("@")
    return name if at and hasattr(report, "node") and not group.endswith("]") else report.nodeid


def _last_line(report: pytest.TestReport) -> str:
    """What a test failed with, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr or "it failed")
    return f"{report.when}: {next(iter(text.strip().splitlines()), '')}"[:300]


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ").split("\n")[0]


if __name__ == "__main__":
    SLOW.write_text("\n".join(json.loads(Path(sys.argv[1]).read_text())["slow"]) + "\n")
