"""Asynchronous RL post-training on exactly on-policy data: CLI, configuration, processes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.python_run import Result, Run

__all__ = ["Result", "Run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asyncrl import python_run  # only now: children import this package, too

    return getattr(python_run, name)
