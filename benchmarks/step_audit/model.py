"""Policy and critic in float64 by plain transformers: padded rows, full logits, eager attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from benchmarks.step_audit.folder import Sample

Weights = Mapping[str, Tensor]


class Scores(NamedTuple):
    """Of the N drawn tokens of one sample."""

    logprobs: Tensor
    """`[N]` carries the gradient."""
    entropy: Tensor
    outside: Tensor
    """`[N]` bool: truncation leaves the drawn token out; it is added to the set."""


class Model:
    """Of one architecture; weights are given to each call, by their names in the model."""

    def __init__(self, path: Path, sampling: Mapping[str, Any]) -> None:
        self.module = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        self._sampling = sampling

    def scores(self, weights: Weights, samples: Sequence[Sample]) -> list[Scores]:
        """Of each sample, of the distribution that tokens are drawn from."""
        logits = _padded(self.module, weights, samples).logits
        out, at = [], 0
        for sample in samples:
            states, drawn = [], []
            for row in sample.rows:
                states += [logits[at, place - 1] for place in row.drawn]
                drawn += [row.tokens[place] for place in row.drawn]
                at += 1
            out.append(self._score(torch.stack(states), torch.tensor(drawn)))
        return out

    def values(
        self, weights: Weights, samples: Sequence[Sample]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Of each sample: `[N]` of the states that tokens are drawn in, and that after its end."""
        trunk = {k.removeprefix("trunk."): v for k, v in weights.items() if k.startswith("trunk.")}
        hidden = _padded(self.module.base_model, trunk, samples).last_hidden_state
        values = (hidden @ weights["head.weight"].T)[..., 0] + weights["head.bias"]
        own, ends, at = [], [], 0
        for sample in samples:
            states = []
            for row in sample.rows:
                states += [values[at, place - 1] for place in row.drawn]
                ends_now = values[at, len(row.tokens) - 1]
                at += 1
            own.append(torch.stack(states))
            ends.append(ends_now.detach())
        return own, ends

    def _score(self, logits: Tensor, drawn: Tensor) -> Scores:
        logits = logits / self._sampling["temperature"]
        out = self._left_out(torch.softmax(logits.detach(), -1))
        outside = out.gather(-1, drawn[:, None])[:, 0]
        out = out.scatter(-1, drawn[:, None], value=False)
        logprobs = torch.log_softmax(logits.masked_fill(out, -torch.inf), -1)
        entropy = torch.special.entr(logprobs.detach().exp()).sum(-1)
        return Scores(logprobs.gather(-1, drawn[:, None])[:, 0], entropy, outside)

    def _left_out(self, probs: Tensor) -> Tensor:
        """`[N, V]` tokens that top-k, then top-p, then min-p leave out."""
        kept = torch.ones_like(probs, dtype=torch.bool)
        if k := self._sampling["top_k"]:
            kept &= probs >= probs.topk(min(k, probs.shape[-1]), -1).values[:, -1:]
        if self._sampling["top_p"] < 1:
            left = torch.where(kept, probs, 0.0)
            left = left / left.sum(-1, keepdim=True)
            ordered, index = left.sort(stable=True, dim=-1, descending=True)
            enough = ordered.cumsum(-1) - ordered >= self._sampling["top_p"]
            kept &= ~torch.zeros_like(kept).scatter(-1, index, enough)
        if self._sampling["min_p"]:
            kept &= probs >= self._sampling["min_p"] * probs.amax(-1, keepdim=True)
        return ~kept


def _padded(module: nn.Module, weights: Weights, samples: Sequence[Sample]) -> Any:
    rows = [row.tokens for sample in samples for row in sample.rows]
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    return functional_call(module, dict(weights), args=(), kwargs=inputs)
