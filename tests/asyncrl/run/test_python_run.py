"""`from asyncrl import Run`: whole runs, and what a stand-in for the child process shows."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from asyncrl_runs import ROOT
from shown_commands import blocks
from step_records import full_step
from tiny_warm_start import place_untrained

from asyncrl import Result, Run, python_run
from asyncrl.config.run_config import RunConfig, load_config
from asyncrl.errors import ConfigError, RewardError, RunFailed, UserError
from asyncrl.runs.directory import RunState, read_state
from asyncrl.tasks.builtin.warm_start_recipe import RECIPE

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
SMALL = {
    '"steps": 40': '"steps": 6',
    '"group_size": 8, "groups_per_step": 16': '"group_size": 4, "groups_per_step": 4',
    '"max_tokens": 48': '"max_tokens": 8',
    '"prompts": 64, "samples": 4': '"prompts": 4, "samples": 1',
    "    numbers =": "    import time\n\n    time.sleep(0.05)\n    numbers =",
    "metrics.step == 20": "metrics.step == 0",
    "callbacks=[LowersTheRate()]": "callbacks=[LowersTheRate(), seen]",
}
"""Changes of the notebook's code for a test; its rewards leave time for orders."""


class Seen:
    """A callback that notes its calls and gives orders."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.orders: list[str] = []
        self.run: Run | None = None

    def on_start(self) -> None:
        self.calls.append(("start",))

    def on_step(self, metrics: Any) -> None:
        self.calls.append(("step", metrics.step, metrics.learning.learning_rate))
        if metrics.step == 0 and self.run is not None:
            run = self.run
            self.orders = [run.pause(), run.resume()]

    def on_evaluation(self, result: Any) -> None:
        self.calls.append(("evaluation", result.when, result.sets["held_out"].samples))

    def on_samples(self, samples: Any) -> None:
        self.calls += [("sample", one.step, one.evaluation) for one in samples]

    def on_end(self, result: Any) -> None:
        self.calls.append(("end", result.summary.steps))


def code_of_the_notebook() -> str:
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return "\n\n".join("".join(one["source"]) for one in cells if one["cell_type"] == "code")


@pytest.mark.slow
@pytest.mark.usefixtures("_forked_runs")
def test_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = code_of_the_notebook()
    [shown] = [
        one for one in blocks(ROOT / "docs" / "your-own.md", "python") if "import Run" in one
    ]
    # Blank lines around a class differ: a cell is formatted alone.
    page, cells = (re.sub(r"\n{2,}", "\n\n", one.strip()) for one in (shown, code))
    assert page == cells, "the page shows the notebook"
    for before, after in SMALL.items():
        assert before in code
        code = code.replace(before, after)
    place_untrained(tmp_path / "cache", RECIPE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    script, seen = tmp_path / "cells.py", Seen()
    script.write_text(code.replace("result =", "seen.run = run\nresult =", 1))
    names = runpy.run_path(str(script), {"seen": seen}, "__main__")

    folder, result = tmp_path / "runs" / "notebook", names["result"]
    assert result.folder == names["run"].folder == folder
    assert result.summary.steps == 6
    assert [*result.metrics.index] == [*range(6)]
    assert [*result.metrics["batch/samples"]] == [16.0] * 6
    assert [one.when for one in result.evaluations] == ["before", "after"]
    # The callbacks, in their order, and their orders.
    kinds = [one for one in seen.calls if one[0] != "sample"]
    assert kinds[:2] == [("start",), ("evaluation", "before", 4)]
    assert [one[1] for one in kinds[2:8]] == [*range(6)]
    assert [kinds[2][2], kinds[7][2]] == [2e-4, 1e-4]
    assert kinds[8:] == [("evaluation", "after", 4), ("end", 6)]
    assert {("sample", 0, "held_out"), ("sample", 0, ""), ("sample", 5, "")} <= {*seen.calls}
    assert [one.split(" (")[0] for one in seen.orders] == [
        "notebook: the generators pause",
        "notebook: the generators continue",
    ]
    # The lines of the run, and what the next command needs.
    printed = capfd.readouterr().out
    assert "\nnotebook: 6/6 steps | reward " in printed
    assert printed.rstrip().endswith("report: runs/notebook/report.html")
    text = (folder / "python" / "reward_score.py").read_text()
    assert text.startswith("from __future__ import annotations\n\nimport re\n\ndef score(")
    [function] = load_config(folder / "config.yaml").rewards.functions
    assert function.name == f"{folder}/python/reward_score.py:score"
    modes = {one.stat().st_mode & 0o077 for one in (folder / "python").glob("*.*")}
    assert modes == {0}


STAND_IN = """#!{python}
import os, signal, sys, time
from pathlib import Path
END = int(os.environ.get("END", 0))
signal.signal(signal.SIGINT, lambda *_: print("stopping", flush=True) or sys.exit(END))
print("training", os.environ.get("FORCE_COLOR"), flush=True)
(Path(sys.argv[4]).parents[1] / "words").write_text(" ".join(sys.argv[1:]) + f" {{os.getsid(0)}}")
exec(Path("stand_in.py").read_text())
"""
"""A program that is started instead of this interpreter; it has the command's words."""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says what the child does; the run's records are there already."""
    program = tmp_path / "python"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(python_run.sys, "executable", str(program))
    monkeypatch.setattr(python_run, "POLL_SECONDS", 0.01)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter does
    monkeypatch.chdir(tmp_path)
    started = python_run._Following._begun
    monkeypatch.setattr(python_run, "ask", lambda run, request: None)

    def begun(self: Any) -> Any:
        if not (self.folder / "words").exists():
            return None
        state = RunState(self.child.process.pid, control_address="ipc:///", started=1.0)
        (self.folder / "run.json").write_bytes(msgspec.json.encode(state))
        return started(self)

    monkeypatch.setattr(python_run._Following, "_begun", begun)
    file = tmp_path / "stand_in.py"
    file.write_text("time.sleep(60)")
    return file


class Raises:
    def on_step(self, metrics: Any) -> None:
        raise LookupError("of a callback")


def with_a_step(stand_in: Path) -> None:
    """A child that records a step once it runs and then goes on."""
    step = msgspec.json.encode(full_step()).decode()
    stand_in.write_text(
        f"(Path(sys.argv[4]).parents[1] / 'metrics.jsonl').write_text({step!r} + chr(10))\n"
        "time.sleep(60)"
    )


def test_an_exception_of_a_callback_stops_the_run_in_order_and_is_raised(
    stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_a_step(stand_in)
    run = Run({}, callbacks=[Raises()])
    with pytest.raises(LookupError, match="of a callback"):
        run.start()
    assert capsys.readouterr().out == "training None\nstopping\n", "it was interrupted, once"
    *words, session = (run.folder / "words").read_text().split()
    assert words[:4] == ["-m", "asyncrl", "run", "runs/run/python/config.yaml"]
    assert words[4:] == ["--end-with", str(os.getpid())]
    assert int(session) != os.getsid(0)


@pytest.mark.usefixtures("stand_in")
def test_ctrl_c_goes_to_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Presses:
        def on_start(self) -> None:
            signal.raise_signal(signal.SIGINT)
            seen.append("not interrupted")

    seen: list[str] = []
    monkeypatch.setenv("END", "130")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Run({}, callbacks=[Presses()]).start()
    assert seen == ["not interrupted"]
    assert capsys.readouterr().out == "training None\nstopping\n"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("ends", "kind", "said"),
    [
        ("print('error: no model\\nat all'); sys.exit(2)", UserError, r"^no model\nat all$"),
        ("print('error: it broke'); sys.exit(1)", RunFailed, "^it broke$"),
        ("sys.exit(3)", RunFailed, "ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", RunFailed, "was ended by signal 9"),
    ],
)
def test_the_error_of_the_run_is_raised(
    stand_in: Path, ends: str, kind: type[Exception], said: str
) -> None:
    stand_in.write_text(ends)
    with pytest.raises(kind, match=said):
        Run({}).start()


def test_a_run_in_the_background_is_waited_for(
    stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Where:
        def on_step(self, metrics: Any) -> None:
            seen.append(threading.current_thread().name)
            raise LookupError("of a callback")

    seen: list[str] = []
    with_a_step(stand_in)
    run = Run({}, callbacks=[Where()])
    with pytest.raises(UserError, match=r"begin\(\) began"):
        run.wait()
    run.begin()
    with pytest.raises(LookupError, match="of a callback"):
        run.wait()
    assert seen == ["asyncrl-run_0"]
    assert "wait() raises why: of a callback" in capsys.readouterr().out


def test_a_resumed_run_shows_only_what_is_new(stand_in: Path) -> None:
    encode, replace = msgspec.json.encode, msgspec.structs.replace
    seen, folder = Seen(), stand_in.parent / "runs" / "run"
    folder.mkdir(parents=True)
    steps = replace(full_step(), step=4, time=0.5), replace(full_step(), step=4, time=2.0)
    (folder / "metrics.jsonl").write_bytes(b"".join(encode(one) + b"\n" for one in steps))
    (folder / "words").touch()
    child: Any = SimpleNamespace(process=SimpleNamespace(pid=1))
    following = python_run._Following(folder, child, [seen], resumes=True)
    following._look()
    following._look()
    assert [one[:2] for one in seen.calls] == [("start",), ("step", 4)]


def test_metrics_without_pandas_are_dicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result(tmp_path, None)  # type: ignore[arg-type]
    assert [*result.metrics.index] == [], "a run without a step"
    step = full_step()
    (tmp_path / "metrics.jsonl").write_bytes(msgspec.json.encode(step) + b"\n")
    frame = result.metrics
    monkeypatch.setitem(sys.modules, "pandas", None)
    [row] = result.metrics
    assert row["step"] == step.step == frame.index[0]
    assert row["learning/reward_mean"] == step.learning.reward_mean
    assert row["learning/reward_mean"] == frame["learning/reward_mean"].iloc[0]


def test_orders_work_where_a_loop_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in the cells of a notebook; a run that is not active is named."""

    async def cell() -> None:
        with pytest.raises(UserError, match="is not active"):
            Run({"run": {"directory": str(tmp_path)}}).stop()

    asyncio.run(cell())


def test_a_configuration_is_a_file_a_dict_or_typed(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: {name: mine}\n")
    configs = [
        Run(one).config for one in (file, str(file), {"run": {"name": "mine"}}, load_config(file))
    ]
    assert configs == [configs[0]] * 4
    assert isinstance(configs[0], RunConfig)
    with pytest.raises(ConfigError, match=r"the configuration does not describe a run:\n  enginee"):
        Run({"enginee": {}})
    with pytest.raises(ConfigError, match="settings without effect"):
        Run({"cache": {"lenience": 2.0}})


def test_rewards_are_functions_names_or_entries() -> None:
    from asyncrl.rewards.functions import exact_match

    def score(prompt: str, response: str, example: Any) -> float:
        return 1.0

    def captures(prompt: str, response: str, example: Any) -> float:
        return score(prompt, response, example)

    other, one = score, {"name": exact_match, "weight": 0.5, "args": {"ignore_case": True}}
    run = Run({}, rewards=[score, "math_verify", one, other])
    functions = run.config.rewards.functions
    place = Path.cwd() / "runs" / "run" / "python"
    assert [one.name for one in functions] == [
        f"{place}/reward_score.py:score",
        "math_verify",
        "asyncrl.rewards.functions:exact_match",
        f"{place}/reward_score.1.py:score",
    ]
    assert functions[2].weight == 0.5
    with pytest.raises(ConfigError, match=r"rewards.functions.0.wait|wait"):
        Run({}, rewards=[{"name": score, "wait": 1}])
    with pytest.raises(RewardError, match="reward 'captures' captures 'score'"):
        Run({}, rewards=[captures])


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("on_steps", r"has 'on_steps', which is never called. Did you mean 'on_step'\?"),
        ("step", "has no method of a callback. Known: on_start, on_step, on_evaluation"),
    ],
)
def test_a_callback_that_would_never_be_called_is_refused(method: str, said: str) -> None:
    callback = type("Mine", (), {method: lambda self: None})()
    with pytest.raises(UserError, match=said):
        Run({}, callbacks=[callback])


def test_a_name_in_use_is_refused_before_anything_is_written(stand_in: Path) -> None:
    folder = stand_in.parent / "runs" / "run"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {name: run}\n")
    with pytest.raises(UserError, match="'run' is in use"):
        Run({}).start()
    assert not (folder / "python").exists()
    assert read_state(folder) is None
