"""Algorithm names, the classes behind them, and their defaults. Light: imports no torch."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered algorithm."""

    target: str
    smallest_group: int = 1
    """2 if a sample is compared with the others of its group."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """The paper's values of trainer settings, used as defaults with this algorithm."""
    only: Mapping[str, object] = field(default_factory=dict)
    """Settings with only one possible value, because the equation has no other."""
    unused: tuple[str, ...] = ()
    """Loss settings that this algorithm does not read; refused unless they have their default."""
    critic: bool = False
    normalises: Literal["never", "always", "std"] = "never"
    """When advantages are normalised over all tokens of a step; std: with `advantage_normalization:
    std`."""


_CURRENT = {"proximal_policy": "current"}
_BEHAVIOUR = {"proximal_policy": "behaviour"}
_UNSCALED = {"advantage_normalization": "none"}
_NORMALISED = {"advantage_normalization": "std"}
_CLIPS = ("clip_ratio_low", "clip_ratio_high", "dual_clip")
_NO_DUAL_CLIP = {"dual_clip": None}

_ENTRIES = {
    "grpo": Entry("asyncrl.trainer.algorithms.grpo:Grpo", 2),
    "dr_grpo": Entry(
        "asyncrl.trainer.algorithms.grpo:DrGrpo",
        2,
        defaults={"loss_normalization": "sample", **_UNSCALED},
        only=_UNSCALED,
    ),
    "dapo": Entry(
        "asyncrl.trainer.algorithms.grpo:Dapo", 2, defaults={"clip_ratio_high": 0.28, **_BEHAVIOUR}
    ),
    "reinforce": Entry(
        "asyncrl.trainer.algorithms.reinforce:Reinforce",
        2,
        defaults=_UNSCALED,
        only={**_CURRENT, **_UNSCALED},
        unused=_CLIPS,
    ),
    "rloo": Entry(
        "asyncrl.trainer.algorithms.reinforce:Rloo",
        2,
        defaults={
            "loss_normalization": "sample",
            "correction": "sequence_truncated",
            **_UNSCALED,
        },
        only={**_CURRENT, **_UNSCALED},
        unused=_CLIPS,
    ),
    "reinforce_plus_plus": Entry(
        "asyncrl.trainer.algorithms.reinforce_plus_plus:ReinforcePlusPlus",
        only={**_CURRENT, **_NORMALISED},
        unused=_CLIPS,
        normalises="always",
    ),
    "reinforce_plus_plus_baseline": Entry(
        "asyncrl.trainer.algorithms.reinforce_plus_plus:ReinforcePlusPlusBaseline",
        2,
        only={**_CURRENT, **_NORMALISED},
        unused=_CLIPS,
        normalises="always",
    ),
    "gspo": Entry(
        "asyncrl.trainer.algorithms.gspo:Gspo",
        2,
        defaults={
            "clip_ratio_low": 3e-4,
            "clip_ratio_high": 4e-4,
            "loss_normalization": "sequence",
            **_BEHAVIOUR,
        },
        only={**_BEHAVIOUR, **_NO_DUAL_CLIP},
    ),
    "cispo": Entry(
        "asyncrl.trainer.algorithms.cispo:Cispo",
        2,
        defaults={"clip_ratio_low": 1.0, "clip_ratio_high": 4.0, **_BEHAVIOUR},
        only={**_BEHAVIOUR, **_NO_DUAL_CLIP},
    ),
    "ppo": Entry("asyncrl.trainer.algorithms.ppo:Ppo", critic=True, normalises="std"),
    "gpg": Entry(
        "asyncrl.trainer.algorithms.gpg:Gpg",
        2,
        defaults=_UNSCALED,
        only={**_CURRENT, **_UNSCALED},
        unused=_CLIPS,
    ),
}

_TARGETS = {name: entry.target for name, entry in _ENTRIES.items()}
_PROVIDED: dict[str, type] = {}
"""User classes that this process has loaded, by `trainer.algorithm`."""
_OWN_NAME = re.compile(r"(?:[^\0]+\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):[^\W\d]\w*")


def known_algorithms() -> tuple[str, ...]:
    """Names that `trainer.algorithm` may take, sorted."""
    return tuple(sorted(_TARGETS))


def register(name: str, target: str) -> None:
    """Register `target` ("module:Class") as `name`, in this process.

    The controller checks the name and the trainer's process builds the class, so both must import
    the code. Raises ValueError if the name has another target, or the target has no class part.
    """
    if _TARGETS.get(name, target) != target:
        raise ValueError(f"algorithm {name!r} is already registered as {_TARGETS[name]}")
    if target.count(":") != 1:
        raise ValueError(f"algorithm target {target!r} is not of the form module:Class")
    _TARGETS[name] = target


def smallest_group(name: str) -> int:
    """Fewest samples of a group that this algorithm can learn from; 1 for a user's."""
    return _ENTRIES[name].smallest_group if name in _ENTRIES else 1


def check_name(name: str) -> None:
    """Raise ValueError for a name that is neither known nor written as a user's class."""
    if name not in _TARGETS and not _OWN_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not registered; known: {', '.join(known_algorithms())}. One of your own "
            "is written path/to/file.py:Class or my.module:Class"
        )


def provide(name: str, found: type) -> None:
    """Provide the class of a name like `path/to/file.py:Class` or `my.module:Class`."""
    _PROVIDED[name] = found


def is_own(name: str) -> bool:
    """Return True if this algorithm does not come with asyncrl."""
    return name not in _ENTRIES


def has_critic(name: str) -> bool:
    """Return True if this algorithm has a value model."""
    return name in _ENTRIES and _ENTRIES[name].critic


def normalises_over_step(name: str, *, std: bool) -> bool:
    """Return True if advantages are normalised over a step; `std` is `advantage_normalization`."""
    when = _ENTRIES[name].normalises if name in _ENTRIES else "never"
    return when == "always" or (when == "std" and std)


def defaults_of(name: object) -> Mapping[str, object]:
    """Trainer settings with other defaults for this algorithm."""
    return _ENTRIES[name].defaults if isinstance(name, str) and name in _ENTRIES else {}


def only_values_of(name: str) -> Mapping[str, object]:
    """Trainer settings with only one possible value for this algorithm."""
    return _ENTRIES[name].only if name in _ENTRIES else {}


def unused_by(name: str) -> tuple[str, ...]:
    """Trainer settings that have no effect with this algorithm."""
    return _ENTRIES[name].unused if name in _ENTRIES else ()


def class_of(name: str) -> Any:
    """Return the class that was registered or provided as `name`.

    Raises KeyError for an unknown name; ImportError or AttributeError if the target does not exist.
    """
    if name in _PROVIDED:
        return _PROVIDED[name]
    module, _, attribute = _TARGETS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
