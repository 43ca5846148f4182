"""What a user's environment may return, names, and the settings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.environments.calculator import Calculator, evaluate
from asyncrl.environments.guessing import Guessing
from asyncrl.environments.protocol import (
    Action,
    BadAnswerError,
    StepResult,
    Traits,
    checked_reset,
    checked_step,
    traits_of,
)
from asyncrl.environments.registry import check_name, load_factory
from asyncrl.errors import ConfigError, RewardError


def turn(text: str, **values: Any) -> Action:
    return Action(text, [], {"role": "assistant", "content": text}, **values)


@pytest.mark.parametrize(
    "returned",
    [
        StepResult("hint", False, 0.5),
        {"observation": "hint", "reward": 0.5},
        ("hint", False, np.float32(0.5)),
        ("hint", np.bool_(False), 0.5, {"any": "thing"}),
    ],
)
def test_a_step_may_return_a_result_a_dict_or_a_tuple(returned: Any) -> None:
    step = checked_step(returned)
    assert (step.observation, step.done, step.reward) == ("hint", False, 0.5)


def test_observations_are_messages_texts_or_token_ids() -> None:
    messages = [{"role": "tool", "content": "5"}]
    assert checked_step((messages, False)).observation == messages
    assert checked_step((np.array([3, 4]).tolist(), False)).observation == [3, 4]
    assert checked_step((None, True, 1.0)).observation is None
    begun = checked_step({"observation": messages, "new_conversation": np.bool_(True), "tools": []})
    assert (begun.new_conversation, begun.tools) == (True, [])
    assert checked_reset(None) is None
    assert checked_reset("go") == "go"


async def _never_awaited() -> None: ...


@pytest.mark.parametrize(
    ("returned", "reason", "said"),
    [
        (None, "wrong_type", "step must return a StepResult"),
        (("", False), "wrong_type", "the policy needs something to answer"),
        (([{"content": "x"}], False), "wrong_type", "needs a `role`"),
        (([1, -2], False), "wrong_type", "messages, a text or token ids"),
        (("x", "no"), "wrong_type", "`done` must be True or False"),
        (("x", False, "1"), "wrong_type", "`reward` must be a number"),
        (("x", False, float("nan")), "not_finite", "finite in float32"),
        (("x", False, 1e39), "not_finite", "finite in float32"),
        ({"observation": "x", "finished": True}, "wrong_type", "unknown keys finished"),
        (np.zeros((2, 2)), "wrong_type", "step must return a StepResult"),
        (("x", False, 0.0, {}, 1), "wrong_type", "`new_conversation` must be True or False"),
        (("x", False, 0.0, {}, False, []), "wrong_type", "are those of a new conversation"),
        (("x", False, 0.0, {}, True, ["add"]), "wrong_type", "`tools` must be a list of schemas"),
        *(
            (("x", False, 0.0, {}, True, [tool]), "wrong_type", "each of `tools` must be")
            for tool in ({}, {"function": "add"}, {"function": None}, {"function": {"name": 3}})
        ),
    ],
)
def test_other_results_are_refused_with_what_would_be_right(
    returned: Any, reason: str, said: str
) -> None:
    with pytest.raises(BadAnswerError, match=said) as caught:
        checked_step(returned)
    assert caught.value.reason == reason


def test_an_async_method_that_is_not_declared_so_is_named() -> None:
    waiting = _never_awaited()
    with pytest.raises(BadAnswerError, match="declare the method with `async def`"):
        checked_step(waiting)
    waiting.close()
    with pytest.raises(BadAnswerError, match="reset must return"):
        checked_reset([1, 2])


def test_what_an_environment_can_do_is_read_from_it() -> None:
    assert traits_of(Guessing()) == Traits("deterministic")
    assert traits_of(Calculator()).tools[0]["function"]["name"] == "calculator"
    assert not traits_of(object()).goes_back
    with pytest.raises(BadAnswerError, match="each of `tools` must be"):
        traits_of(SimpleNamespace(tools=[{"type": "function", "function": "add"}]))

    class Half:
        def snapshot(self) -> int:
            return 1

    with pytest.raises(BadAnswerError, match="belong together"):
        traits_of(Half())
    with pytest.raises(BadAnswerError, match="`replay` must be"):
        traits_of(type("Wrong", (), {"replay": True})())


def test_names_are_checked_without_running_code(tmp_path: Path) -> None:
    check_name("guessing")
    file = tmp_path / "mine.py"
    file.write_text("raise RuntimeError\n")
    check_name(f"{file}:Game")
    for name, said in [
        ("gessing", "Did you mean 'guessing'"),
        (f"{tmp_path}/none.py:Game", "there is no file"),
        ("my module:Game", "neither a module's name"),
    ]:
        with pytest.raises(RewardError, match=said):
            check_name(name)
    assert isinstance(load_factory("guessing", {"high": 3})(), Guessing)
    with pytest.raises(RewardError, match=r"'hihg'; its signature is \(low: int = 0, high: int"):
        load_factory("guessing", {"hihg": 3})


def test_an_environment_replaces_the_reward_functions_unless_they_are_given() -> None:
    config = parse_config({"environment": {"name": "guessing"}}, source="the test")
    assert (config.rewards.functions, config.reward_labels) == ((), ("environment",))
    both = {"environment": {"name": "guessing"}, "rewards": {"functions": [{"name": "format"}]}}
    assert parse_config(both, source="the test").reward_labels == ("format", "environment")
    assert RunConfig().reward_labels == ("arithmetic",)
    assert parse_config(config.model_dump(mode="json"), source="again") == config
    for values, said in [
        ({"rewards": {"functions": []}}, "leaves no reward"),
        ({"environment": {"name": "python_tools:a:b"}}, "python_tools does not give a reward"),
        (
            {"environment": {"name": "guessing"}, "cache": {"reuse": "lenient"}},
            "cache.reuse: lenient does not work",
        ),
        (
            {"environment": {"name": "guessing", "max_turn_tokens": 257}},
            r"max_turn_tokens \(257\) has no effect: .* at most sampling.max_tokens \(256\)",
        ),
    ]:
        with pytest.raises(ConfigError, match=said):
            parse_config(values, source="the test")


def test_a_guess_is_answered_with_a_hint() -> None:
    game = Guessing(cost=0.25)
    assert game.reset({"number": 7}, seed=1) == "guess the number from 0 to 9."
    assert game.step(turn("5")).observation == "higher"
    assert game.step(turn("what")).observation == "not a number"
    end = game.step(turn("7"))
    assert (end.done, end.reward) == (True, 0.5)
    hints = set()
    for seed in range(40):
        game.reset({}, seed)
        hints.add(game.step(turn("5")).observation)
    assert hints == {"higher", "lower", "correct"}


def test_the_calculator_computes_and_judges() -> None:
    tool = Calculator()
    tool.reset({"prompt": "what is 17+28?", "answer": "45"}, seed=1)
    assert tool.step(turn("calculator 17+28")).observation == [{"role": "tool", "content": "45"}]
    call = {"name": "calculator", "arguments": {"expression": "(2-5)*3"}}
    asked = tool.step(turn("", tool_calls=[call]))
    assert asked.observation == [{"role": "tool", "content": "-9"}]
    assert tool.step(turn("so 45")) == StepResult(done=True, reward=1.0)
    assert tool.step(turn("45 or 46")).reward == 0.0
    for wrong in ("2**9**9", "1/0", "f(2)", "9" * 300, "1+" * 90 + "1+", "9999999999" + "*9" * 90):
        assert evaluate(wrong) == "error"


def test_async_methods_are_within_the_protocol() -> None:
    class Later:
        async def reset(self, row: dict[str, Any], seed: int) -> None: ...

        async def step(self, action: Action) -> StepResult:
            return StepResult("x")

    step = asyncio.run(Later().step(turn("y")))
    assert checked_step(step).observation == "x"
