"""Names that MLflow refuses, with its own check of them."""

from __future__ import annotations

import pytest

from asyncrl.monitoring.sinks.kinds.mlflow import taken_names

NAMES = [
    "judge#2",
    "judge_2",
    "judge@2",
    "rewards//home/me/score.py:score/mean",
    "rewards/../score.py:score/mean",
    "environment.args.tools.http://x/y?z",
    "./a/",
    "größe",
    "long" * 100,
    "long" * 101,
]


def test_every_name_is_taken_and_none_comes_twice() -> None:
    validation = pytest.importorskip("mlflow.utils.validation")
    found = taken_names(NAMES)
    assert sorted(found) == sorted(NAMES)
    assert len(set(found.values())) == len(NAMES)
    for name in found.values():
        validation._validate_metric_name(name)
        validation._validate_param_name(name)
        assert len(name) <= 250


def test_names_that_it_takes_stay_and_do_not_depend_on_others() -> None:
    for name in ("learning/reward_mean", "evaluation/held_out/pass_at/4", "judge_2"):
        assert taken_names({*NAMES, name})[name] == name
