"""Only records read the system's time: it can jump, and no decision may depend on it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("asyncrl", "engine", "trainer", "scheduler", "cache", "monitoring", "wire", "rollout")
RECORDS = {
    "asyncrl/environments/endpoint.py": "when an answer was made, as OpenAI's answers say",
    "asyncrl/evaluation/round.py": "when an evaluation ended, for its record",
    "asyncrl/web/feed.py": "the time of a snapshot, for the reader",
    "asyncrl/web/sections.py": "the last seconds of time lines, which have that time",
    "asyncrl/processes/generator/engine_log.py": "when a record of the engine was made",
    "asyncrl/processes/trainer/checkpoints.py": "when a step ended, for its record",
    "asyncrl/run/directory.py": "which run was started last, for commands without a name",
    "asyncrl/run/failed_starts.py": "the name of a folder",
    "asyncrl/rewards/services/retries.py": "a server says by a date when it may be asked again",
    "asyncrl/run/machine_checks.py": "`asyncrl doctor` judges the clock itself",
    "asyncrl/run/orders.py": "when an order was given, for people",
    "asyncrl/run/progress.py": "when a step ended and the run began, for people",
    "asyncrl/tasks/template_variables.py": "the day that chat templates get; a run records it",
    "monitoring/report/write.py": "when the report was written",
    "monitoring/timeline.py": "read once, so that spans of all processes share an origin",
}
"""Modules that may read the system's time, and what for."""
WALL = {("time", name) for name in ("time", "time_ns", "localtime", "gmtime", "ctime", "strftime")}
WALL |= {("datetime", name) for name in ("now", "utcnow", "today")} | {("date", "today")}


def reads_of_the_clock(path: Path) -> list[int]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in WALL:
                found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [node.lineno for name in node.names if ("time", name.name) in WALL]
    return found


def test_only_records_read_the_systems_time() -> None:
    reading = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if reads_of_the_clock(path)
    }
    assert reading == set(RECORDS), "use time.monotonic(), or add the module with its reason"
