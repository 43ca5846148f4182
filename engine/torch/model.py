"""A HF causal LM behind one packed forward pass."""

from __future__ import annotations

import inspect
import itertools
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface

from asyncrl.engine.errors import EngineError, EngineStartError
from asyncrl.engine.sampling.verification import ranges_of
from asyncrl.engine.torch.attention import (
    AttendedKeys,
    Block,
    causal_blocks,
    decode_block,
    resumed_blocks,
)
from asyncrl.engine.torch.cpu.fused_kernels import sgemm_address
from asyncrl.engine.torch.cpu.fused_model import FusedDecoder
from asyncrl.engine.torch.cpu.invariant_attention import filled_up, missing
from asyncrl.engine.torch.slots import SlotAttention, SlotCache, StepInputs, StepLayout
from asyncrl.rollout.cpu import why_not_fused
from asyncrl.rollout.model_parts import float32_logits
from asyncrl.rollout.trajectory import IntArray
from asyncrl.wire.weights.pretrained import load_causal_lm

_log = logging.getLogger(__name__)
_numbers = itertools.count()
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest total variation between packed and plain forward pass that the self-check accepts."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The T tokens of one forward pass: `[T]` arrays."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    places: NDArray[np.int64]
    """Places in their slots: the positions, except for nodes of a forked token tree."""
    rows: NDArray[np.int64]

    @classmethod
    def of(cls, feed: StepInputs) -> _Tokens:
        m, r = len(feed.decode_counts), len(feed.new_lengths)
        counts = np.concatenate([feed.decode_counts, feed.new_lengths])
        starts = np.zeros(r, np.int32) if feed.new_starts is None else feed.new_starts
        first = np.concatenate([feed.decode_lengths, starts])
        rows, places = np.repeat(np.arange(m + r), counts), ranges_of(first, counts)
        positions = places
        if feed.decode_depths is not None:
            nodes = np.repeat(feed.decode_lengths, feed.decode_counts) + feed.decode_depths
            positions = np.concatenate([nodes, places[len(nodes) :]])
        ids = np.concatenate([feed.decode_tokens, feed.new_tokens]).astype(np.int64)
        return cls(ids, positions, places, rows)


class SlotModel:
    """A loaded transformers model with its KV slots.

    If `batch_invariant`, a row's logits do not depend on the rest of the batch.
    """

    def __init__(
        self, model: Any, *, slots: int, max_len: int, batch_invariant: bool = False
    ) -> None:
        self.module = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self.cache = SlotCache(slots, max_len)
        self._invariant = batch_invariant
        self._attention = SlotAttention(self.cache)
        self._fused: FusedDecoder | None = None
        self._picks_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def attach(self) -> None:
        """Route the model's attention through the slots."""
        name = f"asyncrl-slots-{next(_numbers)}"
        AttentionInterface.register(name, self._attention)
        self.module.set_attn_implementation(name)

    def fuse(self) -> None:
        """Compute in `engine.torch.cpu.fused_model` from now on; the slots must be allocated."""
        self._fused = FusedDecoder(self.module, self.cache, batch_invariant=self._invariant)

    def forward(self, feed: StepInputs) -> torch.Tensor:
        """Return float32 logits: `[sum(decode_counts) + sum(new_wanted), V]`."""
        decoding = len(feed.decode_tokens)
        ends = decoding + np.cumsum(feed.new_lengths, dtype=np.int64) - 1
        if feed.new_wanted is not None and (feed.new_wanted != 1).any():
            ends = ranges_of(ends + 1 - feed.new_wanted, feed.new_wanted)
        wanted = np.concatenate([np.arange(decoding), ends])
        tokens = _Tokens.of(feed)
        reach = None
        if self._invariant or self._fused is not None:
            reach = AttendedKeys.over_slots(
                tokens.rows, tokens.places, feed.decode_lengths, feed.decode_counts, feed.hidden
            )
        if self._fused is not None and reach is not None:
            return self._fused.forward(tokens.ids, tokens.positions, reach, wanted)
        return self._run(self._layout(tokens, feed, reach), wanted, self.cache)

    def forward_fresh(
        self, tokens: IntArray, lengths: IntArray, wanted: NDArray[np.int64]
    ) -> torch.Tensor:
        """Return logits `[len(wanted), V]` of packed whole contexts, without slots.

        Contexts are best sorted by length; `wanted` are indices into `tokens` `[T]`.
        """
        none = np.empty(0, np.int32)
        feed = StepInputs(none, none, none, tokens, lengths)
        packed = _Tokens.of(feed)
        reach = None
        if self._invariant or self._fused is not None:
            reach = AttendedKeys.within(lengths)
        if self._fused is not None and reach is not None:
            return self._fused.forward(packed.ids, packed.positions, reach, wanted)
        return self._run(self._layout(packed, feed, reach), wanted, None)

    def _layout(self, tokens: _Tokens, feed: StepInputs, reach: AttendedKeys | None) -> StepLayout:
        at = torch.from_numpy(tokens.places).to(self.device)
        positions = at
        if tokens.positions is not tokens.places:
            positions = torch.from_numpy(tokens.positions).to(self.device)
        return StepLayout(
            input_ids=torch.from_numpy(tokens.ids)[None].to(self.device),
            positions=positions[None],
            places=at,
            rows=torch.from_numpy(tokens.rows).to(self.device),
            blocks=[] if self._invariant else self._blocks(feed),
            reach=reach,
        )

    def _blocks(self, feed: StepInputs) -> list[Block]:
        blocks: list[Block] = []
        kind: Any = {"dtype": self.dtype, "device": self.device}
        if len(feed.decode_counts):
            lengths, counts = feed.decode_lengths, feed.decode_counts
            blocks.append(decode_block(lengths, counts, feed.hidden, feed.decode_depths, **kind))
        row, token, fresh = len(feed.decode_counts), len(feed.decode_tokens), feed.new_lengths
        if feed.new_starts is not None:
            resumed = int(np.count_nonzero(feed.new_starts))
            starts, counts, fresh = feed.new_starts[:resumed], fresh[:resumed], fresh[resumed:]
            blocks += resumed_blocks(starts, counts, first_row=row, first_token=token, **kind)
            row, token = row + resumed, token + int(counts.sum())
        if len(fresh):
            blocks += causal_blocks(fresh, first_row=row, first_token=token, device=self.device)
        return blocks

    def _run(
        self, plan: StepLayout, wanted: NDArray[np.int64], cache: SlotCache | None
    ) -> torch.Tensor:
        self._attention.plan = self.cache.plan = plan
        count = len(wanted)
        tokens = plan.input_ids.shape[1]
        if self._invariant:
            plan.input_ids, plan.positions = filled_up(plan.input_ids), filled_up(plan.positions)
            wanted = np.pad(wanted, (0, missing(count)))
        index = None
        options: dict[str, Any] = {}
        if count < tokens or len(wanted) > count:
            index = torch.from_numpy(wanted).to(self.device)
            if self._picks_logits:
                options["logits_to_keep"] = index
        with torch.inference_mode():
            out = self.module(
                input_ids=plan.input_ids,
                position_ids=plan.positions,
                past_key_values=cache,
                use_cache=cache is not None,
                **options,
            )
            logits: torch.Tensor = out.logits[0]
            if index is not None and not self._picks_logits:
                logits = logits[index]
            self._attention.plan = self.cache.plan = None
            return logits[:count].float()


def load_model(
    path: str,
    *,
    slots: int,
    max_len: int,
    device: torch.device,
    dtype: torch.dtype,
    batch_invariant: bool = False,
    fused: bool = True,
    wide_logits: bool = False,
) -> SlotModel:
    """Load a model from a directory or hub id, and check that it runs with KV slots.

    If `fused`, it may compute in `engine.torch.cpu.fused_model`; if `wide_logits`, logits of a
    16-bit model are float32. Raises EngineStartError if it cannot be loaded, does not fit KV slots,
    or cannot be batch-invariant on this machine.
    """
    if batch_invariant and (device.type, dtype) != ("cpu", torch.float32):
        raise EngineStartError(
            f"run.repeatable: true works on a CPU in float32, not on {device.type} in {dtype}: "
            "set engine.device: cpu and engine.dtype: float32"
        )
    try:
        model: Any = load_causal_lm(path, dtype)
        model.eval().requires_grad_(requires_grad=False).to(device)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise EngineStartError(f"cannot load a causal LM from {path!r}: {error}") from error
    _refuse_by_config(model, path, max_len)
    if wide_logits:
        _widen_logits(model)
    out = SlotModel(model, slots=slots, max_len=max_len, batch_invariant=batch_invariant)
    _check_against_plain_forward(out, path)
    _choose_forward(out, path, allowed=fused)
    if batch_invariant:
        _check_batch_invariance(out, path)
    return out


def _widen_logits(model: Any) -> None:
    """Make a plain 16-bit output layer return float32, which models then scale and cap."""
    head: Any = model.get_output_embeddings()
    is_plain = type(head) is torch.nn.Linear
    if is_plain and head.weight.dtype.itemsize == 2:
        head.forward = lambda hidden: float32_logits(hidden, head.weight, head.bias)


def _refuse_by_config(model: Any, path: str, max_len: int) -> None:
    config = model.config.get_text_config()
    known = {"full_attention", "sliding_attention"}
    other = set(getattr(config, "layer_types", None) or ()) - known
    if model._is_stateful or other:  # noqa: SLF001  (transformers has no public name for it)
        what = f"layers of type {sorted(other)}" if other else "a recurrent state"
        raise EngineStartError(
            f"{path!r} has {what}, which KV slots cannot represent: set engine.kind=vllm"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise EngineStartError(
            f"{path!r} ({type(model).__name__}) does not use transformers' attention interface, "
            "which the embedded engine needs: set engine.kind=vllm"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < max_len:
        raise EngineStartError(
            f"engine.max_model_len={max_len} is more than the {longest} positions of {path!r}"
        )


def _choose_forward(model: SlotModel, path: str, *, allowed: bool) -> None:
    """Fuse the forward pass of a supported model, and compare it with transformers'."""
    why_not: str | None = "engine.torch.fused is false"
    if allowed:
        why_not = why_not_fused(model.module, threads=torch.get_num_threads())
        why_not = why_not or _window_of(model)
        if sgemm_address() is None:
            why_not = "torch's BLAS does not export sgemm_"
    if why_not:
        _log.info("forward pass: transformers' own (not fused: %s)", why_not)
        return
    rng = np.random.default_rng(2)
    lengths = [min(n, model.cache.max_len) for n in (9, 5, 33)[: model.cache.slots]]
    rows = [rng.integers(0, model.vocab_size, n).astype(np.int32) for n in lengths]
    split = [max(1, n // 2) for n in lengths]
    expected = _packed_logits(model, rows, split)
    model.fuse()
    apart = _total_variation(expected, _packed_logits(model, rows, split))
    if not apart <= _TOLERANCE[torch.float32]:
        raise EngineStartError(
            f"{path!r} gives other probabilities in the fused forward pass than in transformers' "
            f"(total variation {apart:.2g}): set engine.torch.fused: false, and report this"
        )
    _log.info("forward pass: fused (%s)", type(model.module).__name__)


def _window_of(model: SlotModel) -> str | None:
    """Return why its attention does not reach all places of a slot; None: it does."""
    config = model.module.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window is None or window >= model.cache.max_len or "sliding_attention" not in kinds:
        return None
    return f"it has a sliding window of {window} tokens"


def _total_variation(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest total variation over the rows of two `[N, V]` logits."""
    return (one.softmax(-1) - other.softmax(-1)).abs().sum(-1).max().item() / 2


def _check_against_plain_forward(model: SlotModel, path: str) -> None:
    """Compare a few tokens with a plain forward pass, which shows what slots cannot represent."""
    rng = np.random.default_rng(0)
    lengths = [min(n, model.cache.max_len) for n in (6, 4)[: model.cache.slots]]
    rows = [rng.integers(0, model.vocab_size, n).astype(np.int32) for n in lengths]
    split = [max(1, n // 2) for n in lengths]
    if getattr(model.module.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.module.set_attn_implementation("eager")  # transformers' other ones leave the cap out
    with torch.inference_mode():
        plain = [
            model.module(torch.from_numpy(row)[None].long().to(model.device)).logits[0]
            for row in rows
        ]
    try:
        model.attach()
        packed = _packed_logits(model, rows, split)
    except (
        EngineError, TypeError, AttributeError, NotImplementedError, RuntimeError, ValueError,
        LookupError,
    ) as error:  # fmt: skip
        raise EngineStartError(
            f"the embedded engine cannot run {path!r}: {error}. Set engine.kind=vllm, or lower "
            f"engine.slots ({model.cache.slots}) and engine.max_model_len ({model.cache.max_len}) "
            "if memory ran out"
        ) from error
    expected = torch.cat([p[s - 1 :] for p, s in zip(plain, split, strict=True)]).float()
    apart = _total_variation(expected, packed)
    if not apart <= _TOLERANCE.get(model.dtype, 0.1):
        raise EngineStartError(
            f"{path!r} gives other probabilities with KV slots than without (total variation "
            f"{apart:.2g}): its attention is not plain causal. Set engine.kind=vllm"
        )


def _check_batch_invariance(model: SlotModel, path: str) -> None:
    """Compare bits: rows alone and together, contexts fed at once and in two parts."""
    rng = np.random.default_rng(1)
    lengths = [min(n, model.cache.max_len) for n in (3, 70, 21, 40, 9)[: model.cache.slots]]
    rows = [rng.integers(0, model.vocab_size, n).astype(np.int32) for n in lengths]
    short, long = [1 for _ in rows], [max(1, n - 1) for n in lengths]
    with torch.inference_mode():
        together = _packed_logits(model, rows, short)
        alone = torch.cat(
            [_packed_logits(model, [row], [n]) for row, n in zip(rows, short, strict=True)]
        )
        ends = np.cumsum(lengths)
        last = np.concatenate([[end - 2, end - 1] for end in ends])
        late = _packed_logits(model, rows, long)
    if not (torch.equal(together, alone) and torch.equal(together[last], late)):
        raise EngineStartError(
            f"run.repeatable: true does not work for {path!r} on this machine: the logits of a row "
            "depend on the batch even with batch-invariant attention and padding, because of a "
            "matrix product or another operation of the model"
        )


def _packed_logits(model: SlotModel, rows: list[IntArray], split: list[int]) -> torch.Tensor:
    """Feed the first tokens as prompts and the rest as drafts; return logits from each split on."""
    none = np.empty(0, np.int32)
    heads = np.array(split, np.int32)
    first = np.concatenate([row[:s] for row, s in zip(rows, split, strict=True)])
    prefilled = model.forward(StepInputs(none, none, none, first, heads))
    tails = [row[s:] for row, s in zip(rows, split, strict=True)]
    counts = np.array([len(t) for t in tails], np.int32)
    if not counts.all():
        return prefilled
    decoded = model.forward(StepInputs(np.concatenate(tails), counts, heads, none, none))
    parts = decoded.split(counts.tolist())
    return torch.cat([torch.cat([p[None], d]) for p, d in zip(prefilled, parts, strict=True)])
