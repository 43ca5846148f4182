"""metrics.jsonl, followed while it grows, is cut and is replaced."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.web import step_file
from asyncrl.web.step_file import StepFile
from asyncrl.wire.records.step import StepMetrics


def line(step: int, time: float = 0.0) -> bytes:
    return msgspec.json.encode(StepMetrics(step=step, time=time)) + b"\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_file_that_is_not_there_yet(path: Path) -> None:
    steps = StepFile(path)
    steps.refresh()
    assert steps.lines(0, 10) == []
    path.write_bytes(line(0))
    steps.refresh()
    assert [one.step for one in steps.recent] == [0]
    path.unlink()
    steps.refresh()
    assert not steps.recent


def test_a_line_counts_once_it_is_whole(path: Path) -> None:
    steps = StepFile(path)
    path.write_bytes(line(0) + line(1)[:20])
    steps.refresh()
    assert len(steps.recent) == 1
    with path.open("ab") as file:
        file.write(line(1)[20:] + b"nonsense\n" + line(2))
    steps.refresh()
    assert [one.step for one in steps.recent] == [0, 1, 2]
    steps.refresh()


def test_lines_are_as_in_the_file(path: Path) -> None:
    lines = [line(step) for step in range(10)]
    path.write_bytes(b"".join(lines))
    steps = StepFile(path)
    steps.refresh()
    assert steps.lines(4, 3) == [one[:-1] for one in lines[4:7]]
    assert steps.lines(9, 100) == [lines[9][:-1]]
    assert steps.lines(10, 5) == []


def test_only_the_newest_steps_stay_in_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_file, "MAX_STEPS_IN_MEMORY", 5)
    path.write_bytes(b"".join(line(step) for step in range(20)))
    steps = StepFile(path)
    steps.refresh()
    assert [one.step for one in steps.recent] == list(range(15, 20))
    assert len(steps.lines(0, 100)) == 20


_CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 4)),
        st.tuples(st.just("cut"), st.integers(1, 6)),
        st.tuples(st.just("replace"), st.integers(0, 6)),
        st.tuples(st.just("look"), st.just(0)),
    ),
    max_size=25,
)


@given(_CHANGES)
def test_it_is_what_reading_the_whole_file_gives(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, int]]
) -> None:
    """However the run returns to earlier steps: by cutting, replacing or appending."""
    path = tmp_path_factory.mktemp("steps") / "metrics.jsonl"
    path.write_bytes(b"")
    steps, following, clock = StepFile(path), 0, 0.0
    for kind, count in changes:
        clock += 1.0
        if kind == "look":
            steps.refresh()
        elif kind == "append":
            with path.open("ab") as file:
                file.write(b"".join(line(following + i, clock) for i in range(count)))
            following += count
        else:
            kept = path.read_bytes().splitlines(keepends=True)[: max(0, following - count)]
            following = len(kept)
            if kind == "cut":
                os.truncate(path, sum(map(len, kept)))
            else:
                other = path.with_suffix(".new")
                other.write_bytes(b"".join(kept))
                other.replace(path)
    steps.refresh()
    assert [(one.step, one.time) for one in steps.recent] == [
        (one.step, one.time) for one in read_metrics(path)
    ]
    assert [msgspec.json.decode(one)["time"] for one in steps.lines(0, 1000)] == [
        one.time for one in read_metrics(path)
    ]
