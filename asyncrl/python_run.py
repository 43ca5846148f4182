"""A run that is started from Python: `Run(config, rewards=[f], callbacks=[c]).start()`.

    caller ── asyncrl run RUN/python/config.yaml --end-with CALLER ──► the run, a child process
      ▲                                                                 │
      └── its lines; metrics.jsonl, evaluations.jsonl, samples.jsonl ◄──┘

The child has its own session and ends when the caller does. The configuration, and functions that
are not in a module, stay in RUN/python/, so the run can also be resumed on the command line.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.effects import load_users_config, refuse_without_effect
from asyncrl.config.run_config import RunConfig, dump_config, parse_config
from asyncrl.errors import Interrupted, RunFailed, UserError
from asyncrl.monitoring.records.metrics_log import read_evaluations, read_metrics
from asyncrl.monitoring.sinks.follow import Follower, SinkState
from asyncrl.monitoring.sinks.process import numbers_of_step
from asyncrl.runs.directory import FROM_PYTHON, read_state, refuse_unfit
from asyncrl.steering.control_socket import ask, order
from asyncrl.suggestions import nearest
from asyncrl.user_code.source_text import importable_name, source_text
from asyncrl.wire.errors import NoReply
from asyncrl.wire.messages import control
from asyncrl.wire.records.evaluations import EvaluationRecord
from asyncrl.wire.records.step import RunResult, StepMetrics

CALLBACKS = ("on_start", "on_step", "on_evaluation", "on_samples", "on_end")
POLL_SECONDS = 0.25
_OF_TERMINALS = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Variables by which Jupyter makes programs take a file for a terminal."""
_ERROR = "error: "
"""The beginning of the last paragraph of a command that fails."""


@dataclass(frozen=True, slots=True)
class Result:
    """A run that has ended in order: all its steps are done, or it was stopped."""

    folder: Path
    summary: RunResult
    """The contents of result.json."""

    @property
    def metrics(self) -> Any:
        """The numbers of each step, named as in W&B: a DataFrame, or dicts without pandas."""
        steps = read_metrics(self.folder / "metrics.jsonl")
        rows = [{"step": one.step, **numbers_of_step(one)} for one in steps]
        try:
            import pandas as pd  # type: ignore[import-untyped]
        except ImportError:
            return rows
        return pd.DataFrame(rows or {"step": []}).set_index("step")

    @property
    def evaluations(self) -> list[EvaluationRecord]:
        """The evaluations in order."""
        return read_evaluations(self.folder / "evaluations.jsonl")


class Run:
    """A run with the caller's reward functions and callbacks.

    `config` is the path of a YAML file, a dict of its form, or a `RunConfig`. `rewards` replace
    `rewards.functions`: functions, names of functions, or dicts with `name` (either of them),
    `weight` and `args`. Raises UserError for mistakes in any of them.

    Callbacks have some of these methods, which are called in this process: `on_start()` when the
    run answers, `on_step(metrics)`, `on_evaluation(result)`, `on_samples(samples)` with those that
    the run records, and `on_end(result)`. An exception stops the run in order; `start` raises it.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | RunConfig,
        *,
        rewards: Iterable[Callable[..., Any] | str | Mapping[str, Any]] = (),
        callbacks: Iterable[object] = (),
    ) -> None:
        self.config = _checked_config(config)
        self._cwd = Path.cwd()
        self.folder = self._cwd / self.config.directory
        self._callbacks = [_checked_callback(one) for one in callbacks]
        self._texts: dict[str, str] = {}
        if functions := [self._entry(one) for one in rewards]:
            values = self.config.model_dump(mode="json")
            values["rewards"]["functions"] = functions
            self.config = parse_config(values, source="the configuration with these rewards")
        self._child: _Child | None = None
        self._background: Future[Result] | None = None

    def start(self, *, resume: bool = False, clean: bool = False) -> Result:
        """Train to the end, print the run's lines, call the callbacks, and return the result.

        `resume` continues the run of this name, `clean` deletes it first. Ctrl-C finishes the step
        and ends the run in order, a second one ends it at once (KeyboardInterrupt). Raises
        UserError for a mistake, RunFailed if the run failed, and what a callback raised.
        """
        refuse_unfit(self.config, resume=resume, clean=clean)
        self._write_files()
        config = str(self.config.directory / FROM_PYTHON / "config.yaml")
        command = ["run", config, *["--resume"] * resume, *["--clean"] * clean]
        with tempfile.TemporaryFile() as output:
            child = self._child = _Child(command, self._cwd, output.fileno())
            following = _Following(self.folder, child, self._callbacks, resumes=resume)
            with self._handling_ctrl_c():
                following.follow()
        child.refuse_failed()
        summary = (self.folder / "result.json").read_bytes()
        result = Result(self.folder, msgspec.json.decode(summary, type=RunResult))
        following.call("on_end", result)
        return result

    def begin(self, *, resume: bool = False, clean: bool = False) -> None:
        """Do what `start` does, callbacks included, in another thread, and return at once.

        So the next cells of a notebook can steer the run. `wait` returns its result.
        """
        starting = partial(self.start, resume=resume, clean=clean)
        self._background = ThreadPoolExecutor(1, "asyncrl-run").submit(starting)
        self._background.add_done_callback(_say_failed)

    def wait(self) -> Result:
        """Wait for a run that `begin` began; Ctrl-C and exceptions are those of `start`."""
        if self._background is None:
            raise UserError("wait() waits for a run that begin() began; start() does both")
        with self._handling_ctrl_c():
            return self._background.result()

    def pause(self) -> str:
        """Stop generating tokens, while the run trains.

        Each order returns a sentence about its effect. It may come from callbacks, other threads,
        and after `begin` from anywhere. Raises UserError if it is refused.
        """
        return self._order(control.PauseRequest())

    def resume(self) -> str:
        """Continue after `pause`."""
        return self._order(control.ResumeRequest())

    def set(self, key: str, value: bool | float | str | None) -> str:
        """Change a setting that may change while the run trains (docs/operate.md lists them)."""
        return self._order(control.SetRequest(key, json.dumps(value)))

    def stop(self) -> str:
        """Finish the current step, write a checkpoint, end the run; `start` returns its result."""
        return self._order(control.StopRequest())

    def _order(self, request: control.Request) -> str:
        return str(_outside_loops(partial(order, self.folder, request)))

    def _entry(self, reward: Any) -> dict[str, Any]:
        """Return an entry of `rewards.functions`; keep the text of a function without a module."""
        entry = dict(reward) if isinstance(reward, Mapping) else {"name": reward}
        function = entry.get("name")
        if not callable(function):
            return entry
        name = importable_name(function)
        if name is None:
            text, called = source_text(function), function.__name__
            again = sum(one.startswith(f"reward_{called}.") for one in self._texts)
            file = f"reward_{called}.{again}.py" if again else f"reward_{called}.py"
            self._texts[file] = text
            name = f"{self.folder / FROM_PYTHON / file}:{called}"
        return entry | {"name": name}

    def _write_files(self) -> None:
        """Write the configuration and the functions, as private as the run's folder is."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        mode, folder = self.folder.stat().st_mode & 0o777, self.folder / FROM_PYTHON
        folder.mkdir(mode, exist_ok=True)
        for name, text in (self._texts | {"config.yaml": dump_config(self.config)}).items():
            (folder / name).touch(mode & 0o666)
            (folder / name).write_text(text, encoding="utf-8")

    @contextlib.contextmanager
    def _handling_ctrl_c(self) -> Iterator[None]:
        """Pass Ctrl-C on to the run; once that has ended it is the caller's."""

        def pass_on(_number: int, _frame: object) -> None:
            if self._child is None or self._child.process.poll() is not None:
                raise KeyboardInterrupt
            self._child.interrupt()

        with contextlib.ExitStack() as closing:
            if threading.current_thread() is threading.main_thread():
                before = signal.signal(signal.SIGINT, pass_on)
                closing.callback(signal.signal, signal.SIGINT, before)
            yield


class _Child:
    """The process of a command, whose output goes to the file `output`."""

    def __init__(self, command: list[str], cwd: Path, output: int) -> None:
        ends = ["--end-with", str(os.getpid())] if sys.platform == "linux" else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", *command, *ends],
            cwd=cwd,
            env={name: one for name, one in os.environ.items() if name not in _OF_TERMINALS},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.interrupts = 0
        self._output, self._read, self._error = output, 0, ""

    def interrupt(self) -> None:
        """Do what Ctrl-C does."""
        self.interrupts += 1
        self.process.send_signal(signal.SIGINT)

    def print_new(self, *, ended: bool) -> None:
        """Print new whole lines, at the end all, but for the error, which comes last."""
        size = os.fstat(self._output).st_size
        data = os.pread(self._output, size - self._read, self._read)
        whole = data if ended else data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        text = self._error + whole.decode(errors="replace")
        place = f"\n{text}".find(f"\n{_ERROR}")
        lines, self._error = (text, "") if place < 0 else (text[:place], text[place:])
        if lines:
            print(lines, end="", flush=True)

    def refuse_failed(self) -> None:
        """Raise the error of a process that has ended with one."""
        code = self.process.returncode
        if code == Interrupted.exit_code:
            raise KeyboardInterrupt
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        message = self._error.removeprefix(_ERROR).strip() or f"the run's process {how}"
        if code:
            raise UserError(message) if code == UserError.exit_code else RunFailed(message)


@dataclass(slots=True)
class _Following:
    """Passes the records of a run on to callbacks while its process lives."""

    folder: Path
    child: _Child
    callbacks: list[object]
    resumes: bool
    follower: Follower | None = None

    def follow(self) -> None:
        """Follow the run to its end. Then raises what a callback raised, after which it stops."""
        raised: BaseException | None = None
        ended = False
        while not ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.process.wait(POLL_SECONDS)
            ended = self.child.process.poll() is not None
            try:
                self.child.print_new(ended=ended)
                if raised is None:
                    self._look()
            except BaseException as error:  # noqa: BLE001 - raised after the end
                raised = raised or error
                if not self.child.interrupts:  # a second one would end it at once
                    self.child.interrupt()
        if raised is not None:
            raise raised

    def call(self, method: str, *arguments: object) -> None:
        """Call a method of each callback that has it."""
        for callback in self.callbacks:
            getattr(callback, method, lambda *_arguments: None)(*arguments)

    def _look(self) -> None:
        if self.follower is None:
            self.follower = self._begun()
            if self.follower is None:
                return
            self.call("on_start")
        state, news = self.follower.state, self.follower.news()
        records: list[StepMetrics | EvaluationRecord] = [*news.steps, *news.evaluations]
        for one in sorted(records, key=lambda record: record.time):
            state.had(one)
            self.call("on_step" if isinstance(one, StepMetrics) else "on_evaluation", one)
        for sample in news.samples:
            state.had(sample)
        if news.samples:
            self.call("on_samples", news.samples)

    def _begun(self) -> Follower | None:
        """Return a reader of the records of this start, once the run answers."""
        state = read_state(self.folder)
        if state is None or state.pid != self.child.process.pid or not state.control_address:
            return None
        with contextlib.suppress(UserError, NoReply):
            _outside_loops(partial(ask, self.folder, control.StatusRequest()))
            since = SinkState(step_time=state.started, evaluation_time=state.started)
            follower = Follower(self.folder, since)
            if self.resumes:
                follower.skip_samples()
            return follower
        return None


def _checked_config(config: str | Path | Mapping[str, Any] | RunConfig) -> RunConfig:
    if isinstance(config, str | Path):
        return load_users_config(Path(config))
    source = "the configuration"
    if not isinstance(config, RunConfig):
        config = parse_config(config, source=source)
    refuse_without_effect(config, source)
    return config


def _checked_callback(callback: object) -> object:
    """Refuse a callback without a method that is called, or with another `on_...` method."""
    own = [name for name in dir(callback) if name.startswith("on_")]
    unknown = [name for name in own if name not in CALLBACKS]
    if unknown or not own:
        what = f"{unknown[0]!r}, which is never called" if unknown else "no method of a callback"
        hint = nearest(unknown[0], CALLBACKS) if unknown else f" Known: {', '.join(CALLBACKS)}."
        raise UserError(f"callbacks: {callback!r} has {what}.{hint}")
    return callback


def _outside_loops(call: Callable[[], Any]) -> Any:
    """Call what runs an event loop: the thread of a notebook's cells has one already."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(call).result()


def _say_failed(run: Future[Result]) -> None:
    if (error := run.exception()) is not None:
        print(f"the run ended, and wait() raises why: {error}", flush=True)
