"""Samples of several turns, with the sequences that a plain loop scores one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from plain_policies import Group, plain_logprobs, plain_model
from torch import Tensor

from asyncrl.rollout.trajectory import Provenance, SampleId, Segment, Trajectory

VOCAB = 32


class Row(NamedTuple):
    """A sequence that was generated in, and which tokens of its response were generated."""

    prompt: np.ndarray
    response: np.ndarray
    trained: np.ndarray


Rows = dict[SampleId, list[Row]]


def turn_batch(path: str, groups: int = 4, *, branches: bool = False) -> tuple[list[Group], Rows]:
    """Groups of a sample of one turn, two of several, and one of several or of two contexts.

    One of them has a prompt of its own. Log-probabilities of generated tokens are not far from the
    model's.
    """
    rng, model = np.random.default_rng(8), plain_model(path)
    batch: list[Group] = []
    rows: Rows = {}
    for group in range(groups):
        prompt = _some(rng, 2 + group)
        made = [
            [_row(rng, prompt, "g" * (3 + group))],
            [_row(rng, prompt, "ggooggg" + "oo" * (group % 2 + 1))],
            [_row(rng, _some(rng, 4), "gogo" + "og" * group)],
            [_row(rng, prompt, "gg" + "o" * group + "gg")],
        ]
        if branches:
            made[1].append(_row(rng, _some(rng, 3), "gogo"))
            made[3] += [_row(rng, _some(rng, 2 + group), "ggo"), _row(rng, prompt, "g")]
        samples = []
        for place, own in enumerate(made):
            sample = SampleId(group, place)
            rows[sample] = own
            samples.append(trajectory_of(sample, own, _near(model, own, rng)))
        batch.append((samples, rng.normal(size=4)))
    return batch, rows


def trajectory_of(sample: SampleId, rows: Sequence[Row], logprobs: np.ndarray) -> Trajectory:
    """The trajectory with these contexts; `logprobs` are of its generated tokens."""
    tokens, trained, contexts = [], [], []
    for index, row in enumerate(rows):
        if index:
            contexts.append(sum(map(len, tokens)))
            tokens.append(row.prompt)
            trained.append(np.zeros(len(row.prompt), bool))
        tokens.append(row.response)
        trained.append(row.trained)
    mask = np.concatenate(trained)
    behaviour = np.zeros(len(mask), np.float32)
    behaviour[mask] = logprobs
    return Trajectory(
        id=sample,
        prompt_id=f"p{sample.group}",
        prompt_tokens=rows[0].prompt,
        tokens=np.concatenate(tokens),
        behaviour_logprobs=behaviour,
        provenance=np.where(mask, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
        segments=(Segment(0, 0, len(mask)),),
        finish_reason="stop",
        contexts=tuple(contexts),
    )


def plain_scores(model: Any, rows: Sequence[Row]) -> Tensor:
    """Log-probabilities of the generated tokens, each sequence by itself."""
    return torch.cat([plain_logprobs(model, p, r)[torch.from_numpy(t)] for p, r, t in rows])


def trained_of(batch: Sequence[Group], rows: Rows) -> list[int]:
    """Generated tokens of each sample of the batch, by the rows."""
    return [sum(int(r.trained.sum()) for r in rows[one.id]) for group, _ in batch for one in group]


def _near(model: Any, rows: Sequence[Row], rng: np.random.Generator) -> np.ndarray:
    with torch.no_grad():
        own = plain_scores(model, rows).numpy()
    near: np.ndarray = np.minimum(own + rng.normal(0, 0.25, len(own)), -0.01).astype(np.float32)
    return near


def _row(rng: np.random.Generator, prompt: np.ndarray, marks: str) -> Row:
    return Row(prompt, _some(rng, len(marks)), np.array([mark == "g" for mark in marks]))


def _some(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, VOCAB, count).astype(np.int32)
