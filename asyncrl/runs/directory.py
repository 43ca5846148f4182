"""The folder of a run, `runs/NAME/`: its files, and which process may write to it.

config.yaml       the resolved configuration
processes.jsonl   the processes that the controller has started, to end them if it is killed
run.json          the state of the run: process id, addresses, accuracy before, how it ended
control.key       the key of `asyncrl status|stop|...`, mode 0600
web.token         the token of orders on the web page, mode 0600
checkpoints/      step-000010/, ... only whole ones; set-aside/ has those that a resume left behind
metrics.jsonl     one line per optimizer step
orders.jsonl      what the user has changed while the run was active (`asyncrl scale`)
unfinished/       run-ahead that was not delivered, by checkpoint and generator
logs/             one file per process
timeline/         what each process did when, one file per process
slots/            what each generator's slots were used for
engine/           each engine's counters over time
evaluations.jsonl a line per evaluation of the held-out prompts
sinks/            what W&B, TensorBoard and MLflow keep here (monitoring.sinks)
samples.jsonl     a few trajectories for the report
recent/           a few trajectories of each recent step, one file per generator
samples/          every trained sample (run.log_samples)
cache/            the generators' rollout caches, for a resumed run
python/           the configuration and functions of a run that Python started (`asyncrl.Run`)
result.json       the result, for scripts
report.html       the result, for people
"""

import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, Self

import msgspec

from asyncrl.config.effects import OF_RL
from asyncrl.config.run_config import RunConfig, dump_config, load_config
from asyncrl.errors import UserError
from asyncrl.launch.identity import status_of
from asyncrl.monitoring.records.jsonl import read_undamaged
from asyncrl.mutability import RULES, fixed_difference, value_of
from asyncrl.runs import failed_starts, folder_lock
from asyncrl.runs.input_files import RunInputs
from asyncrl.runs.resuming import find_resume_point
from asyncrl.runs.runtime_folders import Folder, clear_leftovers
from asyncrl.secret_files import take_permissions_of
from asyncrl.suggestions import command_for, written
from asyncrl.trainer.checkpoint.format.files import ResumePoint
from asyncrl.trainer.checkpoint.trainer_lease import fenced, raise_fence
from asyncrl.wire.records.step import StepMetrics
from asyncrl.wire.records.wrong_policy import TokenizerDigest
from asyncrl.wire.transport.atomic_files import write_atomically

logger = logging.getLogger(__name__)

FROM_PYTHON = "python"
"""A folder in the run's, which is written before the run begins."""

Ending = Literal["done", "stopped", "failed"]
"""The end of a run: all steps trained, stopped by the user, or with an error."""


class RunState(msgspec.Struct):
    """The contents of run.json: what other commands need to know about a run."""

    pid: int
    kind: Literal["rl", "sft"] = "rl"
    examples: str = ""
    """Digest of the examples of a run of `asyncrl sft`."""
    control_address: str = ""
    """Address at which the controller answers `asyncrl status|stop|pause|resume`."""
    accuracy_before: float | None = None
    """Held-out accuracy before training, 0 to 1; measured once, kept by a resumed run."""
    evaluation_samples: int = 0
    ended: Ending | None = None
    """None while the run is active, or if its controller was killed."""
    started: float = 0.0
    """Time of this start of the run, in seconds since 1970; 0 if unknown."""
    start: int = 0
    """0 for the first start, else a random number of this start, on which seeds depend."""
    metrics_ports: dict[str, int] = {}
    trace_key: str = ""
    """Drawn at the run's first start. Ids of traces depend on it (`monitoring.tracing`)."""
    web: str = ""
    tokenizer: TokenizerDigest | None = None
    """Digest of the tokenizer of the run's prompts at its first start."""
    inputs: RunInputs | None = None
    """Digests of rows and functions at its last start; None for runs of older versions."""
    comparable: bool = True
    """True if held-out rows and functions are still those of the first start."""


@dataclass(eq=False)
class RunDirectory:
    """One run's folder, opened for writing by the controller of the run, by `create`."""

    path: Path
    state: RunState
    _lock: int
    resume_point: ResumePoint
    """The point from which the run continues; for a new run, step 0 without a checkpoint."""
    fence: str
    """The token of its next trainer (`asyncrl.trainer.checkpoint.trainer_lease`)."""
    _previous_config: str | None

    def __post_init__(self) -> None:
        self.folder = Folder.at(self.path)
        """The folder that the path led to when the run began."""

    def close(self) -> None:
        """Release the folder's lock."""
        os.close(self._lock)

    def undo(self) -> Path | None:
        """Restore the folder after a user's mistake before the first checkpoint.

        The folder of a new run is removed or, if logs exist, moved aside
        (`asyncrl.runs.failed_starts`). A resumed run gets its configuration back. A new run that
        already has a checkpoint stays unchanged. Return the folder moved aside, if any.
        """
        if self._previous_config is not None:
            write_atomically(self.path / "config.yaml", self._previous_config)
        elif not any((self.path / "checkpoints").iterdir()):
            return failed_starts.set_aside(self.path)
        return None

    @classmethod
    def create(
        cls,
        config: RunConfig,
        *,
        resume: bool,
        clean: bool,
        resume_from: int | None = None,
        say: Callable[[str], None] = logger.warning,
    ) -> Self:
        """Make the folder of a new run, or open the one of a run to resume.

        Leftovers of a killed controller of the run are ended and removed first, with a message by
        `say`. A run is resumed from its newest whole checkpoint, or from the one after
        `resume_from` steps; all checks precede changes to its files. Raises AsyncrlError if a
        leftover process does not end; UserError as `refuse_unfit`, or without a usable checkpoint.
        """
        path = config.directory
        refuse_unfit(config, resume=resume, clean=clean)
        point = ResumePoint()
        previous = (path / "config.yaml").read_text(encoding="utf-8") if resume else None
        was_there = path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        take_permissions_of(path)
        try:
            lock = folder_lock.take(path)
        except folder_lock.UnlockableError:
            if not was_there:
                path.rmdir()
            raise
        if lock is None:  # another process was faster
            _refuse_active(path)
        try:
            _clear_after_earlier(path, config.run.name, say)
            if clean:
                _empty(path)
            fence = ""
            if resume:  # only now does nothing else write checkpoints, on no machine
                with fenced(path) as fence:
                    point = find_resume_point(path, config, resume_from)
                (path / "result.json").unlink(missing_ok=True)
        except BaseException:
            os.close(lock)
            raise
        for folder in ("checkpoints", "logs", "timeline"):
            (path / folder).mkdir(exist_ok=True)
        write_atomically(path / "config.yaml", dump_config(config))
        state = _new_state(path, resume=resume)
        return cls(path, state, lock, point, fence or raise_fence(path), previous)

    def write_state(self) -> None:
        """Replace run.json by `state`. A failure is logged, and the next call tries again."""
        try:
            write_atomically(self.path / "run.json", msgspec.json.encode(self.state).decode())
        except OSError as error:
            logger.warning("cannot write %s: %s", self.path / "run.json", error.strerror)

    def begin_with(self, inputs: RunInputs, *, comparable: bool) -> None:
        """Record this start's inputs; `comparable`: accuracies mean the same as before."""
        self.state.inputs = inputs
        if not comparable:
            self.state.comparable = False
            self.state.accuracy_before = None

    def write_config(self, config: RunConfig) -> None:
        """Replace config.yaml. A failure is only logged, since orders.jsonl has the changes."""
        try:
            write_atomically(self.path / "config.yaml", dump_config(config))
        except OSError as error:
            logger.warning("cannot write %s: %s", self.path / "config.yaml", error.strerror)

    def write_result(self, result: msgspec.Struct) -> None:
        """Write result.json. Raises OSError."""
        text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode()
        write_atomically(self.path / "result.json", text + "\n")


def may_be_resumed(config: RunConfig) -> bool:
    """Return True if a run of this name was begun; it may be active."""
    return (config.directory / "config.yaml").exists()


def is_complete(config: RunConfig) -> bool:
    """Return True if a run of this name has trained all these steps and is not active.

    With `run.epochs`, which `prepare` turns into steps, it is not known yet: False.
    """
    path = config.directory
    state = read_state(path)
    if config.run.epochs or state is None or state.ended != "done" or is_alive(path):
        return False
    return load_config(path / "config.yaml").run.steps >= config.run.steps


def refuse_unfit(config: RunConfig, *, resume: bool, clean: bool) -> None:
    """Check that a run can begin, or be resumed, in its folder. Changes nothing.

    Raises UserError if it cannot under these settings, OSError if the folder cannot be read.
    """
    path = config.directory
    is_run = (path / "config.yaml").exists()
    used = is_run or _has_files(path)
    if used and not is_run:
        raise UserError(
            f"{path} exists and is not the folder of a run. Move it away, or choose another name "
            "with --set run.name=NAME"
        )
    if used and is_alive(path):
        _refuse_active(path)
    if used and not resume and not clean:
        raise UserError(
            f"the run name {config.run.name!r} is in use ({path} exists). Resume that run with "
            "--resume, delete it with --clean, or choose another name with --set run.name=NAME"
        )
    if resume:
        if not is_run:
            raise UserError(f"there is no run to resume at {path}; start it without --resume")
        _refuse_if_different(path, config)
        _refuse_unreadable_records(path)


def _has_files(path: Path) -> bool:
    """Return True if a folder has more than a start leaves that is killed before config.yaml."""
    before = path / FROM_PYTHON
    return path.is_file() or any(
        entry.name != folder_lock.NAME and not entry.name.startswith(".config.yaml.")
        for entry in path.rglob("*")
        if (not entry.is_dir() or entry.is_symlink()) and before not in entry.parents
    )


def _clear_after_earlier(path: Path, name: str, say: Callable[[str], None]) -> None:
    state = read_state(path) or RunState(0)
    clear_leftovers(path, name=name, pid=state.pid, control_address=state.control_address, say=say)


def _empty(path: Path) -> None:
    """Delete the contents of a run's folder, except its lock, which is held, and its inputs."""
    for entry in path.iterdir():
        if entry.name in (folder_lock.NAME, FROM_PYTHON):
            continue
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _new_state(path: Path, *, resume: bool) -> RunState:
    state = RunState(
        os.getpid(),
        trace_key=secrets.token_hex(8),
        started=time.time(),  # noqa: TID251 - tells which run was started last
    )
    if not resume:
        return state
    state.start = 1 + secrets.randbits(62)
    previous = read_state(path)
    if previous is not None:
        state.inputs = previous.inputs
        state.comparable = previous.comparable
        state.accuracy_before = previous.accuracy_before
        state.evaluation_samples = previous.evaluation_samples
        state.tokenizer = previous.tokenizer
        state.trace_key = previous.trace_key or state.trace_key
    return state


def read_state(path: Path) -> RunState | None:
    """Return the state of the run in this folder; None if run.json is missing or damaged."""
    try:
        return msgspec.json.decode((path / "run.json").read_bytes(), type=RunState)
    except (FileNotFoundError, msgspec.DecodeError, ValueError, RecursionError):
        return None


def find_run(name: str | None, directory: Path, *, may_be_supervised: bool = False) -> Path:
    """Return a run's folder by name or path, by default the last started.

    Raises UserError if there is none, or if it is one of `asyncrl sft`, unless it may be.
    """
    path = _find_run(name, directory)
    if not may_be_supervised and is_supervised(path):
        raise UserError(
            f"{path} is a run of supervised fine-tuning, which `asyncrl list`, `status`, `logs`, "
            "`eval` and `export` know. It has no report, page or orders: its numbers are in "
            "metrics.jsonl, evaluations.jsonl and monitoring.sinks; Ctrl-C or SIGTERM ends it"
        )
    return path


def is_supervised(path: Path) -> bool:
    """Return True for a folder of `asyncrl sft`."""
    state = read_state(path)
    return state is not None and state.kind == "sft"


def _find_run(name: str | None, directory: Path) -> Path:
    if name is not None:
        for candidate in (Path(name), directory / name):
            if (candidate / "config.yaml").exists():
                return candidate
    runs = sorted(
        (path for path in directory.glob("*/config.yaml") if not failed_starts.is_one(path.parent)),
        key=lambda path: _started(path.parent),
    )
    if name is None and runs:
        return runs[-1].parent
    known = ", ".join(path.parent.name for path in runs) or "none yet"
    wanted = "no run" if name is None else f"no run {name!r}"
    raise UserError(
        f"there is {wanted} in {directory} (runs there: {known}); --runs names another folder"
    )


def _started(path: Path) -> float:
    """Return the time of a run's last start. `asyncrl set` writes config.yaml later."""
    try:
        state = read_state(path)
        return state.started if state and state.started else (path / "config.yaml").stat().st_mtime
    except OSError:  # not readable: another user's
        return 0.0


def is_alive(path: Path) -> bool:
    """Return True if the run's controller holds the folder's lock. Raises OSError."""
    return folder_lock.is_held(path)


def _refuse_active(path: Path) -> NoReturn:
    state = read_state(path)
    process = "" if state is None else f" (process {state.pid})"
    how = f"`{command_for('stop', path)}`"
    if state is not None and state.kind == "sft":
        how = f"`kill {state.pid}`, after its step"
    status = None if state is None else status_of(state.pid)
    if state is not None and status is not None and status.is_stopped:
        raise UserError(
            f"the run in {path} is suspended: its controller{process} was stopped. Continue it "
            f"with `kill -CONT {state.pid}`, or end it with `kill -KILL {state.pid}`"
        )
    raise UserError(
        f"the run in {path} is active{process}; watch it with `{command_for('status', path)}`, "
        f"or end it with {how}"
    )


def _refuse_unreadable_records(path: Path) -> None:
    """Refuse, before any change, to resume a run whose steps are all unreadable."""
    metrics = path / "metrics.jsonl"
    if not metrics.exists():
        return
    readable, damaged = read_undamaged(metrics, StepMetrics)
    if damaged and not readable:
        raise UserError(
            f"{metrics}, line {damaged[0].line}: {damaged[0].reason}. No line of it can be read, "
            "so the run cannot be resumed; perhaps an earlier version of asyncrl wrote it. "
            f"Start a new run from its newest model with --set model.path={path}/checkpoints/STEP"
        )


def _refuse_if_different(path: Path, config: RunConfig) -> None:
    previous = load_config(path / "config.yaml").model_dump(mode="json")
    current = config.model_dump(mode="json")
    tasks, day = (previous["task"], current["task"]), "chat_template_date"
    for one in tasks if None in (one[day] for one in tasks) else ():
        one[day] = None  # only one of the two sets it
    for unread in OF_RL if is_supervised(path) else ("sft",):
        section, _, name = unread.partition(".")
        for one in (previous, current):
            (one.get(section) or {}).pop(name, None) if name else one.pop(section, None)
    key = fixed_difference(previous, current)
    if key is not None:
        before, now = value_of(previous, key), value_of(current, key)
        raise UserError(
            f"cannot resume {path}: {key} was {written(before)} and is now {written(now)}: "
            f"{RULES[key].reason}. Change it back, or start a new run under another name"
        )
