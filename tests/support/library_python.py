"""Interpreters with other libraries, and environments that tests run there."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments.config import EnvironmentConfig
from asyncrl.environments.workers.interpreter import check_interpreter
from asyncrl.environments.workers.pool import EnvironmentPool
from asyncrl.rewards.config import RewardConfig

_SECONDS = 300.0


def library_python(name: str) -> str:
    """The interpreter that `make setup-environments` makes next to the one that runs the tests.

    Raises:
        RewardError: there is none. Nothing is skipped.
    """
    python = f"{sys.prefix}-{name}/bin/python"
    check_interpreter(python)
    return python


def seen_in_worker(library: str, file: Path, **variables: str) -> Any:
    """What the environment `Play` of a file has seen, in a worker with the library's interpreter.

    Args:
        library: whose interpreter.
        file: its folder is where the worker finds modules.
        variables: of the worker's environment.
    """
    config = EnvironmentConfig(
        name=f"{file}:Play", python=library_python(library), reset_timeout_seconds=_SECONDS
    )

    async def all_of_it() -> Any:
        pool = EnvironmentPool(config, RewardConfig(startup_seconds=_SECONDS))
        await pool.start()
        try:
            return json.loads(str((await pool.open({}, 0)).first))
        finally:
            await pool.close()

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ({"PYTHONPATH": str(file.parent)} | variables).items():
            patch.setenv(name, value)
        return asyncio.run(asyncio.wait_for(all_of_it(), 3 * _SECONDS))
