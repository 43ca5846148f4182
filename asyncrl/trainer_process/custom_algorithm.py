"""A user's algorithm: `trainer.algorithm: path/to/file.py:Class` or `my.module:Class`.

    python -m asyncrl.trainer_process.custom_algorithm < CONFIG_JSON

The trainer's process loads the class before it creates the learner. Before a run starts, the
controller loads and tries it in a separate process, by the command above: the last line of its
standard output is the reason why the class cannot be used, as JSON, or null.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import UserError
from asyncrl.trainer.algorithms.base import Algorithm, TokenBatch, declares
from asyncrl.trainer.algorithms.corrections import make
from asyncrl.trainer.base.algorithm_registry import is_own, provide
from asyncrl.user_code.loading import FunctionKind, load_object, search
from asyncrl.user_code.streams import last_lines

KIND = FunctionKind(
    noun="trainer.algorithm", signature="Class(settings)", arguments=(), error=UserError
)


def load_own_algorithm(name: str) -> None:
    """Provide the class of `name` as the algorithm, if it is a user's.

    Raises UserError, in one paragraph, if it cannot be imported or is not an algorithm.
    """
    if not is_own(name):
        return
    search(str(Path.cwd()))
    try:
        found = load_object(KIND, name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"trainer.algorithm {name!r} cannot be loaded:\n{last_lines()}") from error
    lacking = [n for n in ("from_config", "advantages", "loss", "signals") if not hasattr(found, n)]
    if lacking or not isinstance(found, type):
        raise UserError(
            f"trainer.algorithm {name!r} is not a class with the members of an algorithm; it lacks "
            f"{', '.join(lacking) or 'a class'} (docs/algorithms.md#an-algorithm-of-your-own)"
        )
    provide(name, found)


def try_own_algorithm(config: RunConfig) -> None:
    """Load the class, and compute the advantages of a group and the loss of a few tokens.

    Raises UserError if it cannot be loaded, fails, or does not behave like an algorithm.
    """
    name, size = config.trainer.algorithm, config.scheduler.group_size
    load_own_algorithm(name)
    try:
        algorithm = make(config.trainer)
        advantages = np.asarray(algorithm.advantages(np.arange(size, dtype=np.float64)))
        problem = _problem(algorithm, advantages, size)
    except Exception as error:
        raise UserError(f"trainer.algorithm {name!r} failed its trial:\n{last_lines()}") from error
    if problem is None and config.scheduler.dynamic_sampling.enabled:
        problem = _signal_problem(algorithm, size)
    if problem is not None:
        raise UserError(f"trainer.algorithm {name!r}: {problem}")


def _problem(algorithm: Algorithm, each: Any, size: int) -> str | None:
    if each.shape != (size,) or not np.isfinite(each).all():
        return f"advantages of {size} rewards must be {size} finite numbers, got {each!r:.200}"
    logprobs = torch.full((size,), -1.0, requires_grad=True)
    there, given = logprobs.detach(), torch.as_tensor(each, dtype=torch.float32)
    batch = TokenBatch(logprobs, there, given, torch.ones(size), there, owners=torch.arange(size))
    found = algorithm.loss(batch)
    if found.sums.keys() != algorithm.signals.keys():
        return (
            f"loss must report its signals, {sorted(algorithm.signals)}, but reports "
            f"{sorted(found.sums)}"
        )
    if found.loss.shape != () or not torch.isfinite(found.loss):
        return f"loss must be one finite number, got {found.loss.detach()!r:.200}"
    return None


def _signal_problem(algorithm: Algorithm, size: int) -> str | None:
    if not declares(algorithm, "compares_samples"):
        return (
            "scheduler.dynamic_sampling.enabled leaves out groups whose rewards are all equal. "
            "Set `compares_samples = True` in the class if it learns nothing from them, or "
            "disable it"
        )
    if np.any(algorithm.advantages(np.ones(size))):
        return "compares_samples is True, but advantages of equal rewards are not all 0"
    return None


def main() -> None:
    """Print why the class cannot be used."""
    reason = None
    try:
        try_own_algorithm(RunConfig.model_validate_json(sys.stdin.read()))
    except UserError as error:
        reason = str(error)
    sys.stdout.write(f"\n{json.dumps(reason)}\n")


if __name__ == "__main__":
    main()
