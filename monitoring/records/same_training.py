"""Checks that two runs trained on the same samples and have the same weights, bit for bit.

`python -m asyncrl.monitoring.records.same_training RUN OTHER` compares the records of all steps
without what depends on the clock, and the weights of the checkpoints that both have. It exits with
1 at the first difference. Runs with `run.repeatable: true` and equal settings are the same.
"""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.monitoring.errors import RecordError
from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.wire.records.step import StepMetrics

_CLOCKS = (
    *("time", "wall_seconds", "step_seconds", "engine_busy_seconds", "idle", "times"),
    "run_ahead",
)
_COUNTERS = ("tokens", "tokens_per_second", "noise_floor", "reward_failures", "environments")
TIMES = frozenset((*_CLOCKS, *_COUNTERS))
"""Fields of `StepMetrics` that depend on the clock. Counters do: generators report them twice a
second, and how much is drafted follows measured step times."""


def without_times(step: StepMetrics) -> bytes:
    """Encode a line of metrics.jsonl without the fields in `TIMES`."""
    fields = msgspec.structs.asdict(step).items()
    return msgspec.json.encode({name: value for name, value in fields if name not in TIMES})


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of weights and optimizer state in each checkpoint of a run's folder, by file."""
    files = sorted(run.glob("checkpoints/step-*/state/*.safetensors"))
    return {
        str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


def read_steps(run: Path) -> list[StepMetrics]:
    """Read the records of a run's folder. Raises ValueError if there are none."""
    steps = read_metrics(run / "metrics.jsonl")
    if not steps:
        raise ValueError(f"metrics.jsonl in {run} is missing or empty")
    return steps


def difference(run: Path, other: Path) -> str | None:
    """Describe the first difference between two runs. Raises RecordError, ValueError, OSError."""
    steps, others = read_steps(run), read_steps(other)
    for mine, theirs in zip(steps, others, strict=False):
        if without_times(mine) != without_times(theirs):
            names = [name for name in mine.__struct_fields__ if name not in TIMES]
            apart = [name for name in names if getattr(mine, name) != getattr(theirs, name)]
            return f"step {mine.step}: {', '.join(apart)} differ"
    if len(steps) != len(others):
        return f"{run} has {len(steps)} steps and {other} has {len(others)}"
    weights, other_weights = digests(run), digests(other)
    for file in sorted(weights.keys() & other_weights.keys()):
        if weights[file] != other_weights[file]:
            return f"{file}: the weights differ"
    return None


def main(arguments: Sequence[str]) -> int:
    """Compare two runs' folders; 0 if they are the same, 1 if not, 2 on misuse."""
    if len(arguments) != 2:
        usage = "python -m asyncrl.monitoring.records.same_training RUN_FOLDER OTHER_FOLDER"
        print(f"usage: {usage}", file=sys.stderr)
        return 2
    run, other = (Path(argument) for argument in arguments)
    try:
        found = difference(run, other)
        compared = len(read_steps(run))
    except (RecordError, ValueError, OSError) as error:
        print(f"error: cannot compare {run} and {other}: {error}", file=sys.stderr)
        return 2
    print(found or f"{compared} steps are the same, bit for bit, times aside")
    return 0 if found is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
