"""Tasksets and environments of the real verifiers, unchanged, without a network.

verifiers has an interpreter of its own (`make setup-environments`). The tasksets are in
tests/support/verifiers_tasksets; `play_all.py` there plays them in a worker, once for all tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from library_python import seen_in_worker

pytestmark = pytest.mark.library

PLAYS = Path(__file__).parents[3] / "support" / "verifiers_tasksets" / "play_all.py"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    cache = str(tmp_path_factory.mktemp("cache"))
    return seen_in_worker("verifiers", PLAYS, XDG_CACHE_HOME=cache, NO_KEY="none")


def test_a_task_of_one_turn_and_its_rewards(played: Any) -> None:
    mixed = played["mixed"]
    assert [row["prompt"] for row in mixed["rows"]][:4] == ["0+1=?", "1+1=?", "2+1=?", "guess"]
    assert mixed["replay"] == "deterministic"
    prompt = ["be brief", "1+1=?"]
    assert mixed["right"] == [prompt, [], pytest.approx(0.5 + 0.25 * 2)]
    assert mixed["wrong"] == [prompt, [], pytest.approx(0.25)]
    assert mixed["messages"] == [["hi", "hello", "what is 1+1?"], [], pytest.approx(1.0)]


def test_an_environment_with_a_scripted_user_runs_many_episodes_at_once(played: Any) -> None:
    first, second, closed = played["mixed"]["games"]
    keyed = 0.25 * (1 + 1 / 3)
    assert first == [["guess"], ["higher"], ["lower"], [], pytest.approx(0.5 + keyed)]
    assert second == [["guess"], [], pytest.approx(0.5 + 0.25 * 2)]
    assert closed == [["guess"], ["lower"]]  # ended by `close`


def test_stops_and_limits_of_verifiers_end_the_sample_with_its_reward(played: Any) -> None:
    keyed = 0.25 * (0 + 1 / 2)
    assert played["mixed"]["stopped"] == [["guess"], ["lower"], [], pytest.approx(keyed)]
    limited = played["mixed"]["at most two turns"]
    assert limited == [["guess"], ["lower"], [], pytest.approx(0.25 * (1 + 1 / 2))]
    assert played["mixed"]["at most two tokens"] == limited  # each turn of the test has one


def test_its_own_sampling_settings_are_named_where_the_run_has_others(played: Any) -> None:
    *none, (note,) = played["mixed"]["notes"]
    assert none == [[], []]  # it has none; it is not known yet what the run has
    assert "tiny_mixed sets sampling for the agent agent" in note
    assert "(temperature: 0.7, reasoning_effort: 'low')" in note


def test_judges_ask_their_own_model(played: Any) -> None:
    assert [one[-1] for one in played["mixed"]["judged"]] == [
        pytest.approx(2.0 + 0.25 * 2), pytest.approx(0.25 * 2)
    ]  # fmt: skip
    assert [one[-1] for one in played["mixed"]["plugged judge"]] == [
        pytest.approx(1.0 + 0.25 * 2), pytest.approx(0.25 * 2)
    ]  # fmt: skip


def test_what_raises_is_the_samples_failure(played: Any) -> None:
    assert "a reward that breaks" in played["mixed"]["broken reward"][-1]
    assert played["mixed"]["late reward"][-1] == "its reward is incomplete: scoring_timeout"
    assert played["mixed"]["no such task"].startswith("IndexError: there is no task 99")


def test_its_tools_are_the_models(played: Any) -> None:
    tools = played["tools"]
    assert tools["required"] == ["a", "b"]
    right, broken, wrong, unknown = tools["answers"]
    assert right == ["tool", "call00000", "12"]
    assert "a tool that breaks" in broken[2]
    assert "int" in wrong[2]
    assert "there is no tool 'subtract'" in unknown[2]
    assert tools["end"] == [True, 1.0]


def test_one_of_several_agents_is_the_policy(played: Any) -> None:
    pairs = played["pairs"]
    assert pairs["rows"] == ["question 0", "question 1", "question 2"]
    assert pairs["solved"] == [[["question 2"], [], 3.0], [["question 2"], [], 0.0]]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("two agents", "has the agents solver, critic; name the one to train"),
        ("client", "the agent agent is the policy; remove its `client`"),
        ("no model", "critic is not the policy, so it needs a model"),
        ("no end", "has an endless taskset; set `tasks` in its args"),
        ("no taskset", "no_such_taskset"),
        ("setting", "agnt"),
    ],
)
def test_what_cannot_work_is_refused(played: Any, case: str, message: str) -> None:
    assert played["refused"][case].startswith("environment verifiers:")
    assert message in played["refused"][case]
