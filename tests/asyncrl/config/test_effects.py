"""Settings that have no effect: the table, what is refused, and what `--explain` greys."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.config.effects import EFFECTS, _settings, load_users_config, without_effect
from asyncrl.config.reference import explain_config, sections
from asyncrl.config.run_config import RunConfig, dump_config, load_config, parse_config
from asyncrl.errors import ConfigError
from asyncrl.trainer.base.algorithm_registry import known_algorithms

ROWS = "task={kind: dataset, path: rows.jsonl, evaluation_path: held.parquet"
REFUSED = {
    "run.log_sample_tokens=true": "run.log_samples=jsonl",
    "run.log_samples_mb=5": "run.log_samples=jsonl",
    "run.print_samples=2": "monitoring.live=plain",
    "task.path=rows.jsonl": "task.kind=dataset",
    "task.map=rows.py:f": "task={kind: dataset, path: x}",
    "task.prompt_field=question": "task={kind: dataset, path: x}",
    "task.on_bad_row=skip": "task={kind: dataset, path: x}",
    "task.too_long=filter": "task.max_prompt_tokens=9",
    "task.chat_template_kwargs={thinks: true}": "task.chat_template=auto",
    "environment.max_turns=3": "environment.name=guessing",
    "engine.kind=vllm": "engine.kinds=[]",
    "engine.weight_staging=device": "engine.device=auto",
    "cache.max_bytes=99999": "cache.enabled=true",
    "cache.min_match=2": "cache.max_draft_tokens=3",
    "cache.lenience=2": "cache.reuse=lenient",
    "scheduler.runahead_kv_limit=0.5": "scheduler.on_update=verify",
    "scheduler.dynamic_sampling.max_batches=3": "scheduler.dynamic_sampling.enabled=true",
    "trainer.learning_rate_minimum=1e-9": "trainer.learning_rate_schedule=cosine",
    "trainer.schedule_steps=9": "trainer.learning_rate_schedule=linear",
    "trainer.clip_ratio_low=0.1": "trainer.proximal_policy=behaviour",
    "trainer.clip_ratio_high=0.3": "trainer.ppo_epochs=2",
    "trainer.dual_clip=3": "trainer.minibatches=2",
    "trainer.importance_cap=3": "trainer.correction=sequence_rejected",
    "trainer.correction_band=[0.5, 2]": "trainer.correction=token_masked",
    "trainer.kl_estimator=k1": "trainer.kl_coefficient=0.1",
    "trainer.kl_clamp=10": "trainer.kl_coefficient=0.1",
    "trainer.reference_decay=0.9": "trainer.kl_coefficient=0.1",
    "trainer.critic.gamma=0.9": "trainer.algorithm=ppo",
    "trainer.lora.alpha=8": "trainer.lora.rank=4",
    "trainer.sharding=full": "trainer.ranks=2",
    "trainer.rank_seconds=4000": "trainer.ranks=2",
    "evaluation.best_of=held_out": "evaluation={every: 50, keep_best: true}",
    "launcher.colocate=true": "launcher.gpus=[0]",
    "launcher.trusted_network=true": "launcher.weights=broadcast",
    "monitoring.port=9100": "monitoring.metrics=true",
    "monitoring.tracing.sample_rate=0.5": "monitoring.tracing.enabled=true",
    "monitoring.sink_seconds=5": "monitoring.sinks=[mlflow]",
    "monitoring.web.port=8080": "monitoring.web.enabled=true",
}
"""Settings, and what gives each an effect."""
IDLE = {
    "run.print_samples": "monitoring.live=off",
    "task.chat_template_kwargs": "task.chat_template=never",
    "engine.kind": "engine.kinds=[vllm]",
    "engine.weight_staging": "engine.device=cpu",
    "cache.max_bytes": "cache.enabled=false",
    "cache.min_match": "cache.max_draft_tokens=0",
    "scheduler.runahead_kv_limit": "scheduler.on_update=keep",
    "trainer.importance_cap": "trainer.correction=token_masked",
    "launcher.colocate": "launcher.gpus=[]",
    "monitoring.port": "monitoring.metrics=false",
    "monitoring.web.port": "monitoring.web.enabled=false",
}
"""Settings that take the effect from those that have one by default."""


@pytest.mark.parametrize("setting", REFUSED)
def test_a_setting_without_effect_is_refused(setting: str) -> None:
    key = setting.partition("=")[0]
    idle = [IDLE[key]] if key in IDLE else []
    with pytest.raises(ConfigError, match=rf"(?m)^  {key}: .* has an effect only ") as refused:
        load_users_config(None, [*idle, setting])
    assert len(str(refused.value).splitlines()) == 2, refused.value
    assert load_config(None, [*idle, setting]), "a run that was recorded stays readable"
    with_effect = REFUSED[setting]
    if key == "task.path":
        load_users_config(None, [setting, with_effect])
    else:
        load_users_config(None, [with_effect, setting])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ([ROWS + ", split: validation}"], "task.split"),
        ([ROWS + ", subset: main}"], "task.subset"),
        ([ROWS + ", evaluation_split: validation}"], "task.evaluation_split"),
        ([ROWS + ", digits: [1, 2]}"], "task.digits"),
        (["evaluation.sets={v1.0: {path: a.jsonl, split: train}}"], "evaluation.sets.v1.0.split"),
        (["trainer={algorithm: rloo, clip_ratio_high: 0.3}"], "trainer.clip_ratio_high"),
        (["trainer={algorithm: reinforce, dual_clip: 3, ppo_epochs: 2}"], "trainer.dual_clip"),
        (["trainer={algorithm: dapo, importance_cap: 3}"], "trainer.importance_cap"),
    ],
)
def test_what_has_no_effect_with_others_is_refused(settings: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?m)^  {key}: .* has an effect only "):
        load_users_config(None, settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["engine.vllm.kv_cache_gib=4", "engine.sglang.python=/x", "launcher.ray.address=auto"],
        ["launcher.agents.listen=0.0.0.0:5900"],
        ["task={kind: dataset, path: org/name, subset: main, split: validation}"],
        ["launcher.colocate=false", "engine.device=cpu"],
        ["scheduler={on_update: keep, runahead_kv_limit: 0.5}",
         "run.changes={3: {scheduler.on_update: verify}}"],
        ["trainer={algorithm: 'my.py:Mine', clip_ratio_low: 0.1}"],
    ],
)  # fmt: skip
def test_what_may_stand_or_has_an_effect_at_some_step_is_accepted(settings: list[str]) -> None:
    load_users_config(None, settings)


def test_a_run_is_as_long_as_its_steps_or_its_epochs_say_but_not_both(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: {steps: 50, epochs: 2}\n")
    with pytest.raises(ConfigError, match=r"run\.steps: 50 has an effect only without run\.epochs"):
        load_users_config(file)
    file.write_text("run: {epochs: 2}\n")
    config = load_users_config(file)
    assert without_effect(config).keys() & {("run", "steps")}
    replaced = load_users_config(file, ["run.steps=50"]).run
    assert (replaced.steps, replaced.epochs) == (50, None), "--set goes before the file"
    assert load_users_config(file, ["run.steps=50", "run.epochs=0.5"]).run.epochs == 0.5
    file.write_text(explain_config(config))
    assert load_users_config(file) == config
    assert parse_config(yaml.safe_load(dump_config(config)), source="orders") == config


def test_every_default_and_every_recorded_configuration_passes(tmp_path: Path) -> None:
    assert not [one for one in without_effect(RunConfig()).values() if one.is_refused]
    for algorithm in known_algorithms():
        file = tmp_path / "config.yaml"
        file.write_text(dump_config(load_config(None, [f"trainer.algorithm={algorithm}"])))
        load_users_config(file)


def test_every_key_of_the_table_is_one_of_the_configuration() -> None:
    config = load_config(None, ["evaluation.sets={a: {path: x.jsonl}}"])
    known = {key for _, key, _ in _settings(config, (), "")} | {one.path for one in sections()}
    assert EFFECTS.keys() <= known


def test_the_command_refuses_and_explains(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {kl_clamp: 5}\n")
    for command in (["run", str(file)], ["doctor", str(file)]):
        done = CliRunner().invoke(app, command)
        assert isinstance(done.exception, ConfigError), done.output
        assert "trainer.kl_clamp: 5.0 has an effect only with trainer.kl_coefficient" in str(
            done.exception
        )
    resumed = CliRunner().invoke(app, ["run", str(file), "--resume", "--set", "run.name=nothing"])
    assert "has an effect only" not in str(resumed.exception), "it cannot be changed any more"
    shown = CliRunner().invoke(app, ["run", str(file), "--explain"])
    assert "  # No effect here.\n" in shown.output
    assert "  kl_clamp: 5.0\n" in shown.output
    config = load_config(None, ["evaluation.sets={v1.0: {path: a.jsonl}}"])
    text = explain_config(config, lambda line: f"grey {line}")
    grey = [line.removeprefix("grey ") for line in text.splitlines() if line.startswith("grey ")]
    assert {"  kl_clamp: null", "    gpu_memory_utilization: null"} <= set(grey)
    assert "      split: test" in grey
    assert "  # No effect here." in grey
    assert "  kl_coefficient: 0.0" not in grey
    plain = explain_config(config)
    assert parse_config(yaml.safe_load(plain), source="explained") == config
