"""Environments in an interpreter of their own: refused where it cannot work, and used where it can.

The other interpreter is a virtual environment with msgspec and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.environments.config import EnvironmentConfig
from asyncrl.environments.protocol import Action
from asyncrl.environments.workers.interpreter import check_interpreter, command
from asyncrl.environments.workers.pool import EnvironmentPool
from asyncrl.errors import RewardError
from asyncrl.rewards.config import RewardConfig

LOOKS_AROUND = """
import importlib.util, multiprocessing, os, sys
from asyncrl.environments.protocol import StepResult
def name_of_a_module(queue):
    from asyncrl.environments import protocol
    queue.put(protocol.__name__)
class Mine:
    replay = "deterministic"
    @staticmethod
    def rows():
        yield {"prompt": sys.prefix}
    def reset(self, row, seed):
        return sys.prefix
    def step(self, action):
        there = importlib.util.find_spec(action.text) is not None
        return StepResult(f"{action.text}: {there}", done=True, reward=1.0)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with msgspec alone."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    return folder


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(LOOKS_AROUND)
    return f"{path}:Mine"


def program(folder: Path, text: str) -> str:
    path = folder / f"python{len(list(folder.iterdir()))}"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def started(config: EnvironmentConfig, play: Any) -> Any:
    async def all_of_it() -> Any:
        pool = EnvironmentPool(config, RewardConfig())
        await pool.start()
        try:
            return await play(pool)
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(all_of_it(), 120))


def test_workers_run_there_with_asyncrl_of_here(
    bare: Path, mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)  # modules are found in the folder of the run

    async def play(pool: EnvironmentPool) -> Any:
        found = []
        for module in ("msgspec", "asyncrl", "torch", "pydantic", "wire"):
            session = await pool.open({"prompt": "p"}, 1)
            turn = Action(module, [1], {"role": "assistant", "content": module}, [])
            found.append((session.first, (await session.step(turn)).observation))
        return found

    config = EnvironmentConfig(name=mine, python=str(bare / "bin" / "python"))
    found = started(config, play)
    assert {first for first, _ in found} == {str(bare)}
    assert [observation for _, observation in found] == [
        "msgspec: True", "asyncrl: True", "torch: False", "pydantic: False", "wire: False",
    ]  # fmt: skip


def test_rows_are_read_there_too(bare: Path, mine: str, tmp_path: Path) -> None:
    rows = [sys.executable, "-m", "asyncrl.environments.rows", "--python"]
    done = subprocess.run(  # with a path from the current directory, as the page has it
        [*rows, "venv/bin/python", mine],
        capture_output=True,
        timeout=120,
        check=True,
        cwd=bare.parent,
    )
    assert json.loads(done.stdout) == {"prompt": str(bare)}
    none = subprocess.run([*rows, "/no/python", mine], capture_output=True, timeout=120)
    assert none.returncode == 1
    assert b"/no/python does not exist" in none.stderr


def test_a_process_that_multiprocessing_starts_finds_asyncrl(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(
        LOOKS_AROUND + "def main():\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.SimpleQueue()\n"
        "    process = context.Process(target=name_of_a_module, args=(queue,))\n"
        "    process.start(); process.join(60)\n"
        "    print(queue.get(), process.exitcode)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command("spawns", str(bare / "bin" / "python")),
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert done.stdout == "asyncrl.environments.protocol 0\n", done.stderr


def test_an_interpreter_that_cannot_work_is_refused(bare: Path, tmp_path: Path) -> None:
    for python, message in (
        ("/no/python", "environment.python: /no/python does not exist"),
        (str(bare), f"is a folder; did you mean {bare}/bin/python?"),
        (program(tmp_path, "exit 3"), "is not a working Python"),
        (program(tmp_path, "echo hello"), "is not a working Python"),
        (program(tmp_path, "echo '[3, 10, true]'"), "is Python 3.10; asyncrl's worker needs 3.11"),
        (
            program(tmp_path, f'exec {shlex.quote(sys.executable)} -S "$@"'),
            "-m pip install msgspec",
        ),
    ):
        with pytest.raises(RewardError, match=r"environment\.python") as refused:
            check_interpreter(python)
        assert message in str(refused.value)


def test_it_is_refused_before_a_worker_starts(mine: str) -> None:
    async def play(pool: EnvironmentPool) -> None:
        raise AssertionError("it started")

    with pytest.raises(RewardError, match=r"environment\.python: /no/python does not exist"):
        started(EnvironmentConfig(name=mine, python="/no/python"), play)
