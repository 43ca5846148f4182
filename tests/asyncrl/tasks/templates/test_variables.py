"""Variables of chat templates and their date: the same for prompts and turns, all days of a run."""

from __future__ import annotations

import asyncio
import copy
import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers.utils.chat_template_utils
from chat_models import chat_tokenizer, stop_ids
from local_environments import LocalPool

from asyncrl.config.run_config import RunConfig, load_config, parse_config
from asyncrl.environments.protocol import StepResult
from asyncrl.errors import ConfigError, DataError, UserError
from asyncrl.generator.sample_state import SampleGeneration
from asyncrl.generator.turns.environment_setup import translation_of
from asyncrl.generator.turns.environment_turns import Episodes
from asyncrl.rollout.trajectory import SampleId
from asyncrl.runs.directory import RunDirectory
from asyncrl.startup.gpu_defaults import with_date, with_recorded_date
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.prompts import PromptEncoder, Question
from asyncrl.tasks.templates.variables import names_the_date
from asyncrl.wire.messages.data import encode_tokens
from asyncrl.wire.messages.to_generator import PromptPayload

USER = {"role": "user", "content": "go"}


def config_of(path: Path | None = None, **task: Any) -> RunConfig:
    run = {"name": "mine", "directory": str(path)} if path else {}
    return parse_config({"run": run, "task": task}, source="the test")


def prompt_of(tokenizer: Any, task: TaskConfig) -> str:
    (prompt,), _ = PromptEncoder(tokenizer, task).encode([Question("p", "go", {}, "here")])
    return prompt.text


def turns_of(tokenizer: Any, config: RunConfig, name: str) -> Any:
    return translation_of(config, tokenizer, tokenizer.decode, stop_ids(name))


def dated_tokenizer() -> Any:
    """Its template asks for the date as Llama 3.2's does."""
    tokenizer = copy.deepcopy(chat_tokenizer("llama31"))
    given, fixed = tokenizer.chat_template, "Today Date: 26 Jul 2024\\n\\n'"
    asked = "Today Date: ' + strftime_now('%d %b %Y') + '\\n\\n'"
    tokenizer.chat_template = given.replace(fixed, asked)
    assert names_the_date(tokenizer)
    return tokenizer


def test_variables_reach_prompts_and_turns() -> None:
    tokenizer = chat_tokenizer("qwen3")
    plain, quick = config_of(), config_of(chat_template_kwargs={"enable_thinking": False})
    assert "<think>" not in prompt_of(tokenizer, plain.task)
    assert prompt_of(tokenizer, quick.task).endswith("<think>\n\n</think>\n\n")
    turn = np.array([5, *stop_ids("qwen3")[:1]], np.int32)
    for config, thinks in ((plain, False), (quick, True)):
        translation = turns_of(tokenizer, config, "qwen3")
        for tokens in (
            translation.prompt([USER], []),
            translation.between([USER], "more", turn, []),
        ):
            assert tokenizer.decode(tokens).endswith("</think>\n\n") == thinks


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": []}, "tools cannot be set here: they are the environment's"),
        ({"tokenize": True}, "tokenize cannot be set here"),
        ({"strftime_now": 1}, "set task.chat_template_date"),
        ({"enable thinking": True}, "cannot be the name of a variable"),
        ({"x": float("nan")}, "x is nan, which JSON cannot hold"),
    ],
)
def test_what_cannot_be_a_variable_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(chat_template_kwargs=given)


def test_variables_without_an_effect_are_refused() -> None:
    typo = config_of(chat_template_kwargs={"enable_thinkin": False}).task
    with pytest.raises(DataError, match=r"enable_thinkin has no effect: .* does not use it"):
        PromptEncoder(chat_tokenizer("qwen3"), typo)
    bare = copy.deepcopy(chat_tokenizer("qwen3"))
    bare.chat_template = None
    with pytest.raises(DataError, match="does not exist"):
        PromptEncoder(bare, typo)


def test_the_date_is_the_runs_in_prompts_and_turns() -> None:
    tokenizer = dated_tokenizer()
    config = config_of(chat_template_date="2024-02-29")
    assert "Today Date: 29 Feb 2024" in prompt_of(tokenizer, config.task)
    tokens = turns_of(tokenizer, config, "llama31").prompt([USER], [])
    assert "Today Date: 29 Feb 2024" in tokenizer.decode(tokens)
    today = dt.datetime.now(dt.UTC).astimezone().date()
    assert with_date(config_of()).task.chat_template_date == today
    assert with_date(config) == config


def test_a_resumed_run_keeps_its_date(tmp_path: Path) -> None:
    begun = config_of(tmp_path, chat_template_date="2024-02-29")
    RunDirectory.create(begun, resume=False, clean=False).close()
    given = config_of(tmp_path)
    resumed = with_recorded_date(given)
    assert resumed.task.chat_template_date == dt.date(2024, 2, 29)
    assert load_config(tmp_path / "mine" / "config.yaml").task == resumed.task
    other = config_of(tmp_path, chat_template_date="2024-03-01")
    assert with_recorded_date(other) == other
    with pytest.raises(UserError, match=r"cannot resume .*: task was"):
        RunDirectory.create(other, resume=True, clean=False)
    RunDirectory.create(given, resume=True, clean=False).close()  # the task does not differ


def test_midnight_does_not_make_an_environment_undeterministic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = dated_tokenizer()

    class Day(dt.datetime):
        today = 1

        @classmethod
        def now(cls, tz: Any = None) -> dt.datetime:
            return dt.datetime(2026, 12, cls.today, 23, 59)  # noqa: DTZ001 - as the template's

    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Day)

    class Fixed:
        replay = "deterministic"

        def reset(self, row: dict[str, Any], seed: int) -> list[dict[str, Any]]:
            return [USER]

        def step(self, action: Any) -> StepResult:
            return StepResult("more")

    async def scenario() -> None:
        pool = LocalPool(Fixed, {"on_error": "stop"})
        translation = turns_of(tokenizer, config_of(), "llama31")
        episodes = Episodes(pool, translation, max_tokens=500, max_model_len=4000)
        prompt = PromptPayload("p", encode_tokens(np.array([1], np.int32)), {"prompt": "x"})
        sample = SampleGeneration(SampleId(0, 0), prompt, 1)
        episode = sample.episode = episodes.new(sample)
        await episodes.begin(sample)
        before = episode.prompt.tolist()
        pool.local.lose()
        Day.today = 2
        session = await episodes._session(sample, episode)
        assert session.first == [USER]
        assert translation.prompt([USER], []).tolist() == before

    asyncio.run(scenario())
