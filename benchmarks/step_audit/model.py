"""A run's folder, and its policy and critic in float64 by plain transformers (eager, padded)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from asyncrl.monitoring.records.trained_samples import TrainedSample, read_trained_samples
from benchmarks.step_audit.formulas import AdamW, Tensors


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


def part_of(state: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Of a checkpoint's tensors those whose names begin so, without the beginning."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


class PolicyWeights:
    """Of a run's policies, critics and references, by version; those of 0 are the initial model."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._trainer = folder.config["trainer"]
        self._initial = part_of(folder.state(0), "weights/policy/")

    def policy(self, version: int) -> AdamW:
        """What is trained: the model's weights, or an adapter's."""
        weights = part_of(self._folder.state(version), "weights/policy/")
        if self._trainer["lora"]["rank"] and not version:
            # Before its first step B is 0, so that A has no gradient and stays what it is.
            later = part_of(self._folder.state(1), "weights/policy/")
            weights = {k: one * 0 if ".lora_B." in k else one for k, one in later.items()}
        return self._optimizer(version, "policy", weights)

    def critic(self, version: int) -> AdamW:
        """At first the initial model and a head of 0."""
        weights = part_of(self._folder.state(version), "weights/critic/")
        if not weights:
            trunk = {k.removeprefix("model."): v for k, v in self._initial.items()}
            size = next(iter(trunk.values())).shape[-1]
            head = {"head.weight": torch.zeros(1, size), "head.bias": torch.zeros(1)}
            weights = {f"trunk.{k}": v for k, v in trunk.items()} | head
        return self._optimizer(version, "critic", weights)

    def reference(self, version: int) -> Tensors:
        """Of the KL penalty in the step after this version."""
        moved = part_of(self._folder.state(version), "weights/reference/")
        return self.whole(moved or self._initial)

    def of_engines(self, version: int) -> Tensors:
        """With which tokens of this version were drawn."""
        return self.whole(part_of(self._folder.state(version), "weights/policy/"))

    def whole(self, weights: Tensors) -> Tensors:
        """The model's weights in float64; an adapter's are merged: W + alpha / rank * B A."""
        if weights.keys() <= self._initial.keys():
            return {name: one.double() for name, one in weights.items()}
        merged = {name: one.double() for name, one in self._initial.items()}
        scale = self._trainer["lora"]["alpha"] / self._trainer["lora"]["rank"]
        for name, one in weights.items():
            layer, is_b, _ = name.partition(".lora_B.")
            if is_b:
                a = weights[name.replace(".lora_B.", ".lora_A.")].double()
                merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + scale * one.double() @ a
        return merged

    def _optimizer(self, version: int, name: str, weights: Tensors) -> AdamW:
        moments = part_of(self._folder.state(version), f"optimizer/{name}/{name}/")
        return AdamW({k: v.double() for k, v in weights.items()}, moments, self._trainer)


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
