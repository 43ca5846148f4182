"""The table of when each setting of a run may change, and why not earlier.

`asyncrl set`, `run.changes`, `--resume`, checkpoints and docs/configuration.md read it. The rule of
a key is its entry's, or else that of the section around it.

>>> rule_of("trainer.learning_rate").when
'next step'
>>> rule_of("engine.vllm.dtype").when
'resume'
>>> rule_of("task.path").when
'never'
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

When = Literal["next step", "first step not begun", "at once", "resume", "never"]
"""The earliest moment of a setting's change. `next step`: the first step that the trainer was not
ordered to train. `first step not begun`: the first step of which no group was issued, so that all
samples of a step are generated under one rule. `at once`: it does not affect training data.
`resume`: when the run is continued with `--resume`. `never`: that is another run."""


class Rule(NamedTuple):
    """The moment at which a setting may change, and the answer to an earlier change."""

    when: When
    reason: str = ""
    """The obstacle while the run is active; empty if it can change."""
    instead: str = ""
    """The alternative, if it is not the usual one: a resume, or for `never` another run."""


_STEP, _BEGUN, _LIVE = Rule("next step"), Rule("first step not begun"), Rule("at once")
_LENGTH = Rule("resume", "the schedules and the end of the run were planned with it")
_RESUMED: tuple[str, ...] = (
    "device", "compile", "fused", "threads", "learning_rate_minimum", "learning_rate_schedule",
    "schedule_steps", "warmup_steps", "weight_decay", "max_grad_norm", "async_checkpoints",
    "keep_checkpoints", "micro_batch_tokens", "mix_groups", "gradient_checkpointing",
    "optimizer_offload", "ranks", "rank_network", "rank_seconds", "sharding",
    "critic.learning_rate", "critic.warmup_steps", "lora.serve",
)  # fmt: skip
"""Settings of the trainer that affect only speed, memory and rounding, and those that people adjust
when a run goes wrong. A checkpoint that was written with others of them is continued."""

_GROUPS = Rule("never", "which groups belong to a step depends on it")
_EXAMPLES = Rule("never", "which examples belong to a step depends on it")
_OF_EXAMPLES = ("learn", "response_field", "batch_size", "max_tokens", "too_long")

RULES: dict[str, Rule] = {
    "run": Rule("resume", "it was decided when the run began"),
    "run.name": Rule(
        "resume",
        "the run's folder has this name",
        "Stop the run, rename its folder and continue it with `--resume --set run.name=NAME`",
    ),
    "run.steps": _LENGTH,
    "run.epochs": _LENGTH,
    "run.seed": Rule("never", "the data order and the sampling depend on it"),
    "run.changes": Rule(
        "resume",
        "changes are added one by one",
        "Give the order at the step, or stop the run and resume it with `--set run.changes=...`",
    ),
    "task": Rule("never", "the data order and the prompts depend on it"),
    "model": Rule("never", "the run trains this model"),
    "rewards": Rule("resume", "samples of one step would be scored by different rules"),
    "environment": Rule("resume", "samples of one step would be answered by different rules"),
    # Unfinished samples of other sampling are drawn anew: `unfinished_work.settings_digest`.
    "sampling": Rule("resume", "samples of one step would follow different distributions"),
    "sampling.stop": Rule("never", "what a response is depends on it"),
    "engine": Rule("resume", "the engines were started with it"),
    "cache": Rule("resume", "the generators' caches were built with it"),
    "scheduler": Rule("resume", "the work in flight was admitted under it"),
    "scheduler.group_size": Rule("never", "which samples belong to a group depends on it"),
    "scheduler.groups_per_step": _GROUPS,
    "scheduler.dynamic_sampling.enabled": _GROUPS,
    "scheduler.max_off_policy_steps": _BEGUN,
    "scheduler.max_runahead_groups": _BEGUN,
    "scheduler.on_update": _BEGUN,
    "scheduler.sample_deadline_seconds": _BEGUN,
    "trainer": Rule(
        "never",
        "the loss and the optimizer's state depend on it",
        "Start a new run from its weights with `--set model.path=RUN/checkpoints/STEP`",
    ),
    "trainer.learning_rate": _STEP,
    "trainer.checkpoint_every": _STEP,
    **{f"trainer.{key}": Rule("resume", "the trainer was built with it") for key in _RESUMED},
    "evaluation": Rule("resume", "the accuracies before and after training could not be compared"),
    "evaluation.every": _LIVE,
    "evaluation.hold_seconds": _LIVE,
    "evaluation.timeout_seconds": _LIVE,
    "sft": Rule("resume", "the run was started with it"),
    **{f"sft.{key}": _EXAMPLES for key in _OF_EXAMPLES},
    "launcher": Rule("resume", "the processes were started with it"),
    "launcher.generators": Rule(
        "resume", "generators join and leave by another order", "Use `asyncrl scale --generators N`"
    ),
    "launcher.silence_seconds": _LIVE,
    "launcher.leave_seconds": _LIVE,
    "launcher.checkpoint_seconds": _LIVE,
    "launcher.max_restarts": _LIVE,
    "monitoring": Rule("resume", "the processes read it when they start"),
    "monitoring.log_level": _LIVE,
}

AT_A_STEP = tuple(key for key, rule in RULES.items() if "step" in rule.when)
"""Settings that change at a step: what `run.changes` may hold."""
LIVE = (*AT_A_STEP, *(key for key, rule in RULES.items() if rule.when == "at once"))
"""Settings that `asyncrl set` changes."""


def rule_of(key: str) -> Rule:
    """Return the rule of a setting by its dotted path. Raises KeyError if no entry covers it."""
    while key not in RULES:
        key, dot, _ = key.rpartition(".")
        if not dot:
            raise KeyError(f"no rule says when {key or 'it'} may change")
    return RULES[key]


def fixed_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the first setting that differs and never changes, or None; the trainer's are left out.

    Checkpoints check the trainer's settings (`trainer.checkpoint.format.manifest`).
    """
    never = (key for key, rule in RULES.items() if rule.when == "never" and key != "trainer")
    return next((key for key in never if value_of(before, key) != value_of(now, key)), None)


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Return a configuration's value at a dotted path; None if the section is missing."""
    found: Any = config
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
