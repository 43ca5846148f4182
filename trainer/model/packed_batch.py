"""Sequences of a micro-batch in one row, and which of their tokens are scored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.rollout.contexts import contexts_of
from asyncrl.rollout.trajectory import BoolArray, IntArray, Trajectory
from asyncrl.trainer.model.packing import Family, Layout
from asyncrl.trainer.model.token_batch import to_device


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """B sequences (prompt + response) in one row of T tokens, N of which are scored.

    Response tokens that a policy drew are scored. Observed ones are only in the row; the head is
    not computed for them. A prompt that consecutive sequences share is in the row once.
    """

    tokens: Tensor
    layout: Layout
    predictors: Tensor
    """`[N]` int64: position in the row whose hidden state predicts each scored token."""
    targets: Tensor
    """`[N]` int64."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[tuple[IntArray, IntArray]],
        device: torch.device,
        trained: Sequence[BoolArray] | None = None,
    ) -> PackedBatch:
        """Pack (prompt `[P]`, response `[L]`) pairs in order; P and L at least 1.

        The last response token predicts nothing, so the row lacks it. A prompt that consecutive
        pairs share comes once, before their responses. `trained` `[L]` selects the scored tokens of
        each response, by default all.
        """
        families: list[Family] = []
        rows: list[IntArray] = []
        predictors: list[NDArray[np.int64]] = []
        start = 0
        for prompt, alike in groupby_prompt(sequences):
            shared = len(prompt) if len(alike) > 1 else 0
            families.append(Family(len(alike), shared))
            before = start + len(prompt) - 1
            if shared:
                rows.append(prompt)
                start += shared
            for response in alike:
                if not shared:
                    rows.append(prompt)
                    start += len(prompt)
                    before = start - 1
                rows.append(response[:-1])
                places = np.arange(start - 1, start + len(response) - 1)
                places[0] = before
                predictors.append(places)
                start += len(response) - 1
        lengths = [len(prompt) + len(response) - 1 for prompt, response in sequences]
        targets = [response for _, response in sequences]
        masks = [slice(None)] * len(targets) if trained is None else trained
        return cls(
            tokens=to_device(np.concatenate(rows).astype(np.int64), device)[None, :],
            layout=Layout.of(lengths, device, families),
            predictors=to_device(_joined(predictors, masks), device),
            targets=to_device(_joined(targets, masks), device),
        )

    @classmethod
    def of_samples(
        cls, trajectories: Sequence[Trajectory], device: torch.device, *, one_more: bool = False
    ) -> PackedBatch:
        """Pack the contexts of samples, in order; `one_more` as in `contexts_of`."""
        contexts = [c for one in trajectories for c in contexts_of(one, one_more=one_more)]
        pairs = [(one.prompt, one.response) for one in contexts]
        return cls.of(pairs, device, [one.trained for one in contexts])


def _joined(parts: Sequence[NDArray[Any]], masks: Sequence[BoolArray | slice]) -> NDArray[np.int64]:
    chosen = [part[mask] for part, mask in zip(parts, masks, strict=True)]
    found: NDArray[np.int64] = np.concatenate(chosen).astype(np.int64)
    return found


def groupby_prompt(
    sequences: Sequence[tuple[IntArray, IntArray]],
) -> Iterator[tuple[IntArray, list[IntArray]]]:
    """Group consecutive sequences by equal prompts, with their responses."""
    first, alike = sequences[0][0], [sequences[0][1]]
    for prompt, response in sequences[1:]:
        if np.array_equal(prompt, first):
            alike.append(response)
        else:
            yield first, alike
            first, alike = prompt, [response]
    yield first, alike
