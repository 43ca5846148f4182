"""Algorithm names, the classes behind them, and their defaults. Light: imports no torch."""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered algorithm. The defaults are those of a user's."""

    target: str = ""
    """Module of `asyncrl.trainer.algorithms`, and class."""
    smallest_group: int = 1
    """2 if a sample is compared with the others of its group."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """The paper's values of trainer settings, used as defaults with this algorithm."""
    only: Mapping[str, object] = field(default_factory=dict)
    """Settings with only one possible value, because the equation has no other."""
    unclipped: bool = False
    """True if the algorithm reads neither `clip_ratio_*` nor `dual_clip`."""
    critic: bool = False
    normalises: Literal["never", "always", "std"] = "never"
    """Normalisation of advantages over the step; std: with `advantage_normalization: std`."""


_BEHAVIOUR = {"proximal_policy": "behaviour"}
_CLIPPED_ONCE = {**_BEHAVIOUR, "dual_clip": None}
_UNSCALED = {"advantage_normalization": "none"}
_NO_CLIP = {"proximal_policy": "current", **_UNSCALED}
_NORMALISED = {"proximal_policy": "current", "advantage_normalization": "std"}
_BY_SAMPLE = {"loss_normalization": "sample", **_UNSCALED}
_RLOO = {"correction": "sequence_truncated", **_BY_SAMPLE}
_GSPO = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_normalization": "sequence"}
_CISPO = {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0, **_BEHAVIOUR}
_OVER_STEP = partial(Entry, only=_NORMALISED, unclipped=True, normalises="always")

_ENTRIES = {
    "grpo": Entry("grpo:Grpo", 2),
    "dr_grpo": Entry("grpo:DrGrpo", 2, defaults=_BY_SAMPLE, only=_UNSCALED),
    "dapo": Entry("grpo:Dapo", 2, defaults={"clip_ratio_high": 0.28, **_BEHAVIOUR}),
    "reinforce": Entry("reinforce:Reinforce", 2, defaults=_UNSCALED, only=_NO_CLIP, unclipped=True),
    "rloo": Entry("reinforce:Rloo", 2, defaults=_RLOO, only=_NO_CLIP, unclipped=True),
    "reinforce_plus_plus": _OVER_STEP("reinforce_plus_plus:ReinforcePlusPlus"),
    "reinforce_plus_plus_baseline": _OVER_STEP("reinforce_plus_plus:ReinforcePlusPlusBaseline", 2),
    "gspo": Entry("gspo:Gspo", 2, defaults={**_GSPO, **_BEHAVIOUR}, only=_CLIPPED_ONCE),
    "cispo": Entry("cispo:Cispo", 2, defaults=_CISPO, only=_CLIPPED_ONCE),
    "ppo": Entry("ppo:Ppo", critic=True, normalises="std"),
    "gpg": Entry("gpg:Gpg", 2, defaults=_UNSCALED, only=_NO_CLIP, unclipped=True),
}

_OWN = Entry()
_PROVIDED: dict[str, type] = {}
"""User classes that this process has loaded, by `trainer.algorithm`."""
_OWN_NAME = re.compile(r"(?:[^\0]+\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):[^\W\d]\w*")


def known_algorithms() -> tuple[str, ...]:
    """Names of asyncrl's own algorithms, sorted."""
    return tuple(sorted(_ENTRIES))


def entry_of(name: object) -> Entry:
    """Properties of an algorithm, known or a user's."""
    return _ENTRIES.get(name, _OWN) if isinstance(name, str) else _OWN


def check_name(name: str) -> str:
    """Return the name. Raises ValueError if it is neither known nor written as a user's class."""
    if is_own(name) and not _OWN_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not registered; known: {', '.join(known_algorithms())}. One of your own "
            "is written path/to/file.py:Class or my.module:Class"
        )
    return name


def provide(name: str, found: type) -> None:
    """Provide the class of a name like `path/to/file.py:Class` or `my.module:Class`."""
    _PROVIDED[name] = found


def is_own(name: str) -> bool:
    """Return True if this algorithm does not come with asyncrl."""
    return name not in _ENTRIES


def class_of(name: str) -> Any:
    """Return the class of an algorithm. Raises KeyError if a user's was not provided."""
    if name in _PROVIDED:
        return _PROVIDED[name]
    module, _, attribute = _ENTRIES[name].target.partition(":")
    return getattr(importlib.import_module(f"asyncrl.trainer.algorithms.{module}"), attribute)
