"""The table of settings that have an effect only with others; a user's that have none are refused.

`asyncrl run`, `sft` and `doctor` refuse them, `--explain` greys them, and docs/configuration.md
says when they have one. The rule of a key is its entry's, or else that of the section around it.
Values that are a setting's default pass, since a run's own config.yaml names all of them; and
recorded configurations are not judged, so that every run stays readable.
"""

import functools
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
    """Condition under which a setting has an effect."""

    when: str
    """The condition in words, after "only"."""
    holds: Callable[[RunConfig, Any], bool]
    """The condition, of a configuration and the setting's section."""
    may_stand: bool = False
    """True for sections of other engines and launchers: people keep them in one file."""


def _of(config: RunConfig, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def _is(key: str, *values: object) -> Effect:
    shown = " or ".join(str(value).lower() for value in values)
    return Effect(f"with {key}: {shown}", lambda config, _: _of(config, key) in values)


def _given(key: str) -> Effect:
    return Effect(f"with {key}", lambda config, _: _of(config, key) not in (None, ()))


def _above(key: str, least: int) -> Effect:
    return Effect(f"with {key} above {least}", lambda config, _: _of(config, key) > least)


def _engine(kind: str) -> Effect:
    def is_used(config: RunConfig, _: Any) -> bool:
        return kind in (config.engine.kinds or (config.engine.kind,))

    return Effect(f"with engine.kind or kinds: {kind}", is_used, may_stand=True)


def _no_file(*names: str) -> Effect:
    """Make the rule of what selects from a folder or a hub's dataset; `names` are its paths."""

    def holds(_: RunConfig, section: Any) -> bool:
        paths = [Path(path) for name in names if (path := getattr(section, name)) is not None]
        return any(one.suffix not in _FILES and not one.is_file() for one in paths)

    return Effect(f"where {' or '.join(names)} is a folder or a hub id", holds)


def _clips(_: RunConfig, trainer: Any) -> bool:
    if is_own(trainer.algorithm):
        return True  # its class may read what it likes
    has_ratio = trainer.proximal_policy == "behaviour" or trainer.updates_per_step > 1
    return has_ratio and not entry_of(trainer.algorithm).unclipped


def _truncates(_: RunConfig, trainer: Any) -> bool:
    in_loss = trainer.proximal_policy == "behaviour"
    return not in_loss and trainer.correction.endswith(("truncated", "rejected"))


def _may_share(config: RunConfig, launcher: Any) -> bool:
    return launcher.gpus != () and "cpu" not in (config.engine.device, config.trainer.device)


def _trusts(config: RunConfig, launcher: Any) -> bool:
    several = config.trainer.ranks > 1 and not is_loopback(config.trainer.rank_network)
    return launcher.weights == "broadcast" or several


_TABLE: dict[str, Effect] = {
    "run steps": Effect("without run.epochs", lambda _, run: run.epochs is None),
    "run log_sample_tokens log_samples_mb": _is("run.log_samples", "jsonl"),
    "run print_samples": _is("monitoring.live", "auto", "rich", "plain"),
    "task path prompt_field answer_field id_field map on_bad_row evaluation_path": _is(
        "task.kind", "dataset"
    ),
    "task subset": _no_file("path", "evaluation_path"),
    "task split": _no_file("path"),
    "task evaluation_split": _no_file("evaluation_path"),
    "task digits": _is("task.kind", "arithmetic"),
    "task chat_template_kwargs chat_template_date": _is("task.chat_template", "auto", "always"),
    "task too_long": _given("task.max_prompt_tokens"),
    "environment": _given("environment.name"),
    "engine kind": Effect("without engine.kinds", lambda config, _: not config.engine.kinds),
    "engine.torch": _engine("torch"),
    "engine.vllm": _engine("vllm"),
    "engine.sglang": _engine("sglang"),
    "engine weight_staging": _is("engine.device", "auto", "cuda"),
    "cache max_bytes": _is("cache.enabled", True),
    "cache min_match min_probability": Effect(
        "with cache.max_draft_tokens above 0", lambda _, cache: cache.max_draft_tokens != 0
    ),
    "cache lenience": _is("cache.reuse", "lenient"),
    "scheduler runahead_kv_limit": _is("scheduler.on_update", "verify"),
    "scheduler.dynamic_sampling max_batches": _is("scheduler.dynamic_sampling.enabled", True),
    "trainer learning_rate_minimum schedule_steps": _is(
        "trainer.learning_rate_schedule", "cosine", "linear"
    ),
    "trainer clip_ratio_low clip_ratio_high dual_clip": Effect(
        "with an algorithm that clips, and trainer.proximal_policy: behaviour or several updates "
        "per step",
        _clips,
    ),
    "trainer importance_cap": Effect(
        "with trainer.proximal_policy: current and a correction that truncates or rejects",
        _truncates,
    ),
    "trainer correction_band": Effect(
        "with a trainer.correction that masks or rejects",
        lambda _, trainer: trainer.correction.endswith(("masked", "rejected")),
    ),
    "trainer kl_estimator kl_clamp reference_refresh_steps reference_decay": _above(
        "trainer.kl_coefficient", 0
    ),
    "trainer.critic": Effect(
        "with trainer.algorithm: ppo", lambda config, _: entry_of(config.trainer.algorithm).critic
    ),
    "trainer.lora": _above("trainer.lora.rank", 0),
    "trainer sharding rank_network rank_seconds": _above("trainer.ranks", 1),
    "evaluation best_of": _is("evaluation.keep_best", True),
    "evaluation.sets.NAME subset split": _no_file("path"),
    "sft": Effect("in `asyncrl sft`", lambda *_: False, may_stand=True),
    "launcher gpus": Effect(
        "where engine.device or trainer.device is not cpu",
        lambda config, _: {config.engine.device, config.trainer.device} != {"cpu"},
    ),
    "launcher colocate": Effect("where trainer and engine may use a GPU", _may_share),
    "launcher trusted_network": Effect(
        "with launcher.weights: broadcast or a trainer.rank_network of several machines", _trusts
    ),
    "launcher.ray": _is("launcher.kind", "ray")._replace(may_stand=True),
    "launcher.agents": _is("launcher.kind", "agents")._replace(may_stand=True),
    "monitoring host port": _is("monitoring.metrics", True),
    "monitoring.tracing endpoint sample_rate queue_spans": _is("monitoring.tracing.enabled", True),
    "monitoring sink_seconds": _given("monitoring.sinks"),
    "monitoring.web host port token_file": _is("monitoring.web.enabled", True),
}
"""Rules by section, or by section and settings; settings without one always have an effect."""


def _by_key(table: dict[str, Effect]) -> dict[str, Effect]:
    return {
        key: effect
        for names, effect in table.items()
        for section, *settings in [names.split()]
        for key in ([f"{section}.{one}" for one in settings] or [section])
    }


EFFECTS = _by_key(_TABLE)
"""The rules by key or section."""
_RL = Effect("in `asyncrl run`", lambda *_: False, may_stand=True)
_OF_RL = """
run steps epochs repeatable on_wrong_policy changes print_samples log_samples log_samples_mb
  log_sample_tokens; task answer_field max_prompt_tokens too_long;
rewards; environment; sampling; engine; cache; scheduler;
trainer algorithm learning_rate learning_rate_schedule learning_rate_minimum warmup_steps
  schedule_steps proximal_policy importance_cap dual_clip correction correction_band log_ratio_clamp
  clip_ratio_low clip_ratio_high loss_normalization advantage_normalization
  skip_zero_variance_groups overlong_buffer mask_truncated_completions kl_coefficient kl_estimator
  kl_clamp reference_refresh_steps reference_decay ppo_epochs minibatches critic mix_groups
  rank_network async_checkpoints;
evaluation samples temperature threshold hold_seconds max_unscored_share timeout_seconds;
launcher generators threads weights trusted_network colocate pin_cores silence_seconds leave_seconds
  checkpoint_seconds max_restarts ray agents;
monitoring metrics host port live report_samples timeline tracing web"""
_MISSED = dict.fromkeys(
    ("evaluation sets keep_best best_of", "launcher kind"), _RL._replace(may_stand=False)
)
OF_RL = _by_key(dict.fromkeys(_OF_RL.split(";"), _RL) | _MISSED)
"""Settings that `asyncrl sft` refuses or names; a resume does not compare them."""
_OF_SFT = {key: one for key, one in EFFECTS.items() if key.split(".")[0] not in (*OF_RL, "sft")}
_OF_SFT |= {**OF_RL, "sft.response_field": _is("sft.learn", "response")}


def rule_of(key: str, verb: str = "run") -> Effect | None:
    """Return the rule of a setting or section by its dotted path; None: it has an effect."""
    table = _OF_SFT if verb == "sft" else EFFECTS
    while key not in table and key:
        key = key.rpartition(".")[0]
    return table.get(key)


class Idle(NamedTuple):
    """A setting that has no effect, and the rule that says so."""

    section: BaseModel
    name: str
    rule: Effect

    @property
    def is_refused(self) -> bool:
        """True if it is a user's mistake: it is not of another engine or launcher, and set."""
        return self.is_set and not self.rule.may_stand

    @property
    def is_set(self) -> bool:
        """True if its value is not the default."""
        default = type(self.section).model_fields[self.name].get_default(call_default_factory=True)
        if isinstance(self.section, TrainerConfig):
            default = entry_of(self.section.algorithm).defaults.get(self.name, default)
        value = getattr(self.section, self.name)
        is_off = value is False and default is None
        return not (is_off or value == default)


def without_effect(config: RunConfig, verb: str = "run") -> dict[Place, Idle]:
    """Return the settings that have no effect, set or not, by their place in the configuration.

    A setting that has one at any step of the run (`run.changes`) has an effect.
    """
    rules = {
        place: (section, rule_of(key, verb)) for place, key, section in _settings(config, (), "")
    }
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


def refuse_without_effect(config: RunConfig, source: str, verb: str = "run") -> None:
    """Refuse settings of the user's that have no effect. Raises ConfigError."""
    lines = []
    for place, idle in without_effect(config, verb).items():
        if idle.is_refused:
            value = idle.section.model_dump(mode="json")[idle.name]
            lines.append(
                f"  {'.'.join(place)}: {shortened(json.dumps(value))} has an effect only "
                f"{idle.rule.when}; otherwise leave it out"
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
