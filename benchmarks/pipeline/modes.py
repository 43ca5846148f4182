"""The modes of benchmarks.pipeline, which differ in settings only, and how much is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.run_config import load_config
from asyncrl.errors import ConfigError

CONFIG = Path(__file__).with_name("pipeline.yaml")
RUNAHEAD_STEPS = 3
"""Whole steps that `verify + run-ahead` may run ahead. `verify` has the default, two."""

SYNC, KEEP_4, VERIFY, RUN_AHEAD = "sync", "keep(4)", "verify", "verify + run-ahead"


@dataclass(frozen=True)
class Mode:
    """One way to overlap generation and training."""

    name: str
    settings: tuple[str, ...]
    """`--set` values on top of `CONFIG`."""

    @property
    def slug(self) -> str:
        """The name as it appears in the names of runs."""
        kept = "".join(c if c.isalnum() else "-" for c in self.name)
        return "-".join(part for part in kept.split("-") if part)

    def missing(self) -> str | None:
        """Why the mode is not supported, None if it is."""
        try:
            load_config(CONFIG, self.settings)
        except ConfigError as error:
            return str(error).splitlines()[-1].strip()
        return None


def _mode(name: str, on_update: str, bound: int, *more: str) -> Mode:
    common = (f"scheduler.on_update={on_update}", f"scheduler.max_off_policy_steps={bound}")
    return Mode(name, (*common, *more))


def modes() -> tuple[Mode, ...]:
    """All modes, in the order in which they run."""
    groups = load_config(CONFIG).scheduler.groups_per_step
    return (
        _mode(SYNC, "keep", 0),
        _mode("keep(1)", "keep", 1),
        _mode(KEEP_4, "keep", 4),
        _mode("recompute(1)", "recompute", 1),
        _mode(VERIFY, "verify", 0),
        _mode(RUN_AHEAD, "verify", 0, f"scheduler.max_runahead_groups={RUNAHEAD_STEPS * groups}"),
    )


@dataclass(frozen=True)
class Effort:
    steps: int
    seeds: tuple[int, ...]
    intermediate_size: int
    """Size of the MLPs of the widened model."""
    evaluated: int
    """Held-out prompts of an evaluation, one sample each."""
    left_out_first: int = 10
    """Steps at the start that are not timed, while the pipeline and the caches fill."""
    left_out_last: int = 5
    """Steps at the end that are not timed: nothing runs ahead for steps that do not exist."""
    more: tuple[str, ...] = ()
    """Further settings of all runs."""
    prompts: int = 24
    """With whose samples the costs of decoding and scoring are measured."""
    turn_seconds: float = 0.5
    """Of a turn in which two processes slow each other down."""
    timeout_seconds: float = 1800.0
    """Longest time of one run."""

    @property
    def window(self) -> tuple[int, int]:
        """The first timed step and the first step after the timed ones."""
        return self.left_out_first, self.steps - self.left_out_last


SMOKE = Effort(
    steps=3, seeds=(0,), intermediate_size=320, evaluated=4, left_out_first=1, left_out_last=1,
    prompts=2, turn_seconds=0.01,
    more=("sampling.max_tokens=8", "scheduler.groups_per_step=2", "scheduler.group_size=4"),
)  # fmt: skip
QUICK = Effort(steps=50, seeds=(0,), intermediate_size=12_000, evaluated=256)
FULL = Effort(steps=160, seeds=(0, 1, 2), intermediate_size=12_000, evaluated=512)
