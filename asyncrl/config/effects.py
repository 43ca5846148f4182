"""The table of settings that have an effect only with others; a user's that have none are refused.

`asyncrl run` and `doctor` refuse them, `--explain` greys them, and docs/configuration.md says when
they have one. The rule of a key is its entry's, or else that of the section around it. Values that
are a setting's default pass, since a run's own config.yaml names all of them; and recorded
configurations are not judged, so that every run stays readable.

>>> rule_of("environment.max_turns").when
'with environment.name'
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from asyncrl.config.run_config import RunConfig, load_config
from asyncrl.errors import ConfigError
from asyncrl.suggestions import shortened
from asyncrl.trainer.base.algorithm_registry import entry_of, is_own
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.rank_network import is_loopback

Place = tuple[str, ...]
"""Names of sections and a setting, from the outermost."""
_FILES = (".jsonl", ".parquet")


class Effect(NamedTuple):
    """When a setting has an effect."""

    when: str
    """The condition in words, after "only"."""
    holds: Callable[[RunConfig, Any], bool]
    """The condition, of a configuration and the setting's section."""
    may_stand: bool = False
    """True for sections of other engines and launchers: people keep them in one file."""


def _clips(_: RunConfig, trainer: Any) -> bool:
    if is_own(trainer.algorithm):
        return True  # its class may read what it likes
    has_ratio = trainer.proximal_policy == "behaviour" or trainer.updates_per_step > 1
    return has_ratio and not entry_of(trainer.algorithm).unclipped


def _truncates(_: RunConfig, trainer: Any) -> bool:
    in_loss = trainer.proximal_policy == "behaviour"
    return not in_loss and trainer.correction.endswith(("truncated", "rejected"))


def _has_parts(path: str | None) -> bool:
    """Return True for a folder or a hub id."""
    is_file = path is not None and (Path(path).suffix in _FILES or Path(path).is_file())
    return path is not None and not is_file


def _uses_engine(kind: str) -> Effect:
    return Effect(
        f"with engine.kind or kinds: {kind}",
        lambda config, _: kind in (config.engine.kinds or (config.engine.kind,)),
        may_stand=True,
    )


def _may_share(config: RunConfig, launcher: Any) -> bool:
    return launcher.gpus != () and "cpu" not in (config.engine.device, config.trainer.device)


def _has_rank_network(config: RunConfig, launcher: Any) -> bool:
    trainer = config.trainer
    several = trainer.ranks > 1 and not is_loopback(trainer.rank_network)
    return launcher.weights == "broadcast" or several


_LOGGED = Effect("with run.log_samples: jsonl", lambda _, run: run.log_samples == "jsonl")
_DATASET = Effect("with task.kind: dataset", lambda _, task: task.kind == "dataset")
_TEMPLATE = Effect("with a task.chat_template", lambda _, task: task.chat_template != "never")
_OF_SET = Effect("with a path that is no file", lambda _, one: _has_parts(one.path))
_DRAFTS = Effect("with cache.max_draft_tokens above 0", lambda _, one: one.max_draft_tokens != 0)
_DECAYS = Effect(
    "with trainer.learning_rate_schedule: cosine or linear",
    lambda _, trainer: trainer.learning_rate_schedule != "constant",
)
_RATIO = Effect(
    "with trainer.proximal_policy: behaviour or several updates per step, and an algorithm that "
    "clips",
    _clips,
)
_KL = Effect(
    "with trainer.kl_coefficient above 0, as there is no reference else",
    lambda _, trainer: trainer.kl_coefficient > 0,
)
_RANKS = Effect("with trainer.ranks above 1", lambda _, trainer: trainer.ranks > 1)
_METRICS = Effect("with monitoring.metrics: true", lambda _, monitoring: monitoring.metrics)
_TRACES = Effect("with monitoring.tracing.enabled: true", lambda _, tracing: tracing.enabled)
_PAGE = Effect("with monitoring.web.enabled: true", lambda _, web: web.enabled)

EFFECTS: dict[str, Effect] = {
    "run.log_sample_tokens": _LOGGED,
    "run.log_samples_mb": _LOGGED,
    **dict.fromkeys(
        (
            *("task.path", "task.prompt_field", "task.answer_field", "task.id_field", "task.map"),
            *("task.on_bad_row", "task.evaluation_path"),
        ),
        _DATASET,
    ),
    "task.subset": Effect(
        "with a task.path or evaluation_path that is no file",
        lambda _, task: _has_parts(task.path) or _has_parts(task.evaluation_path),
    ),
    "task.split": Effect(
        "with a task.path that is no file",
        lambda _, task: _has_parts(task.path),
    ),
    "task.evaluation_split": Effect(
        "with a task.evaluation_path that is no file",
        lambda _, task: _has_parts(task.evaluation_path),
    ),
    "task.digits": Effect("with task.kind: arithmetic", lambda _, task: task.kind == "arithmetic"),
    "task.chat_template_kwargs": _TEMPLATE,
    "task.chat_template_date": _TEMPLATE,
    "task.too_long": Effect(
        "with task.max_prompt_tokens", lambda _, task: task.max_prompt_tokens is not None
    ),
    "environment": Effect("with environment.name", lambda _, one: one.name is not None),
    "engine.kind": Effect("without engine.kinds", lambda _, engine: not engine.kinds),
    "engine.torch": _uses_engine("torch"),
    "engine.vllm": _uses_engine("vllm"),
    "engine.sglang": _uses_engine("sglang"),
    "engine.weight_staging": Effect("on a GPU", lambda _, engine: engine.device != "cpu"),
    "cache.max_bytes": Effect("with cache.enabled: true", lambda _, cache: cache.enabled),
    "cache.min_match": _DRAFTS,
    "cache.min_probability": _DRAFTS,
    "cache.lenience": Effect("with cache.reuse: lenient", lambda _, one: one.reuse == "lenient"),
    "scheduler.runahead_kv_limit": Effect(
        "with scheduler.on_update: verify", lambda _, scheduler: scheduler.on_update == "verify"
    ),
    "scheduler.dynamic_sampling.max_batches": Effect(
        "with scheduler.dynamic_sampling.enabled: true", lambda _, sampling: sampling.enabled
    ),
    "trainer.learning_rate_minimum": _DECAYS,
    "trainer.schedule_steps": _DECAYS,
    "trainer.importance_cap": Effect(
        "with trainer.proximal_policy: current and a correction that truncates or rejects",
        _truncates,
    ),
    "trainer.dual_clip": _RATIO,
    "trainer.clip_ratio_low": _RATIO,
    "trainer.clip_ratio_high": _RATIO,
    "trainer.correction_band": Effect(
        "with a trainer.correction that masks or rejects",
        lambda _, trainer: trainer.correction.endswith(("masked", "rejected")),
    ),
    "trainer.kl_estimator": _KL,
    "trainer.kl_clamp": _KL,
    "trainer.reference_refresh_steps": _KL,
    "trainer.reference_decay": _KL,
    "trainer.critic": Effect(
        "with trainer.algorithm: ppo",
        lambda config, _: entry_of(config.trainer.algorithm).critic,
    ),
    "trainer.lora": Effect("with trainer.lora.rank above 0", lambda _, lora: lora.rank > 0),
    "trainer.sharding": _RANKS,
    "trainer.rank_network": _RANKS,
    "trainer.rank_seconds": _RANKS,
    "evaluation.best_of": Effect(
        "with evaluation.keep_best: true", lambda _, evaluation: evaluation.keep_best
    ),
    "evaluation.sets.NAME.subset": _OF_SET,
    "evaluation.sets.NAME.split": _OF_SET,
    "launcher.gpus": Effect(
        "where engine.device or trainer.device is not cpu",
        lambda config, _: {config.engine.device, config.trainer.device} != {"cpu"},
    ),
    "launcher.colocate": Effect("where trainer and engine may use a GPU", _may_share),
    "launcher.trusted_network": Effect(
        "with launcher.weights: broadcast or a trainer.rank_network of several machines",
        _has_rank_network,
    ),
    "launcher.ray": Effect(
        "with launcher.kind: ray", lambda config, _: config.launcher.kind == "ray", may_stand=True
    ),
    "launcher.agents": Effect(
        "with launcher.kind: agents",
        lambda config, _: config.launcher.kind == "agents",
        may_stand=True,
    ),
    "monitoring.host": _METRICS,
    "monitoring.port": _METRICS,
    "monitoring.tracing.endpoint": _TRACES,
    "monitoring.tracing.sample_rate": _TRACES,
    "monitoring.tracing.queue_spans": _TRACES,
    "monitoring.sink_seconds": Effect("with monitoring.sinks", lambda _, one: bool(one.sinks)),
    "monitoring.web.host": _PAGE,
    "monitoring.web.port": _PAGE,
    "monitoring.web.token_file": _PAGE,
}
"""Rules by key or section; settings without one always have an effect."""


def rule_of(key: str) -> Effect | None:
    """Return the rule of a setting or section by its dotted path; None: it has an effect."""
    while key not in EFFECTS and key:
        key = key.rpartition(".")[0]
    return EFFECTS.get(key)


class Idle(NamedTuple):
    """A setting that has no effect, and the rule that says so."""

    section: BaseModel
    name: str
    rule: Effect

    @property
    def is_refused(self) -> bool:
        """True if it is a user's mistake: it is not of another engine or launcher, and set."""
        default = type(self.section).model_fields[self.name].get_default(call_default_factory=True)
        if isinstance(self.section, TrainerConfig):
            default = entry_of(self.section.algorithm).defaults.get(self.name, default)
        value = getattr(self.section, self.name)
        is_off = value is False and default is None
        return not (self.rule.may_stand or is_off or value == default)


def without_effect(config: RunConfig) -> dict[Place, Idle]:
    """Return the settings that have no effect, set or not, by their place in the configuration.

    A setting that has one at any step of the run (`run.changes`) has an effect.
    """
    rules = {place: (section, rule_of(key)) for place, key, section in _settings(config, (), "")}
    found = {
        place: Idle(section, place[-1], rule)
        for place, (section, rule) in rules.items()
        if rule is not None and not rule.holds(config, section)
    }
    for step in config.run.changes:
        one = config.at(step)
        sections = {place: section for place, _, section in _settings(one, (), "")}
        found = {
            place: idle
            for place, idle in found.items()
            if not idle.rule.holds(one, sections[place])
        }
    return found


def refuse_without_effect(config: RunConfig, source: str) -> None:
    """Refuse settings of the user's that have no effect. Raises ConfigError."""
    lines = []
    for place, idle in without_effect(config).items():
        if idle.is_refused:
            value = idle.section.model_dump(mode="json")[idle.name]
            lines.append(
                f"  {'.'.join(place)}: {shortened(json.dumps(value))} has an effect only "
                f"{idle.rule.when}; see to that, or leave it out"
            )
    if lines:
        listed = "\n".join(lines)
        raise ConfigError(f"{source} has settings without effect:\n{listed}")


def load_users_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration as `load_config` does, and refuse settings without effect, too."""
    config = load_config(path, overrides)
    refuse_without_effect(config, "the command line" if path is None else str(path))
    return config


def _settings(section: BaseModel, outer: Place, key: str) -> Iterator[tuple[Place, str, BaseModel]]:
    """Yield the place, the key of the table and the section of each setting."""
    for name in type(section).model_fields:
        value, place, inner = getattr(section, name), (*outer, name), f"{key}.{name}".lstrip(".")
        entries = value if isinstance(value, dict) else {}
        if isinstance(value, BaseModel):
            yield from _settings(value, place, inner)
        elif any(isinstance(one, BaseModel) for one in entries.values()):
            for entry, one in entries.items():
                yield from _settings(one, (*place, entry), f"{inner}.NAME")
        else:
            yield place, inner, section
