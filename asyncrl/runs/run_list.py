"""Lists the runs of a folder (`asyncrl list`), and finds the run of an order without a name."""

import contextlib
from pathlib import Path

import msgspec

from asyncrl.config.yaml_text import read_yaml
from asyncrl.errors import ConfigError, UserError
from asyncrl.monitoring.records.jsonl import read_tail, read_undamaged
from asyncrl.runs import failed_starts
from asyncrl.runs.directory import find_run, is_alive, is_supervised, read_state
from asyncrl.wire.records.evaluations import EvaluationRecord, newest_of
from asyncrl.wire.records.step import StepMetrics


def find_run_for_order(name: str | None, directory: Path) -> Path:
    """Return the folder of the named run, or of the only active one. Raises UserError."""
    if name is not None:
        return find_run(name, directory)
    active = sorted(
        path.parent
        for path in directory.glob("*/run.json")
        if _is_alive(path.parent) and not is_supervised(path.parent)
    )
    if len(active) > 1:
        names = ", ".join(path.name for path in active)
        raise UserError(
            f"{len(active)} runs in {directory} are active: {names}. Name one, as in "
            f"`asyncrl stop {active[0].name}`"
        )
    return active[0] if active else find_run(None, directory)


def _is_alive(path: Path) -> bool:
    with contextlib.suppress(OSError):  # of another user
        return is_alive(path)
    return False


_TAIL_BYTES = 1 << 18


class ListedRun(msgspec.Struct, frozen=True):
    """One run, for people and scripts."""

    name: str
    state: str
    """active, done, stopped, failed, killed, or unreadable (a folder of another user)."""
    step: int
    steps: int | None
    reward: float | None
    """Mean of the last step's samples."""
    accuracy_before: float | None
    accuracy_after: float | None
    evaluated: EvaluationRecord | None
    """The evaluation of the newest trained step that has an accuracy."""
    changed: float
    """Time of the last change of its records, in seconds since 1970."""
    loss: float | None = None
    """The last step's loss in supervised fine-tuning."""
    held_out_losses: tuple[float, ...] = ()
    """The losses of its evaluations, in order."""

    @property
    def progress(self) -> str:
        """Trained and planned steps: `4 of 20`."""
        return str(self.step) if self.steps is None else f"{self.step} of {self.steps}"

    @property
    def course_of_loss(self) -> str:
        """`held-out loss 2.31 → 1.87`, or the last step's loss."""
        found = self.held_out_losses
        if not found:
            return "" if self.loss is None else f"loss {self.loss:.4f}"
        return "held-out loss " + " → ".join(
            f"{one:.4f}" for one in dict.fromkeys(found[:: len(found) - 1 or 1])
        )


class _Result(msgspec.Struct, frozen=True):
    accuracy_after: float | None = None


def list_runs(runs: Path) -> list[ListedRun]:
    """Return the runs in a folder, the last changed first."""
    folders = {path.parent for path in runs.glob("*/config.yaml")}
    found = [_listed_or_not(path) for path in folders if not failed_starts.is_one(path)]
    return sorted(found, key=lambda run: run.changed, reverse=True)


def _listed_or_not(path: Path) -> ListedRun:
    """List one run; one that cannot be read does not prevent the listing of the others."""
    try:
        return listed(path)
    except OSError:
        changed = 0.0
        with contextlib.suppress(OSError):
            changed = path.stat().st_mtime
        return ListedRun(path.name, "unreadable", 0, None, None, None, None, None, changed)


def listed(path: Path) -> ListedRun:
    """List one run. Raises OSError."""
    metrics, state = path / "metrics.jsonl", read_state(path)
    steps = read_tail(metrics, StepMetrics, _TAIL_BYTES)
    if not steps and metrics.exists():  # its last lines are damaged, or very long
        steps = read_undamaged(metrics, StepMetrics)[0]
    newest = metrics if metrics.exists() else path / "config.yaml"
    evaluations = read_tail(path / "evaluations.jsonl", EvaluationRecord, _TAIL_BYTES)
    is_supervised = state is not None and state.kind == "sft"
    losses = [one.main.loss for one in evaluations if one.main is not None]
    return ListedRun(
        name=path.name,
        state="active" if is_alive(path) else (state and state.ended) or "killed",
        step=steps[-1].step + 1 if steps else 0,
        steps=_planned(path),
        reward=steps[-1].learning.reward_mean if steps and not is_supervised else None,
        accuracy_before=None if state is None else state.accuracy_before,
        accuracy_after=_accuracy_after(path),
        evaluated=newest_of(evaluations),
        changed=newest.stat().st_mtime,
        loss=steps[-1].learning.loss if steps and is_supervised else None,
        held_out_losses=tuple(one for one in losses if one is not None),
    )


def _planned(path: Path) -> int | None:
    try:
        steps = read_yaml(path / "config.yaml")["run"]["steps"]
    except (ConfigError, OSError, LookupError, TypeError):
        return None
    return steps if isinstance(steps, int) else None


def _accuracy_after(path: Path) -> float | None:
    try:
        return msgspec.json.decode((path / "result.json").read_bytes(), type=_Result).accuracy_after
    except (OSError, msgspec.DecodeError):
        return None
