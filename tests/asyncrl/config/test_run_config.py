from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.config.by_step import ConfigByStep
from asyncrl.config.run_config import dump_config, load_config, parse_config
from asyncrl.errors import ConfigError
from asyncrl.trainer.base.algorithm_registry import known_algorithms

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").rglob("*.yaml"))


def write(path: Path, text: str) -> Path:
    file = path / "run.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_loads_and_survives_a_dump(path: Path) -> None:
    config = load_config(path)
    assert parse_config(yaml.safe_load(dump_config(config)), source="the dump") == config


def test_each_algorithm_has_an_example_and_each_example_is_explained() -> None:
    examples = [path for path in EXAMPLES if path.parent.name == "algorithms"]
    shown = {load_config(path).trainer.algorithm for path in examples}
    families = {name.removesuffix("_baseline") for name in known_algorithms()}
    assert {name.removesuffix("_baseline") for name in shown} == families
    for path in examples:
        done = CliRunner().invoke(app, ["run", str(path), "--explain"])
        assert done.exit_code == 0, done.output
        assert f"asyncrl run examples/algorithms/{path.name} " in path.read_text()


@pytest.mark.parametrize("kind", ["torch", "vllm"])
def test_the_resolved_configuration_of_each_engine_loads_again(kind: str) -> None:
    for path in EXAMPLES:
        config = load_config(path, [f"engine.kind={kind}"])
        assert parse_config(yaml.safe_load(dump_config(config)), source="the dump") == config


def test_each_example_of_an_environment_is_explained_and_says_how_it_is_run() -> None:
    examples = [path for path in EXAMPLES if load_config(path).environment.name is not None]
    assert {"calculator", "guessing", "code_repair", "agent_openai"} == {e.stem for e in examples}
    for path in examples:
        done = CliRunner().invoke(app, ["run", str(path), "--explain"])
        assert done.exit_code == 0, done.output
        assert f"  asyncrl run examples/{path.name} " in path.read_text()


def test_overrides_reach_any_depth(tmp_path: Path) -> None:
    file = write(tmp_path, "run: {name: a}\n")
    config = load_config(
        file, ["engine.kind=vllm", "trainer.learning_rate=5e-5", "run.steps=7", "run.name=b"]
    )
    assert config.engine.kind == "vllm"
    assert config.trainer.learning_rate == 5e-5
    assert (config.run.name, config.run.steps) == ("b", 7)


def test_overrides_reach_into_lists(tmp_path: Path) -> None:
    file = write(tmp_path, "rewards: {functions: [{name: exact_match}, {name: math_verify}]}\n")
    sets = ["rewards.functions.1.weight=2", "rewards.functions.2.name=format",
            "rewards.functions.2.args={pattern: x}", "trainer.betas=[0.8, 0.9]",
            "trainer.betas.0=0.5"]  # fmt: skip
    config = load_config(file, sets)
    functions = [(one.name, one.weight) for one in config.rewards.functions]
    assert functions == [("exact_match", 1.0), ("math_verify", 2.0), ("format", 1.0)]
    assert config.trainer.betas == (0.5, 0.9)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("trainer: {lr: 1}", [], r"no such key. Did you mean 'learning_rate'"),
        ("trainer: {foobar: 1}", [], r"None of the \d+ that there are is similar.*--explain"),
        ("run: {steps: null}", [], r"given: null\)"),
        ("trainer: {betas: [1, 2]}", ["trainer.betas.x=1"], r"x is not an index of a list of 2"),
        ("trainer: {betas: [1, 2]}", ["trainer.betas.3=1"], r"3 is not an index of a list of 2"),
        ("trainer: {betas: [1, 2]}", ["trainer.betas.1.x=1"], r"1 is a value, not a section"),
        ("schduler: {}", [], r"schduler: there is no such key. Did you mean 'scheduler'"),
        ("trainer: {learning_rat: 1}", [], r"trainer.learning_rat: .*'learning_rate'"),
        ("trainer: {overlong_buffer: 300}", [], r"longer than any response"),
        ("trainer: {algorithm: dr_grpo, advantage_normalization: std}", [], r"Leave it out"),
        ("run: {steps: 0}", [], r"run.steps: .*greater than or equal to 1.*given: 0"),
        ("run: {name: a/b}", [], r"run.name: "),
        ("engine: {kind: tensorrt}", [], r"engine.kind: .*'torch', 'vllm' or 'sglang'"),
        ("run: {repeatable: true}", [], r"with scheduler.on_update: verify, .*: keep"),
        (
            "run: {repeatable: true}",
            [
                "scheduler.on_update=keep",
                "scheduler.max_off_policy_steps=1",
                "engine.kind=vllm",
                "cache.reuse=lenient",
                "trainer.device=cuda",
            ],
            r"steps: 1, because .*lenient, because .*vllm, because .*set trainer.device: cpu",
        ),
        (
            "{run: {repeatable: true}, environment: {name: 'agent:mine.py:play'}}",
            ["scheduler.on_update=keep", "scheduler.max_off_policy_steps=0"],
            r"with environment.name: agent:mine.py:play, because a program runs by its own clock",
        ),
        (
            "{run: {repeatable: true}, environment: {name: 'openenv:generic'}}",
            ["scheduler.on_update=keep", "scheduler.max_off_policy_steps=0"],
            r"with environment.name: openenv:generic, .*environment.args.replay: deterministic",
        ),
        (
            "scheduler: {on_update: keep, max_runahead_groups: 3}",
            [],
            r"needs scheduler.on_update: verify",
        ),
        (
            "{scheduler: {on_update: verify}, engine: {top_k_logprobs: 0}}",
            [],
            r"engine.top_k_logprobs: 0 does not work .*at least 1",
        ),
        ("sampling: {max_tokens: 4000}", [], r"sampling.max_tokens \(4000\) leaves no room"),
        (
            "engine: {vllm: {startup_timeout_seconds: 2000}}",
            [],
            r"is not a setting any more; it follows launcher.startup_seconds",
        ),
        (
            "cache: {doubt: 0.2}",
            [],
            r"cache.doubt is not a setting any more: it is 0.1 in every",
        ),
        ("cache: {calibrate: 1}", [], r"cache.calibrate is not a setting any more: it is true"),
        (
            "launcher: {weights: broadcast}",
            [],
            r"neither keys nor encryption.*launcher.trusted_network: true; otherwise",
        ),
        ("run: {log_samples: parquet}", [], r"run.log_samples: parquet is not written.*jsonl"),
        ('sampling: {stop: ["a", ""]}', [], r"sampling.stop\[1\]: must have at least 1 character"),
        ("sampling: {stop: [" + 257 * "a" + "]}", [], r"sampling.stop: has 257 bytes together"),
        ("sampling: {stop: a}", [], r"sampling.stop: must be a list"),
        ("sampling: {top_k: -1}", [], r"sampling.top_k: .*greater than or equal to 0"),
        ("sampling: {min_p: 1.5}", [], r"sampling.min_p: .*less than 1"),
        ("- a list", [], r"must be a mapping"),
        ("run: [", [], r"not valid YAML"),
        ("", ["engine.kind"], r"write it as key.path=value"),
        ("run: {name: a}", ["run.name.first=x"], r"name is a value, not a section"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, text: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text), overrides)


def test_no_top_k_may_be_written_as_null(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "sampling: {top_k: null}")).sampling.top_k == 0


def test_off_may_be_written_without_quotes(tmp_path: Path) -> None:
    text = "run: {log_samples: off}\nmonitoring: {live: off}"
    config = load_config(write(tmp_path, text))
    assert (config.run.log_samples, config.monitoring.live) == ("off", "off")
    overridden = load_config(write(tmp_path, "run: {}"), ["monitoring.live=off"])
    assert overridden.monitoring.live == "off"
    assert parse_config(yaml.safe_load(dump_config(config)), source="the dump") == config


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "")
    with pytest.raises(ConfigError, match=r"no configuration file at .*Did you mean 'run.yaml'"):
        load_config(tmp_path / "runs.yaml")


def test_the_engines_of_a_mixed_fleet_follow_the_number_of_the_generator() -> None:
    config = load_config(None, ["engine.kinds=[torch, vllm]", "launcher.generators=3"])
    assert [config.engine.of_generator(i).kind for i in range(3)] == ["torch", "vllm", "torch"]
    assert [engine.kind for engine in config.engines] == ["torch", "vllm"]
    assert config.engine_kinds == "torch+vllm"
    alone = load_config(None, ["engine.kind=vllm"])
    assert (alone.engine_kinds, alone.engine.of_generator(4)) == ("vllm", alone.engine)
    assert load_config(None, ["engine.kinds=[torch, vllm]"]).engine_kinds == "torch"


def test_each_step_has_the_changes_up_to_it() -> None:
    changes = {5: {"trainer.learning_rate": 5e-6}, 3: {"trainer.learning_rate": 3e-6}}
    values = {"run": {"changes": changes}, "trainer": {"learning_rate": 1e-6}}
    config = parse_config(values, source="a test")
    by_step = ConfigByStep(config)
    rates = {step: by_step.at(step).trainer.learning_rate for step in (0, 2, 3, 4, 5, 99)}
    assert rates == {0: 1e-6, 2: 1e-6, 3: 3e-6, 4: 3e-6, 5: 5e-6, 99: 5e-6}
    assert rates == {step: config.at(step).trainer.learning_rate for step in rates}
    assert by_step.peak_rates == {3: 3e-6, 5: 5e-6}
