"""A resumed run notices that its data or its functions are not those of before."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from asyncrl_runs import ROOT
from run_in_threads import ThreadedRun, ThreadLauncher

from asyncrl.config.run_config import parse_config
from asyncrl.engine.config import SamplingConfig
from asyncrl.errors import UserError
from asyncrl.runs.directory import read_state
from asyncrl.runs.input_files import changes_since, inputs_of
from asyncrl.tasks.evaluation_config import EvaluationConfig
from asyncrl.tasks.prompts import Prompt, Task

ROWS = [{"prompt": f"question {n}", "answer": str(n)} for n in range(40)]
REWARD = "def score(prompt, response, example):\n    return float(len(response) % 3)\n"


@pytest.fixture
def run(tmp_path: Path, own_model: Path, monkeypatch: pytest.MonkeyPatch) -> ThreadedRun:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("asyncrl.startup.launching.LocalLauncher", ThreadLauncher)
    return ThreadedRun(tmp_path / "runs", own_model)


@pytest.mark.slow
def test_a_resume_with_other_rows_or_another_reward_says_so(
    run: ThreadedRun, tmp_path: Path
) -> None:
    """Otherwise the accuracies of two different things would look like progress."""
    data, reward = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    reward.write_text(REWARD)
    settings = {
        "task__path": data,
        "task__map": "null",
        "task__prompt_field": "prompt",
        "task__answer_field": "answer",
        "task__evaluation_size": 4,
        "rewards__functions": f"[{{name: '{reward}:score'}}]",
        "trainer__checkpoint_every": 1,
    }
    first = run.run(run__steps=1, **settings)
    assert None not in (first.accuracy_before, first.accuracy_after)

    same = run.run(resume=True, run__steps=2, **settings)
    assert same.accuracy_before == first.accuracy_before
    assert "changed since" not in run.said()

    data.write_text("".join(json.dumps(row) + "\n" for row in reversed(ROWS)))
    with pytest.raises(UserError, match=r"training rows and the held-out rows .*--changed-data"):
        run.run(resume=True, run__steps=3, **settings)
    state = read_state(run.folder)
    assert state is not None
    assert state.ended == "done", "nothing was changed"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    reward.write_text(REWARD.replace("% 3", "% 3 + 5"))
    other = run.run(resume=True, run__steps=3, **settings)
    assert other.accuracy_before is None, "the difference would be of two rewards"
    assert other.accuracy_after is not None
    assert f"changed since the run was started last: rewards.functions {reward}:score" in run.said()
    assert "accuracy before training is left out" in run.said()

    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS[::-1]))
    last = run.run(resume=True, accept_changes=True, run__steps=4, **settings)
    assert (last.steps, last.accuracy_before) == (4, None)


def test_each_input_is_named_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "scores.py").write_text(REWARD)
    (tmp_path / "world.py").write_text("class World: ...")
    config = parse_config(
        {
            "rewards": {"functions": [{"name": "mine.scores:score"}, {"name": "exact_match"}]},
            "environment": {"name": "world.py:World"},
        },
        source="run.yaml",
    )

    def task(train: int = 3, held: int = 2, answer: str = "1") -> Task:
        def prompts(count: int) -> list[Prompt]:
            tokens = np.array([1], np.int32)
            return [Prompt(str(n), tokens, "", {"answer": answer}) for n in range(count)]

        return Task(prompts(train), prompts(held), (0,), None)

    before = inputs_of(config, task())
    assert changes_since(None, before) == ([], [])
    assert changes_since(before, inputs_of(config, task())) == ([], [])
    assert changes_since(before, inputs_of(config, task(train=4)))[0] == ["training rows"]
    rows, code = changes_since(before, inputs_of(config, task(answer="2")))
    assert len(rows) == 2
    assert code == []
    (tmp_path / "mine" / "scores.py").write_text(REWARD + "# more")
    (tmp_path / "world.py").write_text("class World: x = 1")
    _, code = changes_since(before, inputs_of(config, task()))
    assert code == ["rewards.functions mine.scores:score", "environment.name world.py:World"]
    warmer = config.model_copy(update={"sampling": SamplingConfig(temperature=0.5, top_p=0.9)})
    _, code = changes_since(before, inputs_of(warmer, task()))
    assert code[2:] == ["sampling.temperature", "sampling.top_p"]
    greedy = EvaluationConfig(temperature=0)
    changed = inputs_of(config.model_copy(update={"evaluation": greedy}), task())
    assert changes_since(before, changed)[1][2:] == ["evaluation.temperature"]
