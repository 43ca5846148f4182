"""The models and samples of the comparison, and what they cost by arithmetic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

GROUP_SIZE = 8


@dataclass(frozen=True)
class Workload:
    """A model and the samples of one step."""

    name: str
    vocabulary: int
    hidden: int
    layers: int
    prompt: int
    """Tokens of each prompt."""
    longest: int
    """Tokens of the longest response."""
    tokens: int
    """Of all samples, prompts included, about."""

    @property
    def intermediate(self) -> int:
        """Width of the MLP, 8/3 of the hidden size."""
        return self.hidden * 8 // 3

    @property
    def heads(self) -> int:
        """Of 64 numbers each; a third of them for keys and values."""
        return self.hidden // 64

    def write(self, folder: Path, seed: int) -> None:
        """Save the model, random, and the samples: prompts, responses, log-probabilities, rewards.

        Lengths of responses are lognormal, as they are in training: most are a fraction of the
        longest, and one is cut off there.
        """
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=self.vocabulary,
                hidden_size=self.hidden,
                intermediate_size=self.intermediate,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=max(1, self.heads // 3),
                head_dim=64,
                max_position_embeddings=self.prompt + self.longest,
                tie_word_embeddings=True,
                eos_token_id=None,
                bos_token_id=None,
            )
        )
        model.save_pretrained(folder)
        rng = np.random.default_rng(seed)
        groups: list[dict[str, Any]] = []
        while sum(map(_tokens, groups)) < self.tokens:
            lengths = rng.lognormal(np.log(0.3 * self.longest), 0.8, GROUP_SIZE)
            if not groups:
                lengths[0] = self.longest
            groups.append(
                {
                    "prompt": rng.integers(0, self.vocabulary, self.prompt).tolist(),
                    "responses": [
                        rng.integers(0, self.vocabulary, count).tolist()
                        for count in np.clip(lengths, 8, self.longest).astype(int)
                    ],
                    "rewards": rng.integers(0, 2, GROUP_SIZE).tolist(),
                }
            )
            groups[-1]["rewards"][0], groups[-1]["rewards"][1] = 0, 1  # every group has a signal
        (folder / "samples.json").write_text(json.dumps({**asdict(self), "groups": groups}))


def _tokens(group: dict[str, Any]) -> int:
    return sum(len(one) + len(group["prompt"]) for one in group["responses"])


@dataclass(frozen=True)
class Costs:
    """What the samples of a step cost, by arithmetic."""

    tokens: int
    """Prompts and responses, as users count them: each sample with its prompt."""
    flops: float
    """Forward and backward pass of real tokens, those that a group shares once. 6 a parameter and
    token, 6 a number of the head and response token, causal attention. Nothing for padding or
    for what is computed again."""
    padded: int
    """Tokens of groups that are padded to their longest sample."""


def costs_of(workload: Workload, groups: Sequence[dict[str, Any]]) -> Costs:
    hidden, size = workload.hidden, 64
    kv = max(1, workload.heads // 3)
    layer = hidden * size * (2 * workload.heads + 2 * kv) + 3 * hidden * workload.intermediate
    flops, tokens, padded = 0.0, 0, 0
    for group in groups:
        prompt = len(group["prompt"])
        lengths = [len(one) for one in group["responses"]]
        row = prompt + sum(lengths)
        tokens += prompt * len(lengths) + sum(lengths)
        padded += (prompt + max(lengths)) * len(lengths)
        pairs = prompt**2 / 2 + sum(one * prompt + one**2 / 2 for one in lengths)
        attention = 12 * workload.heads * size * pairs
        flops += workload.layers * (6 * layer * row + attention)
        flops += 6 * hidden * workload.vocabulary * sum(lengths)
    return Costs(tokens, flops, padded)
