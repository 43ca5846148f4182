"""An algorithm of the user's own is tried before a run starts, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import UserError
from asyncrl.trainer.base.algorithm_registry import is_own

_SECONDS = 120.0
"""Longest wait for it; it imports torch."""


def check_algorithm(config: RunConfig) -> None:
    """Load and try the class of `trainer.algorithm`, if it is one of the user's.

    Raises:
        UserError: it cannot be used; the message says why.
    """
    name = config.trainer.algorithm
    if not is_own(name):
        return
    try:
        done = subprocess.run(
            (sys.executable, "-P", "-m", "asyncrl.trainer_process.custom_algorithm"),
            input=config.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
        reason = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"trainer.algorithm {name!r}: importing and trying it takes more than {_SECONDS:g} s"
        ) from error
    except (subprocess.CalledProcessError, ValueError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()[-2000:]
        raise UserError(
            f"trainer.algorithm {name!r}: the process that tried it ended unexpectedly:\n{said}"
        ) from error
    if reason is not None:
        raise UserError(reason)
