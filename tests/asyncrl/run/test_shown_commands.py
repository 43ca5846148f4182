"""The commands of pages, of `--help` and of the headers of examples, as they are printed.

Only steps, sizes, folder and port are others (`command_scenarios`): a step has 16 samples, and few
held-out prompts are evaluated (`FEW`). The built-in models are not trained, so steps without any
reward are computed too (`ALL_GROUPS`).
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from asyncrl_runs import ROOT, UNHURRIED_DIGITS, CommandLine, until, worst_mismatch
from command_scenarios import commands_of
from run_in_threads import ThreadLauncher
from shown_commands import blocks
from tiny_warm_start import place_untrained
from tried_here import try_here
from typer.main import get_command
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.cli.entry import main  # adds the commands
from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.tasks.builtin.warm_start_recipe import AGENT_RECIPE, RECIPE

pytestmark = pytest.mark.slow

EXAMPLES = shlex.quote(str(ROOT / "examples"))
SMALL = ("task.train_size=64", "task.evaluation_size=8")
FEW = (
    *(*SMALL, "evaluation.prompts=4", "evaluation.samples=1"),
    *("scheduler.groups_per_step=4", "scheduler.group_size=4"),
)
FEWER = ("scheduler.groups_per_step=2", "scheduler.group_size=2", "engine.slots=4")
"""For environments that start a process for each answer."""
ALL_GROUPS = ("trainer.skip_zero_variance_groups=false",)
DIGITS = """
def digits(prompt, response, example):
    return sum(character.isdigit() for character in response) / max(1, len(response))
"""
"""A reward that an untrained model gets, so that algorithms have something to compare."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, own_model: Path) -> Path:
    """A cache with the built-in models, untrained; that of examples/your_own has been tried."""
    cache = tmp_path_factory.mktemp("cache")
    try_here(own_model, cache)
    for recipe in (RECIPE, AGENT_RECIPE):
        place_untrained(cache, recipe)
    return cache


@pytest.fixture
def elsewhere(
    command_line: CommandLine, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CommandLine:
    """A folder that is not the checkout, in which commands are given; runs are in `runs/`."""
    assert main is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(models))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return command_line


@pytest.fixture
def in_threads(elsewhere: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Iterator[CommandLine]:
    """There, runs are in threads of this process."""
    monkeypatch.setattr("asyncrl.startup.launching.LocalLauncher", ThreadLauncher)
    before = set(threading.enumerate())
    yield elsewhere
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert not [name for name in left if name.startswith(("trainer", "generator"))]


def forms(command: str, **stands_for: str) -> list[str]:
    """The commands that a reader makes of one: placeholders, `a|b` and `[optional]` resolved."""
    for word, value in stands_for.items():
        command = re.sub(rf"\b{word}\b", value, command)
    choices = [
        ("", word[1:-1]) if re.fullmatch(r"\[\S+\]", word) else word.split("|")
        for word in command.split(" ")
    ]
    # The first words change fastest: a pause is followed by its resume.
    found = itertools.product(*reversed(choices))
    return [" ".join(filter(None, reversed(words))) for words in found]


def typed(command: str, *settings: str) -> str:
    """What a command prints that is given in this process."""
    asyncrl, *words = shlex.split(command)
    assert asyncrl == "asyncrl"
    pairs = [part for one in settings for part in ("--set", one)]
    with mock.patch("typer.testing._get_command", return_value=_app()):
        done = CliRunner().invoke(app, [*words, *pairs])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise AssertionError(f"{command}: {done.output}") from done.exception
    assert done.exit_code == 0, f"{command}: {done.output}"
    return done.output


@functools.cache
def _app() -> object:
    """The command with its subcommands, which Typer would make again for each call."""
    return get_command(app)


def of_shell(command: str, *settings: str) -> list[str]:
    """The same as the arguments of a process of its own."""
    pairs = [part for one in settings for part in ("--set", one)]
    return [sys.executable, "-m", "asyncrl", *shlex.split(command)[1:], *pairs]


def trained_two_steps(folder: Path) -> None:
    steps = read_metrics(folder / "metrics.jsonl")
    assert [step.step for step in steps] == [0, 1]
    assert all(step.batch.tokens > 0 for step in steps)
    assert worst_mismatch(steps[:1]) < 1e-3, "trained on something else than was generated"
    assert json.loads((folder / "result.json").read_text())["steps"] == 2
    assert (folder / "report.html").stat().st_size > 10_000


@pytest.mark.usefixtures("_forked_runs")
def test_an_active_run_takes_every_command(elsewhere: CommandLine) -> None:
    """`examples/arithmetic.yaml`, in processes; it is paused while it is only looked at."""
    start, *commands = commands_of("test_an_active_run_takes_every_command")
    elsewhere.name = "arithmetic"
    unhurried = f"rewards.functions={UNHURRIED_DIGITS}"
    settings = ("run.steps=100000", f"run.directory={elsewhere.runs}", unhurried, *FEW)
    process = _begin(start.replace("examples", EXAMPLES), *settings)
    elsewhere.started.append(process)
    elsewhere.wait_for_steps(1)
    followers: list[subprocess.Popen[str]] = []
    words = {"RUN": "arithmetic", "N": "2", "KEY": "trainer.learning_rate", "VALUE": "1e-5"}
    for form in [one for command in commands for one in forms(command, **words)]:
        if form.startswith(("asyncrl watch", "asyncrl logs -f")):
            followers.append(_begin(form))
            elsewhere.started.append(followers[-1])
        else:
            _takes_effect(form, typed(form), elsewhere)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    for follower in followers:
        shown, _ = follower.communicate(timeout=120)
        assert follower.returncode == 0, shown
        assert shown.strip()
    rates = [step.learning.learning_rate for step in elsewhere.metrics()]
    assert (rates[0], rates[-1]) == (2.0e-4, 1e-5)


def _takes_effect(command: str, said: str, run: CommandLine) -> None:
    """What it says has happened, or happens within minutes."""
    before = run.steps()
    if " pause" in command:
        assert "the generators pause" in said
    elif " resume" in command:
        until(lambda: run.steps() > before + 1, seconds=200, what="two more steps")
    elif " checkpoint" in command:
        assert "is on the disk" in said
        assert list((run.folder / "checkpoints").glob("step-*"))
    elif " report" in command:
        assert (run.folder / "report.html").stat().st_size > 10_000
    elif " web" in command:
        assert "http://127.0.0.1:" in said
    elif " --json" in command:
        assert json.loads(said)["phase"] == "training"
    elif " scale" in command:
        until(lambda: len(run.children("generator")) == 2, seconds=200, what="another generator")
    else:
        assert said.strip(), command


def _begin(command: str, *settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        of_shell(command, *settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("name", ["calculator", "guessing", "code_repair", "lora"])
def test_an_example_trains(name: str, in_threads: CommandLine) -> None:
    """Two steps, started in another folder; environments have their processes.

    `agent_openai` does so in processes of its own, in the checkout (`test_end_to_end`).
    """
    listed = commands_of("test_an_example_trains")
    command = f"asyncrl run examples/{name}.yaml"
    assert command in listed
    few = (*FEW, *FEWER) if name == "code_repair" else FEW
    said = typed(command.replace("examples", EXAMPLES), "run.steps=2", *few, *ALL_GROUPS)
    assert "Traceback" not in said
    in_threads.name = name.replace("_", "-")
    trained_two_steps(in_threads.folder)
    for more in listed:
        if f" {name}" in more and more != command:
            assert typed(more).strip()
    exports = sorted(path.name for path in (in_threads.folder / "exports").glob("*"))
    assert len(exports) == (2 if name == "lora" else 0), exports


def test_a_model_is_warmed_up_and_trained_on(in_threads: CommandLine) -> None:
    """Two steps of supervised fine-tuning, and two of RL from there."""
    first, *_, again, then = commands_of("test_a_model_is_warmed_up_and_trained_on")
    few = (*SMALL, "run.directory=runs")
    said = typed(first.replace("examples", EXAMPLES), *few, "sft.epochs=1")
    assert "2 steps of 32 examples" in said
    assert "dry run" in typed(f"{again.replace('examples', EXAMPLES)} --clean --dry-run", *few)
    warm = then.replace("step-000064", "step-000002").replace("examples", EXAMPLES)
    typed(warm, "run.steps=2", *FEW, *ALL_GROUPS)
    trained_two_steps(in_threads.runs / "arithmetic")


@pytest.mark.parametrize(
    "command", commands_of("test_an_example_of_an_algorithm_trains"), ids=lambda one: Path(one).stem
)
def test_an_example_of_an_algorithm_trains(command: str, in_threads: CommandLine) -> None:
    """Two steps, with a reward that the untrained model gets."""
    Path("digits.py").write_text(DIGITS)
    settings = ("run.steps=2", *FEW, "rewards.functions=[{name: digits.py:digits}]")
    typed(command.replace("examples", EXAMPLES), *settings)
    folder = in_threads.runs / Path(command).stem.replace("_", "-")
    trained_two_steps(folder)
    learning = [step.learning for step in read_metrics(folder / "metrics.jsonl")]
    assert all(one.reward_mean != 0 and one.grad_norm > 0 for one in learning)


def test_a_run_of_ones_own_from_its_first_file_to_its_model(
    in_threads: CommandLine, models: Path
) -> None:
    """`asyncrl init` to `asyncrl export`. What was said already is not said again."""
    (model,) = (models / "asyncrl").glob("arithmetic-*")
    Path("my-model").symlink_to(model)
    short = (*FEW, "engine.max_model_len=512")  # what the small model reads
    given, steps = set[str](), 0
    for command in commands_of("test_a_run_of_ones_own_from_its_first_file_to_its_model"):
        shown = command.replace("/models/my-model", "my-model").replace("--step 50", "--step 2")
        stand = {"CONFIG": "run.yaml", "RUN": "first", "NAME": "first", "STEP": "2"}
        for form in forms(shown, **stand, MODEL="my-model", arithmetic="first", second="trial"):
            if form in given:
                continue
            given.add(form)
            if form.startswith("python"):
                _run_module(form)
                continue
            is_run = " run " in form and "--explain" not in form and "--dry-run" not in form
            if is_run and "trial" not in form:
                steps += 1
                assert typed(form, *FEW, f"run.steps={steps}")
                found = read_metrics(in_threads.runs / "first" / "metrics.jsonl")
                assert [step.step for step in found] == list(range(steps)), form
            else:
                said = typed(form, *(FEW if is_run else short if " eval " in form else ()))
                assert said.strip(), form
    assert steps == 4
    assert (in_threads.runs / "trial" / "report.html").stat().st_size > 10_000
    assert len(list((in_threads.runs / "first" / "exports").iterdir())) == 2


def _run_module(command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command.split()[1:]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_hunt_of_the_page(in_threads: CommandLine, tmp_path: Path) -> None:
    """docs/environments.md, from three files to a trained run, and the same as an agent program."""
    rows, run, samples, agent = commands_of("test_the_hunt_of_the_page")
    page = ROOT / "docs" / "environments.md"
    for file, language, holds in (
        ("hunt.py", "python", "class Hunt"),
        ("run.yaml", "yaml", "name: hunt"),
        ("agent.py", "python", "def play"),
    ):
        (text,) = [one for one in blocks(page, language) if holds in one]
        (tmp_path / file).write_text(text)
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", rows], env=os.environ | {"PATH": search}, check=True)
    typed(run, "run.steps=2", *FEW, *ALL_GROUPS)
    trained_two_steps(in_threads.runs / "hunt")
    assert "guess the number" in typed(samples)
    typed(agent, "run.steps=2", *FEW, *ALL_GROUPS)
    trained_two_steps(in_threads.runs / "hunt-agent")


def test_the_example_of_ones_own_takes_a_mapping(
    in_threads: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, run, short = commands_of("test_the_example_of_ones_own_takes_a_mapping")
    model = str(tmp_path / "tiny-llama")
    _python, script, _place = make.split()
    monkeypatch.setattr(sys, "argv", [script, model])
    runpy.run_path(str(ROOT / script), run_name="__main__")
    assert short == run.replace("--set model.path=/tmp/tiny-llama ", "")
    run = run.replace("/tmp/tiny-llama", model).replace("examples/", f"{EXAMPLES}/")  # noqa: S108
    typed(run, "run.steps=2", *ALL_GROUPS)
    trained_two_steps(in_threads.runs / "your-own")


def test_what_starts_no_run(
    elsewhere: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert elsewhere
    monkeypatch.setenv("HOME", str(tmp_path))
    for command in commands_of("test_what_starts_no_run"):
        few = " --steps 2 --slots 8" if " simulate" in command else ""
        few += "" if "--generators" in command or not few else " --generators 2"  # not the usual 64
        place = command.replace("examples", EXAMPLES).replace("~", str(tmp_path))
        if "~" in command:
            (tmp_path / "agents.key").unlink()
        assert typed(f"{place}{few}").strip()
    assert (tmp_path / "agents.key").stat().st_mode & 0o777 == 0o600
