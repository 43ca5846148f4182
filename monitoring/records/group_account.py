"""Checks that a run trained on each group exactly once or reported it failed.

`python -m asyncrl.monitoring.records.group_account RUN` reads the run's metrics.jsonl and exits
with 1 if a group was lost or trained on twice. A resumed run drops the records of the steps that it
repeats, so the account is over the steps that led to the current policy.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from asyncrl.monitoring.errors import RecordError
from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.wire.records.step import GroupTotals, StepMetrics


class GroupAccount(NamedTuple):
    """Fates of the groups of all steps up to the last recorded one. Tuples ascend."""

    trained: int
    """Groups trained on, repetitions included."""
    failed: tuple[int, ...]
    lost: tuple[int, ...]
    """Groups neither trained on nor reported."""
    twice: tuple[int, ...]
    """Groups named more than once, as trained on or left out."""
    without_signal: int = 0

    @property
    def is_exact(self) -> bool:
        """True if each group was trained on exactly once or reported failed."""
        return not self.lost and not self.twice


def account_of(steps: Sequence[StepMetrics], groups_per_step: int | None) -> GroupAccount:
    """Account for the groups of steps 0 to the last recorded one; a missing step's are lost.

    `groups_per_step` is None with `scheduler.dynamic_sampling`: the last record has the number.
    """
    trained = [group for step in steps for group in step.groups.trained]
    failed = [group for step in steps for group in step.groups.failed]
    without = [group for step in steps for group in step.groups.without_signal]
    seen = Counter([*trained, *failed, *without])
    end = 0
    if steps:
        last = steps[-1]
        end = last.groups.end if groups_per_step is None else groups_per_step * (last.step + 1)
    expected = range(end)
    return GroupAccount(
        trained=len(trained),
        failed=tuple(sorted(failed)),
        without_signal=len(without),
        lost=tuple(group for group in expected if group not in seen),
        twice=tuple(sorted(group for group, times in seen.items() if times > 1)),
    )


def totals_of(steps: Sequence[StepMetrics]) -> GroupTotals:
    """Count the groups that these steps have settled."""
    return GroupTotals(
        trained=sum(len(step.groups.trained) for step in steps),
        failed=sum(len(step.groups.failed) for step in steps),
        without_signal=sum(len(step.groups.without_signal) for step in steps),
    )


def read_account(run: Path) -> GroupAccount:
    """Account for a run's folder. Raises RecordError; OSError or ValueError for config.yaml."""
    path = run / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        scheduler = config["scheduler"]
        groups_per_step: int | None = int(scheduler["groups_per_step"])
        if scheduler.get("dynamic_sampling", {}).get("enabled", False):
            groups_per_step = None
    except (yaml.YAMLError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"{path} lacks a number for scheduler.groups_per_step") from error
    return account_of(read_metrics(run / "metrics.jsonl"), groups_per_step)


def main(arguments: Sequence[str]) -> int:
    """Print the account of the run in the given folder; 0 if it is exact, 1 if not, 2 on misuse."""
    if len(arguments) != 1:
        usage = "usage: python -m asyncrl.monitoring.records.group_account RUN_FOLDER"
        print(usage, file=sys.stderr)
        return 2
    try:
        account = read_account(Path(arguments[0]))
    except (RecordError, OSError, ValueError) as error:
        print(f"error: cannot read the groups of {arguments[0]}: {error}", file=sys.stderr)
        return 2
    print(f"trained on: {account.trained} groups, each once: {'no' if account.twice else 'yes'}")
    if account.without_signal:
        print(f"without signal: {account.without_signal}")
    for name in ("failed", "lost", "twice"):
        groups = getattr(account, name)
        print(f"{name}: {len(groups)}" + (f" {list(groups)}" if groups else ""))
    return 0 if account.is_exact else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
