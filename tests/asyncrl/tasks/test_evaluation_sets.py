"""Named held-out sets: real files, read like the task's own data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.errors import DataError
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.evaluation_config import EvaluationSetConfig
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import builtin_tokenizer
from asyncrl.tasks.prompts import held_out_sets


def write(path: Path, *examples: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in examples))
    return str(path)


def test_sets_are_read_in_addition_to_the_tasks_own_prompts(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    builtin_tokenizer().save_pretrained(tmp_path / "model")
    lines = write(tmp_path / "a.jsonl", {"q": "1+1=", "answer": 2}, {"q": "2+2=", "answer": 4})
    table = datasets.Dataset.from_list([{"prompt": "3+3=", "answer": "6"}])
    table.to_parquet(str(tmp_path / "b.parquet"))
    sets = {
        "own.fields": EvaluationSetConfig(path=lines, prompt_field="q"),
        "parquet": EvaluationSetConfig(path=str(tmp_path / "b.parquet")),
    }
    task = load_task(TaskConfig(train_size=8, evaluation_size=3), str(tmp_path / "model"), 0, sets)
    found = held_out_sets(task)
    assert list(found) == ["held_out", "own.fields", "parquet"]
    assert [len(prompts) for prompts in found.values()] == [3, 2, 1]
    first = found["own.fields"][0]
    assert (first.example["prompt"], first.example["answer"]) == ("1+1=", "2")
    ids = [prompt.prompt_id for prompts in (task.train, *found.values()) for prompt in prompts]
    assert len(set(ids)) == len(ids)
    alone = load_task(TaskConfig(train_size=8, evaluation_size=3), str(tmp_path / "model"), 0)
    assert [one.prompt_id for one in alone.train] == [one.prompt_id for one in task.train]


def test_a_set_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    builtin_tokenizer().save_pretrained(tmp_path / "model")
    task, model = TaskConfig(train_size=8, evaluation_size=3), str(tmp_path / "model")
    missing = {"gone": EvaluationSetConfig(path=str(tmp_path / "gone.jsonl"))}
    with pytest.raises(DataError, match=r"evaluation\.sets\.gone\.path"):
        load_task(task, model, 0, missing)
    lines = write(tmp_path / "long.jsonl", {"prompt": "1+1=1+1=1+1=1+1=1+1=1+1=", "answer": 2})
    short = task.model_copy(update={"max_prompt_tokens": 16, "too_long": "filter"})
    with pytest.raises(DataError, match=r"evaluation\.sets\.long: all 1 prompts are longer"):
        load_task(short, model, 0, {"long": EvaluationSetConfig(path=lines)})
