"""`task.map`: the user's function on every example, in a process that may do anything."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from asyncrl_runs import OWN

from asyncrl.config.run_config import load_config
from asyncrl.errors import DataError
from asyncrl.startup.preflight import check_machine
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.loading import dataset_questions
from asyncrl.tasks.prompts import Question

FUNCTIONS = """
from __future__ import annotations
import os, subprocess, sys, time
from dataclasses import dataclass

print("output of the module")

@dataclass
class Level:
    text: str

def change(example):
    print("output of a call")
    sys.stdin.read()
    return {"prompt": example["prompt"].upper(), "answer": [example["answer"], {"n": 1}]}

def keep_odd(example):
    return example if int(example["answer"]) % 2 else None

def fails_on_three(example):
    return {**example, "answer": 1 / (int(example["answer"]) - 3)}

def returns_list(example):
    return [example] if example["answer"] == "2" else example

def returns_surrogate(example):
    return {**example, "prompt": "\\ud800"}

def returns_numbered(example):
    return {1: 2}

def returns_no_prompt(example):
    return {"answer": 1}

def hangs(example):
    if example["answer"] == "2":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open(os.environ["PID_FILE"], "w").write(str(child.pid))
        time.sleep(600)
    return example

def dies(example):
    if example["answer"] == "2":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    return example

def two(example, more): ...
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "broken.py").write_text("1 / 0")
    data = tmp_path / "q.jsonl"
    rows = [{"prompt": f"p{i}", "answer": str(i)} for i in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load_with(function: str, **values: Any) -> list[Question]:
        name = function if ":" in function else f"{tmp_path / 'mine.py'}:{function}"
        fields = {"kind": "dataset", "path": str(data), "evaluation_size": 0, "map": name} | values
        train, _ = dataset_questions(TaskConfig.model_validate(fields), seed=0)
        return sorted(train, key=lambda question: question.prompt_id)

    return load_with


def test_examples_are_changed_or_left_out_and_keep_their_ids(
    load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    changed = load("change")
    assert [q.content for q in changed] == [f"P{i}" for i in range(6)]
    assert changed[4].example["answer"] == ["4", {"n": 1}]
    assert changed[4].example["row"] == {"prompt": "P4", "answer": ["4", {"n": 1}]}
    assert [q.prompt_id for q in load("keep_odd")] == ["1", "3", "5"]
    assert "left out 3 examples" in caplog.text


@pytest.mark.parametrize(
    ("function", "place", "message"),
    [
        ("fails_on_three", "q.jsonl:4", "(?s)mine.py:fails_on_three' failed:.*ZeroDivisionError"),
        ("returns_list", "q.jsonl:3", "returned a list; it must return a dict or None"),
        ("returns_surrogate", "q.jsonl:1", "(?s)returns_surrogate' failed:.*surrogates"),
        ("returns_numbered", "q.jsonl:1", "a dict with the key 1; the keys .* are text"),
        ("returns_no_prompt", "q.jsonl:1", "the example has no 'prompt'"),
    ],
)
def test_an_example_that_fails_is_a_bad_row(
    load: Any, function: str, place: str, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(function)
    assert f"{place}: " in str(caught.value)
    if function in {"fails_on_three", "returns_list"}:
        skipped = str(int(place[-1]) - 1)
        ids = [q.prompt_id for q in load(function, on_bad_row="skip")]
        assert ids == [str(i) for i in range(6) if str(i) != skipped]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "has no 'nothing'"),
        ("two", r"cannot be called as function\(example\)"),
        ("no_module_of_this_name:f", "there is no module 'no_module_of_this_name'"),
        ("no_file.py:f", "there is no file no_file.py"),
        ("dies", r"(?s)q.jsonl:3: task.map .* ended with exit code 3. Its last .*last words"),
    ],
)
def test_a_function_that_cannot_be_used(load: Any, function: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(function, on_bad_row="skip")


def test_a_module_that_fails(load: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)cannot be imported:.*ZeroDivisionError"):
        load(f"{tmp_path / 'broken.py'}:f")


def test_a_function_that_hangs_is_killed_with_what_it_started(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(file))
    monkeypatch.setattr("asyncrl.tasks.data.questions.MAP_SECONDS", 5.0)
    with pytest.raises(DataError, match=r"q\.jsonl:3: task.map .* within 5 s \(its limit for one"):
        load("hangs")
    deadline = time.monotonic() + 60
    while Path(f"/proc/{int(file.read_text())}").exists():
        assert time.monotonic() < deadline, "what the function has started is still running"
        os.sched_yield()


def test_the_name_is_checked_first_and_the_example_of_the_docs_works() -> None:
    settings = ["task.kind=dataset", f"task.path={OWN / 'questions.jsonl'}"]
    with pytest.raises(DataError, match=r"^task\.map 'mine' must be written my\.module:function"):
        check_machine(load_config(None, [*settings, "task.map=mine"]))
    name = f"{OWN / 'my_map.py'}:two_digits"
    task = load_config(OWN / "run.yaml", [*settings, f"task.map={name}"]).task
    train, evaluation = dataset_questions(task, seed=0)
    assert train
    for question in [*train, *evaluation]:
        assert len(question.example["answer"]) <= 2
        assert str(question.content).endswith("(at most two digits)")
