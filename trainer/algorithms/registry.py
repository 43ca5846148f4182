"""Names of algorithms and where their classes lie. Knows no configuration and imports no torch."""

from __future__ import annotations

_TARGETS = {
    "grpo": "trainer.algorithms.grpo:Grpo",
    "reinforce": "trainer.algorithms.reinforce:Reinforce",
}

_SMALLEST_GROUPS = {"grpo": 2, "reinforce": 2}


def known_algorithms() -> tuple[str, ...]:
    """Names that `trainer.algorithm` may take, sorted."""
    return tuple(sorted(_TARGETS))


def register(name: str, target: str) -> None:
    """Make `target` ("module:Class") known as `name`, in this process.

    The controller checks the name and the trainer's process builds the class, so code that adds an
    algorithm of its own must be imported by both.

    Raises:
        ValueError: the name is taken by another target, or the target has no class part.
    """
    if _TARGETS.get(name, target) != target:
        raise ValueError(f"algorithm {name!r} is already registered as {_TARGETS[name]}")
    if target.count(":") != 1:
        raise ValueError(f"algorithm target {target!r} is not of the form module:Class")
    _TARGETS[name] = target


def smallest_group(name: str) -> int:
    """Fewest samples of a group that this algorithm can learn from.

    2 where a sample is compared with the others of its group. An algorithm added by `register`
    decides when it is given a group.
    """
    return _SMALLEST_GROUPS.get(name, 1)


def target_of(name: str) -> str:
    """The "module:Class" registered as `name`. Raises KeyError when there is none."""
    return _TARGETS[name]
