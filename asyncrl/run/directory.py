"""The folder of a run: `runs/NAME/`, what is in it, and who may use it.

config.yaml       the resolved configuration
run.json          the state of the run: process id, addresses, accuracy before, how it ended
checkpoints/      step-000010/, ... complete ones only
metrics.jsonl     one line per optimizer step
logs/             one file per process
timeline/         who did what when, one file per process
samples.jsonl     a few trajectories for the report
cache/            what generators drafted from, for a resumed run
result.json       the outcome, for scripts
report.html       the outcome, for people
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import yaml

from asyncrl.config import RunConfig, dump_config, parse_config
from asyncrl.errors import UserError
from monitoring.metrics_log import read_metrics
from monitoring.samples import read_samples

_FIXED = (
    ("run", "seed"),
    ("task",),
    ("model",),
    ("scheduler", "group_size"),
    ("scheduler", "groups_per_step"),
)
"""What a resumed run may not change: the data order and the model hang on it."""


class RunState(msgspec.Struct):
    """What `asyncrl status|stop|report` need to know of a run; kept in run.json."""

    pid: int
    control_address: str
    accuracy_before: float | None = None
    evaluation_samples: int = 0
    ended: str | None = None
    """None while it runs (or was killed); else how it ended."""
    metrics_ports: dict[str, int] = {}


class RunDirectory:
    """One run's folder, opened for writing by the process that runs it."""

    def __init__(self, path: Path, *, lock: int, earlier_config: str | None) -> None:
        self.path = path
        self._lock = lock
        self._earlier_config = earlier_config

    def close(self) -> None:
        """Let others have the folder."""
        os.close(self._lock)

    def undo(self) -> None:
        """Leave things as they were, after a mistake of the user's before the first checkpoint.

        A fresh run's folder goes; a resumed run gets its configuration back. A run that has a
        checkpoint is never touched.
        """
        if self._earlier_config is not None:
            write_atomically(self.path / "config.yaml", self._earlier_config)
        elif not any((self.path / "checkpoints").iterdir()):
            shutil.rmtree(self.path)

    @classmethod
    def create(cls, config: RunConfig, *, resume: bool, clean: bool) -> RunDirectory:
        """Make the folder, or take it over.

        Raises:
            UserError: the name is in use and neither `resume` nor `clean` was said, a run of that
                name is alive, there is nothing to resume, or the resumed run would differ.
        """
        path = config.directory
        used = (path / "config.yaml").exists() or (path.exists() and any(path.iterdir()))
        if used and is_alive(path):
            _refuse_live(path)
        if used and not resume and not clean:
            raise UserError(
                f"the run name {config.run.name!r} is in use ({path} exists). Go on with it with "
                "--resume, throw it away with --clean, or choose another name with "
                "--set run.name=NAME"
            )
        if resume:
            if not (path / "config.yaml").exists():
                raise UserError(f"there is no run to resume at {path}; start it without --resume")
            _refuse_if_different(path, config)
            (path / "result.json").unlink(missing_ok=True)
        elif used:
            if not (path / "config.yaml").exists():
                raise UserError(f"{path} is not the folder of a run; --clean leaves it alone")
            shutil.rmtree(path)
        earlier = (path / "config.yaml").read_text(encoding="utf-8") if resume else None
        for folder in ("checkpoints", "logs", "timeline"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        lock = _take_lock(path)
        if lock is None:  # somebody was faster
            _refuse_live(path)
        write_atomically(path / "config.yaml", dump_config(config))
        return cls(path, lock=lock, earlier_config=earlier)

    def read_state(self) -> RunState | None:
        """The state file, or None where there is none."""
        return read_state(self.path)

    def write_state(self, state: RunState) -> None:
        """Replace the state file."""
        write_atomically(self.path / "run.json", msgspec.json.encode(state).decode())

    def write_result(self, result: dict[str, Any]) -> Path:
        """Write result.json."""
        path = self.path / "result.json"
        write_atomically(path, json.dumps(result, indent=2) + "\n")
        return path

    def cut_records(self, *, before_step: int) -> None:
        """Drop lines of metrics and samples of steps that a resumed run will do again."""
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            rows = [row for row in read_metrics(metrics) if row.get("step", 0) < before_step]
            write_atomically(metrics, "".join(json.dumps(row) + "\n" for row in rows))
        samples = self.path / "samples.jsonl"
        if samples.exists():
            records = [record for record in read_samples(samples) if record.step < before_step]
            lines = [msgspec.json.encode(record).decode() + "\n" for record in records]
            write_atomically(samples, "".join(lines))


def read_state(path: Path) -> RunState | None:
    """The state of the run in this folder; None where there is none or it is cut off."""
    try:
        return msgspec.json.decode((path / "run.json").read_bytes(), type=RunState)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def find_run(name: str | None, directory: Path) -> Path:
    """The folder of a run by name or path; without a name the newest.

    Raises:
        UserError: there is none, with the names that there are.
    """
    if name is not None:
        for candidate in (Path(name), directory / name):
            if (candidate / "config.yaml").exists():
                return candidate
    runs = sorted(directory.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
    if name is None and runs:
        return runs[-1].parent
    known = ", ".join(path.parent.name for path in runs) or "none yet"
    wanted = "no run" if name is None else f"no run {name!r}"
    raise UserError(f"there is {wanted} in {directory} (runs there: {known})")


def is_alive(path: Path) -> bool:
    """Whether a process runs the run in this folder now: it holds the folder's lock."""
    lock = _take_lock(path)
    if lock is None:
        return True
    os.close(lock)
    return False


def _take_lock(path: Path) -> int | None:
    """An open descriptor that holds the folder's lock until closed; None when another has it.

    A lock of the kernel's ends with its process however that ends, and does not mistake another
    process of the same number for it, as a file with a process id would.
    """
    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that readers see the old or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _refuse_live(path: Path) -> NoReturn:
    state = read_state(path)
    process = "" if state is None else f" (process {state.pid})"
    raise UserError(
        f"the run in {path} is going on{process}; "
        f"watch it with `asyncrl status {path.name}`, end it with `asyncrl stop {path.name}`"
    )


def _refuse_if_different(path: Path, config: RunConfig) -> None:
    values = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    old = parse_config(values, source=str(path / "config.yaml")).model_dump(mode="json")
    new = config.model_dump(mode="json")
    for keys in _FIXED:
        before, now = old, new
        for key in keys:
            before, now = before[key], now[key]
        if before != now:
            raise UserError(
                f"cannot resume {path}: {'.'.join(keys)} was {before!r} and is now {now!r}; the "
                "order of the data hangs on it. Change it back, or start a run of another name"
            )
