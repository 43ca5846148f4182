"""Keys that were settings once: runs that have their one value are read, others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config.former import FORMER
from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.errors import ConfigError


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("path", FORMER)
def test_a_key_of_before_may_have_its_one_value(path: str) -> None:
    assert parse_config(nested(path, FORMER[path]), source="old") == RunConfig()
    with pytest.raises(ConfigError, match=f"{path} is not a setting any more.*Leave it out"):
        parse_config(nested(path, 3), source="old")


def test_true_is_not_one() -> None:
    assert parse_config(nested("launcher.stop_seconds", 60), source="old") == RunConfig()
    with pytest.raises(ConfigError, match=r"cache\.calibrate is not a setting any more: it is t"):
        parse_config(nested("cache.calibrate", 1), source="old")
