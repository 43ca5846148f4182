"""What a run's folder says of its steps: samples, weights and moments by version, metrics.

The run must log its samples with their tokens and keep a checkpoint of every version.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from asyncrl.monitoring.records.trained_samples import TrainedSample, read_trained_samples


@dataclass(frozen=True, slots=True)
class Row:
    """A context: a sequence that the model has seen."""

    tokens: list[int]
    drawn: list[int]
    """Places of the drawn tokens, none of which is 0."""


class Sample:
    """A logged sample with what is derived of it; N is the number of its drawn tokens."""

    def __init__(self, record: TrainedSample) -> None:
        if record.prompt_tokens is None or record.response_tokens is None:
            raise ValueError("the samples lack their tokens: run.log_sample_tokens is off")
        self.record = record
        count = record.response_length
        self.drawn = np.ones(count, bool)
        for start, end in record.observed_at:
            self.drawn[start:end] = False
        versions = np.zeros(count, int)
        for one in record.segments:
            versions[one.start : one.end] = one.policy_version
        self.versions: NDArray[Any] = versions[self.drawn]
        """`[N]` policy version of each drawn token."""
        self.rows = self._rows(record.prompt_tokens, record.response_tokens)

    def __len__(self) -> int:
        return len(self.versions)

    @property
    def is_cut(self) -> bool:
        """Whether it did not end by itself."""
        return self.record.finish_reason in ("length", "deadline")

    @property
    def longest(self) -> int:
        """Longest context beyond the first prompt, as `sampling.max_tokens` counts."""
        own = self.record.prompt_length
        prompts = [row.drawn[0] if row.drawn else len(row.tokens) for row in self.rows]
        return max(
            max(0, prompt - own) + len(row.tokens) - prompt
            for prompt, row in zip(prompts, self.rows, strict=True)
        )

    def _bounds(self) -> tuple[list[int], list[int]]:
        contexts = list(self.record.contexts)
        return [0, *contexts], [*contexts, self.record.response_length]

    def _rows(self, prompt: list[int], response: list[int]) -> list[Row]:
        rows = []
        for start, end in zip(*self._bounds(), strict=True):
            before = [] if start else prompt
            places = len(before) + np.flatnonzero(self.drawn[start:end])
            rows.append(Row([*before, *response[start:end]], places.tolist()))
        return rows


class Folder:
    """A finished run's. Attributes: `config`, `metrics` by step, `samples`, `initial`."""

    def __init__(self, path: Path, initial: Path) -> None:
        self._path, self.initial = path, initial
        self.config: dict[str, Any] = yaml.safe_load((path / "config.yaml").read_text())
        lines = (path / "metrics.jsonl").read_text().splitlines()
        self.metrics: dict[int, dict[str, Any]] = {
            one["step"]: one for one in map(json.loads, lines)
        }
        by_step: defaultdict[int, defaultdict[int, dict[int, Sample]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        for record in read_trained_samples(path / "samples"):
            group = by_step[record.step][record.group]
            assert record.sample not in group, f"{record.group}.{record.sample} is logged twice"
            group[record.sample] = Sample(record)
        self.samples = {
            step: {group: [found[i] for i in sorted(found)] for group, found in sorted(of.items())}
            for step, of in by_step.items()
        }
        """By step and group, ascending."""

    def state(self, version: int) -> dict[str, Tensor]:
        """Every tensor of a version's checkpoint by name; of version 0 the initial weights."""
        if version == 0:
            with safe_open(self.initial / "model.safetensors", framework="pt") as file:
                return {f"weights/policy/{k}": file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
        folder = self._path / "checkpoints" / f"step-{version:06d}" / "state"
        index = json.loads((folder / "index.json").read_text())["tensors"]
        found = {}
        for name, saved in index.items():
            whole = torch.empty(saved["shape"], dtype=getattr(torch, saved["dtype"]))
            for chunk in saved["chunks"]:
                with safe_open(folder / chunk["file"], framework="pt") as file:
                    part = file.get_tensor(chunk["key"])
                place = tuple(
                    slice(at, at + size)
                    for at, size in zip(chunk["offsets"], chunk["sizes"], strict=True)
                )
                whole[place] = part
            found[name] = whole
        return found
