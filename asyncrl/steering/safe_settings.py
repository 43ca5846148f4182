"""Which settings `asyncrl set` changes while a run trains, from when on, and why not the others."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import ConfigError, UserError
from asyncrl.runs.command_lines import command_for
from asyncrl.suggestions import nearest, shortened

When = Literal["next step", "first step not begun", "at once"]
"""From when on a setting holds. `next step`: the first one that the trainer was not told to train.
`first step not begun`: the first one of which no group was issued, so that all samples of a step
are generated under the same rule. `at once`: it does not touch what is trained on."""

SAFE: dict[str, When] = {
    "trainer.learning_rate": "next step",
    "trainer.checkpoint_every": "next step",
    "scheduler.max_off_policy_steps": "first step not begun",
    "scheduler.max_runahead_groups": "first step not begun",
    "scheduler.on_update": "first step not begun",
    "scheduler.sample_deadline_seconds": "first step not begun",
    "launcher.silence_seconds": "at once",
    "launcher.leave_seconds": "at once",
    "launcher.stop_seconds": "at once",
    "launcher.checkpoint_seconds": "at once",
    "launcher.max_restarts": "at once",
    "evaluation.every": "at once",
    "evaluation.hold_seconds": "at once",
    "evaluation.timeout_seconds": "at once",
    "monitoring.log_level": "at once",
}
"""Settings that a live run takes."""

_RESUME = "Stop the run and continue it with `--resume --set {key}=VALUE`"
_NEW_RUN = "Start a new run under another name"
_REASONS: dict[str, tuple[str, str]] = {
    "run.steps": ("the schedules and the end of the run were planned with it", _RESUME),
    "run.seed": ("the data order and the sampling depend on it", _NEW_RUN),
    "run.changes": (
        "changes are added one by one",
        "Give the order at the step, or stop the run and resume it with `--set run.changes=...`",
    ),
    "run": ("it was decided when the run began", _RESUME),
    "task": ("the data order and the prompts depend on it", _NEW_RUN),
    "model": ("the run trains this model", _NEW_RUN),
    "rewards": ("samples of one step would be scored by different rules", _RESUME),
    "environment": ("what a sample is depends on it", _NEW_RUN),
    "sampling.stop": ("what a response is depends on it", _NEW_RUN),
    "sampling": ("samples of one step would follow different distributions", _RESUME),
    "engine": ("the engines were started with it", _RESUME),
    "cache": ("the generators' caches were built with it", _RESUME),
    "scheduler.group_size": ("which samples belong to a group depends on it", _NEW_RUN),
    "scheduler.groups_per_step": ("which groups belong to a step depends on it", _NEW_RUN),
    "scheduler": ("the work in flight was admitted under it", _RESUME),
    "trainer": ("the trainer was built with it", _RESUME),
    "evaluation": ("the accuracies before and after training could not be compared", _RESUME),
    "launcher.generators": (
        "generators join and leave by another order",
        "Use `asyncrl scale --generators N`",
    ),
    "launcher": ("the processes were started with it", _RESUME),
    "monitoring": ("the processes read it when they start", _RESUME),
}
"""Why other settings are not changed, and what to do: by key, or by section."""


def check_is_safe(key: str, config: RunConfig) -> When:
    """From when on a live run has a setting that is changed now.

    Raises:
        ConfigError: there is no such setting.
        UserError: a live run does not take it; the message says why, and what to do instead.
    """
    if key in SAFE:
        return SAFE[key]
    known = dict(_keys(RunConfig))
    if key not in known:
        raise ConfigError(f"there is no setting {shortened(key)!r}.{_similar(key, known)}")
    if known[key]:
        raise ConfigError(f"{key} is a section; name one of its settings, such as {key}.KEY")
    parts = key.split(".")
    reason, instead = next(
        _REASONS[name]
        for end in range(len(parts), 0, -1)
        if (name := ".".join(parts[:end])) in _REASONS
    )
    stop = command_for("stop", config.directory)
    instead = instead.format(key=key).replace("Stop the run", f"Stop the run (`{stop}`)")
    raise UserError(
        f"{key} cannot be changed while the run is active: {reason}. {instead}. Settings that can "
        f"be changed: {', '.join(SAFE)}"
    )


def _similar(key: str, known: dict[str, bool]) -> str:
    """A setting with a similar name: the whole, or the last part in any section."""
    last = key.rpartition(".")[2]
    same = [one for one in known if one.rpartition(".")[2] == last]
    if same:
        return f" Did you mean {same[0]!r}?"
    return nearest(key, known)


def _keys(model: type[BaseModel], outer: str = "") -> list[tuple[str, bool]]:
    """Every key below a model, and whether it is a section."""
    found = []
    for name, field in model.model_fields.items():
        inner: Any = field.annotation
        is_section = isinstance(inner, type) and issubclass(inner, BaseModel)
        found.append((f"{outer}{name}", is_section))
        if is_section:
            found += _keys(inner, f"{outer}{name}.")
    return found
