"""Environments behind a real OpenEnv server.

OpenEnv has an interpreter of its own (`make setup-environments`). The server and what plays them
in a worker, once for all tests, are in tests/support/openenv_worlds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from library_python import seen_in_worker

pytestmark = pytest.mark.library

PLAYS = Path(__file__).parents[3] / "support" / "openenv_worlds" / "play_worlds.py"


@pytest.fixture(scope="module")
def played() -> Any:
    return seen_in_worker("openenv", PLAYS)


def test_sessions_are_apart_and_follow_the_seed(played: Any) -> None:
    first, again, other = played["guesses"]["sessions"]
    assert first == again != other
    for one in (first, other):
        assert one[0] == "0 to 3"
        assert one[-1] == ["right", 1.0, True]


def test_without_a_field_all_of_the_observation_is_shown(played: Any) -> None:
    assert json.loads(played["guesses"]["whole"])["hint"] == "lower"
    assert played["guesses"]["no field"].startswith("KeyError: \"the observation has no field 'bo")


def test_it_cannot_go_back_unless_told(played: Any) -> None:
    assert played["guesses"]["goes back"] == [True, False]


def test_what_the_server_cannot_do_is_the_samples_failure(played: Any) -> None:
    assert "invalid literal for int()" in played["guesses"]["server's error"]
    assert "Failed to connect to ws://127.0.0.1:9/ws" in played["guesses"]["nobody"]


def test_a_client_and_a_function_of_the_users(played: Any) -> None:
    assert played["code"] == [
        None, ["42\n", 0.0, False], ["20\n", 0.0, False], ["(nothing)", 0.0, False],
        ["n" * 20 + "\n[60 characters left out]\n" + "n" * 19 + "\n", 0.0, False],
        ["NameError(\"name 'y' is not defined\")\n", -1.0, False],
    ]  # fmt: skip


def test_its_tools_are_the_models(played: Any) -> None:
    shop = played["shop"]
    assert shop["first"] is None
    assert shop["tools"] == {"price": "Price of some items.", "buy": "Buy one."}
    assert shop["required"] == ["item"]
    assert shop["bought"] == [
        None, [["8", '{"bought":["pear"]}'], 1.0, False], [["error: no JSON"], 0.0, False],
        [['{"bought":["pear","fig"]}'], 2.0, True],
    ]  # fmt: skip
    answers = ['{"bought":["fig"]}', '{"bought":["fig","fig"]}']
    assert shop["at once"] == [None, [answers, 3.0, True]]  # done before the third call
    first, (wrong, reward, done), end = shop["answered"]
    assert (first, reward, done) == (None, 0.0, False)
    assert all(text.startswith("error: ") for text in wrong)
    assert "steal" in wrong[1]
    assert "there is no such item" in wrong[2]
    assert end == [[], 0.0, True]


def test_what_is_missing_is_named(played: Any) -> None:
    no_url, no_action, action, no_client = played["refused"]
    assert "needs `base_url`" in no_url
    assert "needs `action`" in no_action
    assert "does not take `action`" in action
    assert "worlds has no 'NoClient'" in no_client
