"""Arguments of a user's functions are the same in the trial call, in config.yaml and in workers."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config.run_config import dump_config, load_config, parse_config
from asyncrl.errors import ConfigError

PLACES: dict[str, Any] = {
    "rewards.functions.0.args": lambda args: {
        "rewards": {"functions": [{"name": "mine:score", "args": args}]}
    },
    "environment.args": lambda args: {"environment": {"name": "mine:World", "args": args}},
    "task.chat_template_kwargs": lambda args: {"task": {"chat_template_kwargs": args}},
}


def arguments_of(config: Any, place: str) -> Any:
    for part in place.split("."):
        config = config[int(part)] if part.isdigit() else getattr(config, part)
    return config


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("inf"), "x is inf, which JSON cannot hold"),
        ([1, {"y": float("nan")}], r"x\[1\].y is nan"),
        (dt.date(2026, 11, 28), "x is datetime.date"),
        ({"a"}, "x is {"),
        (b"raw", "x is b'raw'"),
        (2**63, "x is 9223372036854775808"),
        ({1: "one"}, "x has the key 1; keys are texts, as in '1'"),
        ("half \ud83d", "x has half a character"),
        ({"\ud83d": 1}, "a key of x has half a character"),
    ],
    ids=str,
)
def test_what_json_cannot_hold_is_refused(place: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_config(PLACES[place]({"x": value}), source="run.yaml")
    assert place.split(".")[0] in str(caught.value)


@pytest.mark.parametrize("place", PLACES)
def test_everything_else_is_the_same_on_both_sides(tmp_path: Path, place: str) -> None:
    given = {
        "since": "2026-11-28", "at": "12:30:45", "small": 1e-3, "small_text": "1e-3", "count": 7,
        "whole": 7.0, "largest": 2**63 - 1, "yes": "yes", "none": None,
        "nested": [[True], {"k": ""}], "sign": "☃", "zero": -0.0,
    }  # fmt: skip
    config = parse_config(PLACES[place](given | {"pair": (1, 2)}), source="run.yaml")
    first = arguments_of(config, place)
    assert first == given | {"pair": [1, 2]}
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    again = arguments_of(load_config(file), place)
    sent = msgspec.json.decode(msgspec.json.encode(first))
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(first))
    assert repr(again) == repr(sent) == repr(packed) == repr(first)


def test_dates_and_times_in_a_file_are_texts(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "rewards: {functions: [{name: 'mine:score', args: {since: 2026-11-28, at: 12:30:45}}]}\n"
        "task: {chat_template_date: 2026-11-28}\n"
    )
    config = load_config(file)
    assert config.rewards.functions[0].args == {"since": "2026-11-28", "at": "12:30:45"}
    assert config.task.chat_template_date == dt.date(2026, 11, 28)
