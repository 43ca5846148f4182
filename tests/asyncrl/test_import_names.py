"""A user's files do not take the place of ours, nor of those of libraries; nor ours of theirs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from reward_pools import running

import asyncrl
from asyncrl.errors import DataError
from asyncrl.rewards.calls import Reward
from asyncrl.tasks.data.map_worker import MAP
from asyncrl.user_code import loading as user_functions
from asyncrl.user_code.loading import load_function

OURS = ("cache", "engine", "monitoring", "rollout", "scheduler", "trainer", "wire")
SHADOWS = (*OURS, "types", "random", "tokenizers", "torch", "asyncio", "msgspec")


def ran(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=cwd, timeout=120, check=False
    )


@pytest.fixture
def shadowed(tmp_path: Path) -> Path:
    """A folder in which each import of a file would end the process."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the user was imported')")
    return tmp_path


def test_the_command_line_imports_nothing_of_the_folder_that_it_is_called_in(
    shadowed: Path,
) -> None:
    asyncrl = str(Path(sys.executable).with_name("asyncrl"))
    done = subprocess.run(
        [asyncrl, "run", "--help"], capture_output=True, text=True, cwd=shadowed, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--resume" in done.stdout


@pytest.mark.parametrize("name", OURS)
def test_the_former_names_say_the_new_ones(name: str, tmp_path: Path) -> None:
    done = ran("-c", f"import {name}", cwd=tmp_path)
    assert done.returncode == 1
    assert f"is imported as asyncrl.{name}" in done.stderr
    (tmp_path / f"{name}.py").write_text("print('of the user')")
    assert ran("-c", f"import {name}", cwd=tmp_path).stdout == "of the user\n"


@pytest.mark.parametrize("installed", [True, False])
def test_a_users_file_that_imports_by_a_former_name_is_told_the_new_one(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkout the former name is found; from a wheel it is not."""
    (tmp_path / "mine.py").write_text("import trainer.algorithms.grpo\n")
    if installed:
        root = str(Path(asyncrl.__file__).parents[1])
        monkeypatch.setattr(sys, "path", [one for one in sys.path if one not in ("", root)])
        monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if of_python(one)])
    with pytest.raises(ImportError) as refused:
        load_function(MAP, f"{tmp_path / 'mine.py'}:f", {})
    assert isinstance(refused.value, ModuleNotFoundError) == installed
    said = [str(refused.value), *getattr(refused.value, "__notes__", ())]
    assert "asyncrl.trainer" in " ".join(said)


def of_python(finder: object) -> bool:
    """Whether it is no finder of an editable installation."""
    return "editable" not in f"{finder!r}"


COMMON = """
import multiprocessing
from dataclasses import dataclass
import types, random, tokenizers
from beside import bonus

@dataclass
class Verdict:
    value: float

def judged(text):
    return Verdict({value} * len(text))

def score(prompt, response, example):
    assert hasattr(types, "SimpleNamespace") and hasattr(random, "random")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (found,) = pool.map(judged, [response])
    assert type(found) is Verdict, found
    return found.value + bonus()
"""


def test_a_workers_files_find_their_neighbours_themselves_and_libraries(
    shadowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of one stem, in folders of their own, each with processes of its own."""
    monkeypatch.chdir(shadowed)
    for folder, value in (("a b", 1.0), ("ü", 10.0)):
        (shadowed / folder).mkdir()
        (shadowed / folder / "score.py").write_text(COMMON.replace("{value}", str(value)))
    (shadowed / "beside.py").write_text("def bonus():\n    return 0.25\n")
    names = [{"name": f"{folder}/score.py:score"} for folder in ("a b", "ü")]

    async def check() -> Reward:
        async with running(*names, timeout_seconds=60.0) as pool:
            return await pool.score("", "four", {})

    reward = asyncio.run(check())
    assert reward.terms == (4 + 0.25, 40 + 0.25)


def test_one_name_next_to_two_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_functions, "_USERS", [])
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_helper.py").write_text(f"NAME = '{folder}'\n")
        (tmp_path / folder / "f.py").write_text("import own_helper\ndef f(e):\n    return {}\n")
    load_function(MAP, f"{tmp_path}/a/f.py:f", {})
    with pytest.raises(DataError, match=r"it imports own_helper, which is .*/b/own_helper.py"):
        load_function(MAP, f"{tmp_path}/b/f.py:f", {})


def test_a_module_of_the_users_that_is_another_one_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("def f(example):\n    return example\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"random is .*/random\.py, but .* first. Name the file"):
        load_function(MAP, "random:f", {})
    assert load_function(MAP, "random.py:f", {})({}) == {}
