"""Environments of the real Gymnasium, played in text, and how they go back."""

from __future__ import annotations

import logging
import random
import re
import threading
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

from asyncrl.environments.protocol import Action, checked_reset, checked_step, traits_of
from asyncrl.environments.registry import load_factory
from asyncrl.errors import RewardError

LAKE = {"make": {"is_slippery": True}, "actions": ["left", "down", "right", "up"]}
DIGITS = frozenset("0123456789")


class Spelling(gymnasium.Env[str, str]):
    """A word of the text space is to be repeated."""

    action_space = spaces.Text(8, charset=DIGITS)
    observation_space = spaces.Text(8, charset=DIGITS)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = str(self.np_random.integers(100, 1000))
        return self.word, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action.strip() == self.word
        self.word = str(self.np_random.integers(100, 1000))
        return self.word, float(right), right, False, {}


class Locked(Spelling):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Unseeded(Spelling):
    """Draws from a generator that is not its own."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return str(random.random()), 0.0, False, False, {}


for kind in (Spelling, Locked, Unseeded):
    gymnasium.register(f"asyncrl/{kind.__name__}-v0", kind, disable_env_checker=True)


def act(text: str) -> Action:
    return Action(text, [1], {"role": "assistant", "content": text})


def play(environment: Any, texts: list[str]) -> list[tuple[Any, float, bool]]:
    results = [checked_step(environment.step(act(text))) for text in texts]
    return [(one.observation, one.reward, one.done) for one in results]


def test_words_and_numbers_are_discrete_actions() -> None:
    environment = load_factory(
        "gymnasium:FrozenLake-v1",
        {
            **LAKE,
            "make": {"is_slippery": False},
            "prompt": "Reach 15.",
            "observation": "at {observation}",
        },
    )()
    assert checked_reset(environment.reset({}, 0)) == "Reach 15.\nat 0"
    way = ["I go down", "DOWN", "right", "2", "down", "not left but right"]
    seen = play(environment, way)
    assert [shown for shown, _, _ in seen] == [f"at {n}" for n in (4, 8, 9, 10, 14, 15)]
    assert seen[-1][1:] == (1.0, True)
    environment.reset({}, 0)
    assert (
        play(environment, ["around", "7"])
        == [("answer with one of: left, down, right, up", 0.0, False)] * 2
    )
    environment.close()


def test_it_goes_back_by_copies_of_the_environment() -> None:
    environment = load_factory("gymnasium:FrozenLake-v1", LAKE)()
    environment.reset({"seed": 5}, 0)
    assert traits_of(environment).restores
    play(environment, ["right"])
    state = environment.snapshot()
    after = [play(environment, ["down", "left", "down"])]
    for _ in "ab":  # a state can be gone back to more than once
        environment.restore(state)
        after.append(play(environment, ["down", "left", "down"]))
    assert after[0] == after[1] == after[2]  # the ice is slippery alike: its generator is copied


@pytest.mark.parametrize(
    ("name", "replay", "restores"),
    [
        ("Spelling", "deterministic", True),
        ("Locked", "deterministic", False),
        ("Unseeded", None, False),
    ],
)
def test_how_it_goes_back_is_found_by_trying(
    name: str, replay: str | None, restores: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        environment = load_factory(f"gymnasium:asyncrl/{name}-v0", {})()
    word = environment.reset({}, 3)
    traits = traits_of(environment)
    assert (traits.replay, traits.restores) == (replay, restores)
    assert ("start over" in caplog.text) == (replay is None)
    again = load_factory(f"gymnasium:asyncrl/{name}-v0", {})()
    assert again.reset({}, 3) == word
    assert again.reset({"seed": 4}, 3) != word
    if replay:
        assert play(environment, [word])[0][1:] == (1.0, True)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("NoSuch-v0", {}, "cannot be made"),
        ("Pendulum-v1", {}, "has Box actions"),
        ("FrozenLake-v1", {"actions": ["left"]}, "names 1 actions"),
        ("FrozenLake-v1", {"action": "text"}, "does not take action"),
        ("FrozenLake-v1", {"make": {"id": "Taxi-v4"}}, "`make` must be a mapping without 'id'"),
    ],
)
def test_what_cannot_be_played_in_text_is_refused(
    name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        load_factory(f"gymnasium:{name}", args)


@pytest.mark.parametrize(
    ("name", "turns", "shown"),
    [
        ("Taxi-v4", ["0", "south, that is 0"], r"\d+"),
        ("CliffWalking-v1", ["up", "I go right, not downwards"], r"\d+"),
        ("Blackjack-v1", ["1"], r"\(\d+, \d+, [01]\)"),
    ],
)
def test_toy_texts_are_shown_as_numbers(name: str, turns: list[str], shown: str) -> None:
    words = {"actions": ["up", "right", "down", "left"]} if name.startswith("Cliff") else {}
    environment = load_factory(f"gymnasium:{name}", words)()
    assert traits_of(environment).goes_back
    seen: list[Any] = [checked_reset(environment.reset({}, 3))]
    for turn in turns:
        result = checked_step(environment.step(act(turn)))
        assert not str(result.observation).startswith("answer with")
        seen.append(result.observation)
    assert all(re.fullmatch(shown, str(one)) for one in seen)
    if words:  # start 36, up to 24, right to 25: `downwards` is no action
        assert seen == ["36", "24", "25"]
