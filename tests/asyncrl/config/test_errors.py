"""Mistakes in settings: one line each, with the key, the value and what would be right."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from each_one import each_one
from pydantic import BaseModel

from asyncrl.config.run_config import RunConfig, load_config, parse_config
from asyncrl.errors import ConfigError

NOT_A_NUMBER = float("nan")
UNBOUNDED = {
    "trainer.max_grad_norm": "inf turns clipping off",
}
"""Numeric settings without an upper bound, and why."""


def mistakes(*overrides: str, values: dict[str, Any] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides) if values is None else parse_config(values, source="test")
    assert caught.value.exit_code == 2
    head, *lines = str(caught.value).splitlines()
    assert head.endswith("does not describe a run:")
    return [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.learning_rate=.inf", "trainer.learning_rate: must be less than or equal to 1"),
        ("trainer.learning_rate=1e10", "(given: 10000000000.0). Peak learning rate of AdamW"),
        ("sampling.temperature=1e30", "sampling.temperature: must be less than or equal to 100"),
        ("sampling.temperature=1e-30", "must be greater than or equal to 0.01"),
        ("sampling.top_k=1", "sampling.top_k: 1 is greedy decoding"),
        ("sampling.top_p=1e-300", "sampling.top_p: must be greater than or equal to 0.01"),
        ("sampling.min_p=1", "sampling.min_p: must be less than 1"),
        ("launcher.threads=100000", "launcher.threads: must be less than or equal to 1024"),
        ("monitoring.port=65535", "monitoring.port: 65535 leaves no port"),
        ("scheduler.group_size=1", "scheduler.group_size: 1 leaves trainer.algorithm: grpo"),
        (
            "scheduler.dynamic_sampling={enabled: true, max_batches: 0}",
            "scheduler.dynamic_sampling.max_batches: must be greater than or equal to 1",
        ),
        (
            "trainer={ranks: 2, rank_seconds: 600}",
            "trainer.rank_seconds: 600 must be longer than launcher.checkpoint_seconds (600)",
        ),
        ("run.steps=yes", "run.steps: must be a number; YAML reads yes"),
        ("run.steps=1.5", "run.steps: must be a valid integer"),
        ("run.name=20260101", "run.name: must be text; write it in quotes"),
        ("run.seed=0x" + "f" * 5000, "(given: a number of about 6,020 digits)"),
        ("trainer=5", "trainer: must be a mapping of settings"),
        ("trainer.betas=0.9", "trainer.betas: must be a list"),
        ("trainer.betas=[0.9]", "trainer.betas[1]: is missing"),
        ("trainer.betas=[0.9, a, 3]", "trainer.betas: must have at most 2 entries"),
        ("trainer.betas=[true, 0.9]", "trainer.betas[0]: must be a number"),
        ("trainer.device=gpu", "trainer.device: must be auto, cpu or cuda; launcher.gpus says"),
        ("rewards.functions=arithmetic", "rewards.functions: must be a list"),
        ("rewards.functions=[arithmetic]", "rewards.functions[0]: must be a mapping of settings"),
        ("rewards.functions=[{name: format, weigth: 1}]", "Did you mean 'weight'?"),
        ("rewards.functions=[{name: format, weight: true}]", "functions[0].weight: must be a num"),
        ("engine.kind=[" + "x," * 5000 + "]", "engine.kind: must be 'torch', 'vllm' or 'sglang'"),
        ("trainer.gradient_checkpointing=maybe", "must be a valid boolean, or 'selective' (given"),
        (
            "trainer={lora: {rank: 4, targets: 3}}",
            "targets: must be text; write it in quotes, or a",
        ),
        ("cache.max_draft_tokens=500", "max_draft_tokens: must be less than or equal to 128, or"),
        ("run.changes={2: {trainer: {learning_rate: [1]}}}", "learning_rate must be one value"),
        ("run.changes={2: {1: [3]}}", "run.changes: 1 must be one value, not a list"),
        ("run.changes={2: {trainer: {learning_rat: 1}}}", "Did you mean 'trainer.learning_rate'?"),
        (
            "run.changes={2: {trainer: {learning_rate: 1}, trainer.learning_rate: 1}}",
            "run.changes: step 2: trainer.learning_rate is there twice; keep one",
        ),
        ("run.name=" + "x" * 100_000, "run.name: "),
        ("run.name=a/b", "(given: 'a/b'). Name of the run and of its folder: letters, digits"),
        ("x" * 100_000 + "=1", "there is no such key. Known: "),
    ],
)
def test_one_mistake_is_one_short_line(override: str, expected: str) -> None:
    (line,) = mistakes(override)
    assert expected in line
    assert len(line) < 500


def test_changes_may_be_written_in_sections() -> None:
    (one, other) = (
        load_config(None, [f"run.changes={{2: {written}}}"])
        for written in ("{trainer: {learning_rate: 1e-6}}", "{trainer.learning_rate: 1e-6}")
    )
    assert one == other
    assert one.at(2).trainer.learning_rate == 1e-6


def test_two_mistakes_are_two_lines_and_many_are_counted() -> None:
    assert len(mistakes("run.steps=0", "trainer.learning_rate=2", "run.seed=no")) == 3
    lines = mistakes(values={f"section{i}": 1 for i in range(500)})
    assert lines[-1] == "and 480 more"
    assert len(lines) == 21


def test_the_highest_port_that_is_left() -> None:
    settings = ["launcher.generators=4", "launcher.max_restarts=2"]
    (line,) = mistakes("monitoring.port=65529", *settings)
    assert "at most 65528" in line
    config = load_config(None, ["monitoring.port=65528", *settings])
    assert config.monitoring.port_of(1 + 4 + 2) == 65535
    assert load_config(None, ["monitoring.port=65535", "monitoring.metrics=false"])


def test_a_section_whose_settings_are_all_commented_out(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run:\n  # name: a\ntrainer:\n")
    assert load_config(file) == RunConfig()


def numeric_settings(
    model: type[BaseModel] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, type[BaseModel], str]]:
    for name, field in model.model_fields.items():
        inner = [
            part
            for part in (field.annotation, *typing.get_args(field.annotation))
            if isinstance(part, type) and issubclass(part, BaseModel)
        ]
        if inner:
            yield from numeric_settings(inner[0], f"{prefix}{name}.")
        elif {int, float} & {field.annotation, *typing.get_args(field.annotation)}:
            yield prefix + name, model, name


def test_every_number_has_bounds_and_is_finite() -> None:
    def is_refused(model: type[BaseModel], name: str, value: float) -> bool:
        try:
            model.model_validate({name: value})
        except ValueError as error:
            return name in str(error)
        return False

    with each_one() as checking:
        for path, *at in numeric_settings():
            model, name = at
            with checking(path):
                assert is_refused(*at, NOT_A_NUMBER)
                if "tuple" in str(model.model_fields[name].annotation):
                    continue
                bounded = path not in UNBOUNDED
                assert is_refused(*at, 1e30) == bounded, "an upper bound, or a reason for none"
                assert is_refused(*at, 10**30) == bounded  # an int setting refuses any 1e30
                assert is_refused(*at, -1e30)
                assert is_refused(*at, float("inf")) == bounded


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ["scheduler.group_size=1", "trainer.algorithm=reinforce_plus_plus"],
            "scheduler.dynamic_sampling.enabled: a group of one sample never carries signal",
        ),
        (["trainer.algorithm=ppo"], "trainer.algorithm: ppo does not compare a sample with"),
        (["trainer.algorithm=reinforce_plus_plus"], "choose an algorithm that compares: dapo"),
    ],
)
def test_dynamic_sampling_without_a_comparison_is_refused(
    settings: list[str], expected: str
) -> None:
    (line,) = mistakes("scheduler.dynamic_sampling.enabled=true", *settings)
    assert expected in line
    assert load_config(None, ["scheduler.dynamic_sampling.enabled=true"])
