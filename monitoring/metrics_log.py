"""`metrics.jsonl`: one line per optimizer step, readable while the run goes on.

A resumed run trains steps again that came after its last checkpoint, and appends. Readers take
the last account of each step; what an abandoned future wrote is left out:

    >>> keep_last_account([{"step": 0}, {"step": 1}, {"step": 2}, {"step": 1, "loss": 0.5}])
    [{'step': 0}, {'step': 1, 'loss': 0.5}]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from monitoring.jsonl import JsonlWriter, read_jsonl

MetricsRow = dict[str, Any]
"""Name to number (None where it was not finite). `step` is always there; the rest may be missing:

time (unix seconds), wall_seconds, reward_mean, reward_std, loss, grad_norm, entropy, clip_ratio,
kl, staleness_mean, staleness_max, tokens, response_length_mean, tokens_generated, tokens_drafted,
tokens_accepted, tokens_verified, tokens_rejected (these five cumulative), mismatch_abs_mean,
learning_rate, step_seconds, train_seconds, wait_seconds, generator_idle, trainer_idle,
tokens_per_second.
"""


class MetricsLog:
    """Append a line per step to `path`."""

    def __init__(self, path: Path) -> None:
        self._writer = JsonlWriter(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one step's numbers. Raises ValueError when `step` is not an integer."""
        if not isinstance(row.get("step"), int):
            raise ValueError(f"a line of metrics needs an integer `step`; got {row.get('step')!r}")
        self._writer.append([dict(row)])

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._writer.close()


def read_metrics(path: Path) -> list[MetricsRow]:
    """The last account of each step, in order; empty when the file does not exist yet.

    Raises:
        RecordError: a line other than a cut last one cannot be decoded.
    """
    try:
        rows = read_jsonl(path, dict[str, Any])
    except FileNotFoundError:
        return []
    return keep_last_account(rows)


def keep_last_account(rows: Iterable[MetricsRow]) -> list[MetricsRow]:
    """Leave out rows of steps that a later row goes back to or before; rows without a step too."""
    kept: list[MetricsRow] = []
    for row in rows:
        step = row.get("step")
        if not isinstance(step, int):
            continue
        while kept and kept[-1]["step"] >= step:
            kept.pop()
        kept.append(row)
    return kept
