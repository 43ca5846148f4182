"""The trainer's language model: packed tokens in, log-probabilities out.

The log-probabilities are those of the *processed* distribution, from which the engine samples:
logits divided by the temperature, restricted to the tokens that top-k, top-p and min-p leave in
(`asyncrl.rollout.sampled_set`, the engines' function), and renormalised. With truncation the set is
that of the *current* policy plus the drawn token, which would otherwise have probability 0, and no
gradient, after the smallest change at the set's edge. `mismatch.outside_nucleus` is the share of
such tokens; at staleness 0 it is rounding.

Activation checkpointing: `true` keeps only a block's input, so the whole forward pass runs twice.
`selective` also keeps the results of attention and of products that are no wider than their input,
and recomputes the rest: about half of a block's forward pass, for a fifth of its memory.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.rollout.trajectory import IntArray
from asyncrl.rollout.truncation import EVERYTHING, Truncation
from asyncrl.trainer.algorithms.base import Routes
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import UnsupportedModelError
from asyncrl.trainer.base.lora_config import LoraConfig
from asyncrl.trainer.cpu.fused import MAX_LENGTH, FusedDecoder, why_not_trained_fused
from asyncrl.trainer.cpu.layers import speed_up
from asyncrl.trainer.lora.adapter import Adapter
from asyncrl.trainer.model import head
from asyncrl.trainer.model.compiled import compile_blocks, results_of, where_different
from asyncrl.trainer.model.head import LogitMap, Processing, TokenScores, process, score_tokens
from asyncrl.trainer.model.model_loading import load_model
from asyncrl.trainer.model.packing import ATTENTION_NAME, PackedBatch

logger = logging.getLogger(__name__)

_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
}
_PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "mkldnn::_linear_pointwise": (0, 1)}
"""Positions of the input and the weight among the arguments."""
T = TypeVar("T")
_LEAST_ROUNDING, _MOST_ROUNDING = 0.02, 0.25
"""Relative difference of a sequence's logits in 16 bits that rounding always explains, and that it
never explains. Small models of two layers have 0.001 to 0.008."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def has_experts(model: PreTrainedModel) -> bool:
    """Return True if a model is a mixture of experts."""
    return any(name.endswith("experts") for name, _ in model.named_modules())


def why_no_routes(model: PreTrainedModel) -> str | None:
    """Return why the router loss cannot be computed for a model, or None."""
    name, config = type(model).__name__, model.config.get_text_config()
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    if "router_logits" not in recorded:
        return f"{name} has no routers of experts"
    if getattr(config, "router_aux_loss_coef", None) is None:
        return f"{name} balances its experts in another way (a bias or groups), without such a loss"
    return None


def check_routes(model: PreTrainedModel, config: TrainerConfig) -> None:
    """Raise UnsupportedModelError if the router loss is wanted and cannot be computed."""
    if config.router_loss_coefficient and (reason := why_no_routes(model)) is not None:
        raise UnsupportedModelError(f"trainer.router_loss_coefficient: {reason}; set it to 0")


def _policy(_context: Any, op: Any, *args: Any, **_options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(op, args) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(op: Any, args: tuple[Any, ...]) -> bool:
    name = op.name().split(".")[0] if isinstance(op, torch._ops.OpOverload) else ""  # noqa: SLF001
    if name in _ATTENTION:
        return True
    if name not in _PRODUCTS:
        return False
    x, weight = (args[place] for place in _PRODUCTS[name])
    wide = weight.shape[0] if name.startswith("mkldnn") else weight.shape[1]
    return bool(wide <= x.shape[-1])


class Policy:
    """A causal language model, packed. Attributes: `model`, `device`, `vocab_size`, `adapter`."""

    is_sharded = False  # True if weights are divided among ranks, which compute together
    _speeds_up = True

    def __init__(
        self,
        model_path: str,
        *,
        dtype: Literal["float32", "bfloat16", "float64"],
        device: torch.device,
        temperature: float = 1.0,
        truncation: Truncation = EVERYTHING,
        gradient_checkpointing: bool | Literal["selective"] = False,
        fused: bool = True,
        compiled: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        """Load the model and check on two short sequences that packing does not change its results.

        Raises UnsupportedModelError if it does, or the model cannot be loaded or compiled.
        """
        if not temperature > 0:
            raise UnsupportedModelError(f"temperature must be above 0, got {temperature}")
        if (refusal := truncation.refusal()) is not None:
            raise UnsupportedModelError(refusal)
        self.device = device
        self.temperature, self.truncation = temperature, truncation
        self._compute_dtype = _DTYPES[dtype]
        wide = torch.promote_types(self._compute_dtype, torch.float32)
        self.model = load_model(model_path, wide if lora is None else self._compute_dtype)
        self.adapter = None if lora is None else Adapter(self.model, lora, wide)
        self.model.to(device)
        output = self.model.get_output_embeddings()
        if output is None:
            raise UnsupportedModelError(
                f"{model_path}: {type(self.model).__name__} has no output embeddings"
            )
        self._head: nn.Module | None = output
        self._logits = LogitMap.of(self.model.config)
        self.vocab_size = int(self.model.get_input_embeddings().num_embeddings)
        if self._speeds_up:
            speed_up(self.model, norms_too=not compiled)
        self._recomputes = bool(gradient_checkpointing)
        other = bool(gradient_checkpointing or compiled or lora)
        self._fused = self._fused_decoder(fused and not other)
        self._check_packing(model_path)
        # A model of an adapter is held in 16 bits, so it was compared in them; one that is divided
        # among ranks is still on the CPU, whose kernels say nothing about those of its device.
        if self._compute_dtype != self.model.dtype and not self.is_sharded:
            self._check_packing_as_trained(model_path)
        _set_modes(self.model, recomputes=gradient_checkpointing)
        if compiled:
            batch = PackedBatch.of(_two_sequences(self.vocab_size), device)
            compile_blocks(self.model, model_path, lambda: self.hidden(batch), self._compute_dtype)

    @property
    def hidden_size(self) -> int:
        """Size of a hidden state, C."""
        return int(self.model.get_output_embeddings().weight.shape[-1])

    @property
    def trunk(self) -> nn.Module:
        """The model without its head."""
        return cast("nn.Module", self.model.base_model)

    @property
    def has_plain_head(self) -> bool:
        """True if logits are just a linear layer of the hidden states."""
        return self._head is not None

    @property
    def is_fused(self) -> bool:
        """True if short sequences are computed by `trainer.cpu.fused`."""
        return self._fused is not None

    def score(self, batch: PackedBatch, *, with_routes: bool = False) -> TokenScores:
        """Processed log-probability and entropy of each response token of a micro-batch.

        `with_routes` also returns router logits, for models that `why_no_routes` does not refuse.
        """
        if self._head is None:
            processing = Processing(LogitMap(self.temperature), self.truncation)
            with self._autocast():
                return process(self._logits_of_model(batch), batch.targets, processing)
        with self._autocast():
            whole, routes = self._forward(batch, with_routes=with_routes)
        scores = self.score_hidden(whole[batch.predictors], batch.targets)
        return replace(scores, routes=routes) if with_routes else scores

    def hidden(self, batch: PackedBatch) -> Tensor:
        """`[N, C]` hidden states that predict the response tokens, before the head."""
        with self._autocast():
            return self._hidden(batch)[batch.predictors]

    def within(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that uses `hidden` and `score_hidden`, which then share weights."""
        return function(*arguments)

    def score_hidden(self, hidden: Tensor, targets: Tensor) -> TokenScores:
        """Score the hidden states that `hidden` returned, if `has_plain_head`."""
        assert self._head is not None  # noqa: S101 - for the type checker
        mapped = replace(self._logits, temperature=self.temperature)
        processing = Processing(mapped, self.truncation)
        with self._autocast():
            # On a GPU in 16 bits only `score_tokens` has logits in float32, as engines have.
            wide = self.device.type == "cuda" and self._compute_dtype.itemsize == 2
            if not wide and len(hidden) * self.vocab_size <= head.LOGIT_BUDGET:
                return process(mapped.applied(self._head.forward(hidden)), targets, processing)
            return score_tokens(self._head, hidden, targets, processing, self._compute_dtype)

    def _autocast(self) -> torch.autocast:
        low = self._compute_dtype == torch.bfloat16
        # Recomputed blocks recompute their bfloat16 weights, too.
        kept = not self._recomputes
        return torch.autocast(self.device.type, torch.bfloat16, enabled=low, cache_enabled=kept)

    @contextmanager
    def changed(
        self, temperature: float | None, weights: Sequence[tuple[str, Tensor]]
    ) -> Iterator[None]:
        """Compute at another temperature, and with other weights, inside the block."""
        own_temperature, own = self.temperature, self.model.state_dict(keep_vars=True)
        saved = [(name, own[name].detach().cpu().clone()) for name, _ in weights]
        self.temperature = own_temperature if temperature is None else temperature
        try:
            self._set(weights)
            yield
        finally:
            self.temperature = own_temperature
            self._set(saved)

    @torch.no_grad()
    def _set(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        own = self.model.state_dict(keep_vars=True)
        for name, tensor in weights:
            own[name].copy_(tensor)

    def _fused_decoder(self, wanted: bool) -> FusedDecoder | None:
        reason: str | None = "trainer.fused is off, or gradient_checkpointing, compile or lora on"
        if wanted and self._compute_dtype != torch.float32:
            reason = f"trainer.dtype is {self._compute_dtype}"
        elif wanted:
            reason = why_not_trained_fused(self.model, threads=torch.get_num_threads())
        if reason is not None:
            logger.info("training through transformers' forward pass: %s", reason)
            return None
        logger.info("training through fused layers, up to %d tokens a sequence", MAX_LENGTH)
        return FusedDecoder(self.model)

    def _hidden(self, batch: PackedBatch) -> Tensor:
        return self._forward(batch, with_routes=False)[0]

    def _forward(self, batch: PackedBatch, *, with_routes: bool) -> tuple[Tensor, Routes | None]:
        if self._fused is not None and batch.layout.longest <= MAX_LENGTH:
            return self._fused.hidden(batch.tokens, batch.layout), None
        more = {"output_router_logits": True} if with_routes else {}
        out = self.model.base_model(**_inputs(batch), **more)
        hidden: Tensor = out.last_hidden_state[0]
        if not with_routes:
            return hidden, None
        logits = tuple(one.flatten(0, -2)[batch.predictors] for one in out.router_logits)
        chosen = int(self.model.config.get_text_config().num_experts_per_tok)
        return hidden, Routes(logits, chosen)

    def _logits_of_model(self, batch: PackedBatch) -> Tensor:
        out = self.model(**_inputs(batch), logits_to_keep=batch.predictors)
        return cast("Tensor", out.logits[0])

    @torch.no_grad()
    def _check_packing(self, model_path: str) -> None:
        """Refuse a model whose packed and separate forward passes differ; choose the head."""
        pairs = _two_sequences(self.vocab_size)
        batch = PackedBatch.of(pairs, self.device)
        self.model.eval()
        want = self._separate(model_path, pairs)
        try:
            packed = self._logits_of_model(batch)
        except (UnsupportedModelError, TypeError) as error:
            raise UnsupportedModelError(f"{model_path} cannot be packed: {error}") from error
        if not _close(packed, want):
            _refuse_weights_that_are_not_finite(self.model, model_path)
            raise UnsupportedModelError(
                f"{model_path}: {type(self.model).__name__} computes different logits for packed "
                "sequences than for separate ones, so it cannot be trained here (known causes: "
                "state-space or convolution layers, attention with its own position bias)"
            )
        self._check_fused(batch)
        assert self._head is not None  # noqa: S101 - for the type checker
        plain = self._logits.applied(self._head(self._hidden(batch)[batch.predictors]))
        if plain.shape != want.shape or not _close(plain, want):
            logger.info("%s transforms its logits: its own forward pass computes them", model_path)
            self._head = None

    @torch.no_grad()
    def _check_packing_as_trained(self, model_path: str) -> None:
        """Refuse a model that packing changes under autocast, where attention is another kernel.

        The rounding of a separate sequence is measured: the difference of its logits in float32 and
        in bfloat16, which grows with depth and where tokens go to other experts.
        """
        pairs = _to_pack_as_trained(self.vocab_size, long=self.device.type == "cuda")
        exact = self._separate(model_path, pairs)
        with self._autocast():
            alone = self._separate(model_path, pairs)
            packed = self._logits_of_model(PackedBatch.of(pairs, self.device))
        sizes = [len(response) for _, response in pairs]
        by_token = has_experts(self.model)  # rounding may send single tokens to other experts
        for found, wanted, best in zip(
            packed.split(sizes), alone.split(sizes), exact.split(sizes), strict=True
        ):
            gap = _relative_gap(found, wanted, by_token=by_token)
            rounding = _relative_gap(wanted, best, by_token=by_token)
            limit = min(max(_LEAST_ROUNDING, 2 * rounding), _MOST_ROUNDING)
            if not gap <= limit:
                raise UnsupportedModelError(
                    f"{model_path}: {type(self.model).__name__} computes different logits for "
                    f"packed sequences than for separate ones in bfloat16 on {self.device}: by "
                    f"{gap:.2g} of their size, and rounding explains {limit:.2g}. In float32 they "
                    "agree, so an attention kernel is at fault: set trainer.dtype: float32, and "
                    "report it"
                )

    def _check_fused(self, batch: PackedBatch) -> None:
        """Fall back to transformers' forward pass if the fused one computes something else.

        Compares hidden states, and the gradients of the first layer's parameters, which pass
        through all other layers. This also compiles or loads the kernels before the first step.
        """
        fused, self._fused = self._fused, None
        if fused is None:
            return
        parameters = list(fused.first_layer.parameters())
        want = results_of(lambda: self._hidden(batch), parameters)
        count = len(want[0])
        got = results_of(lambda: fused.hidden(batch.tokens, batch.layout)[:count], parameters)
        gap = where_different(got, want)
        if gap is not None:
            logger.warning("fused layers are not used, since their results differ %s", gap)
            return
        self._fused = fused

    def _separate(self, model_path: str, pairs: Sequence[tuple[IntArray, IntArray]]) -> Tensor:
        self.model.set_attn_implementation("eager")
        rows = []
        for prompt, response in pairs:
            tokens = torch.from_numpy(np.concatenate([prompt, response[:-1]]).astype(np.int64))
            logits = self.model(input_ids=tokens.to(self.device)[None], use_cache=False).logits[0]
            rows.append(logits[len(prompt) - 1 :])
        try:
            self.model.set_attn_implementation(ATTENTION_NAME)
        except ValueError as error:
            raise UnsupportedModelError(
                f"{model_path} does not support the attention interface: {error}"
            ) from error
        return torch.cat(rows)


def _inputs(batch: PackedBatch) -> dict[str, Any]:
    layout = {"position_ids": batch.layout.positions, "packed_layout": batch.layout}
    return {"input_ids": batch.tokens, **layout, "use_cache": False}


def _refuse_weights_that_are_not_finite(model: nn.Module, model_path: str) -> None:
    wrong = [name for name, one in model.named_parameters() if not bool(one.isfinite().all())]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UnsupportedModelError(
            f"{model_path}: weights that are not finite numbers (NaN or infinity): "
            f"{', '.join(wrong[:3])}{more}; download or save the model again"
        )


def _close(found: Tensor, wanted: Tensor) -> bool:
    """Return True if logits differ by rounding alone.

    In 16 bits, the type of an adapter's base model, rounding is 1% of all logits together in 28
    layers; single ones may differ more, and send a token to another expert.
    """
    gap = (found - wanted).float()
    if wanted.dtype.itemsize < 4:
        return float(gap.norm()) <= 0.05 * float(wanted.float().norm())
    return float(gap.abs().max()) <= 1e-3 * float(wanted.abs().max()) + 1e-4


def _relative_gap(found: Tensor, wanted: Tensor, *, by_token: bool) -> float:
    """Norm of the difference of `[T, V]` logits over theirs; `by_token`: the tokens' median."""
    dim = -1 if by_token else None
    gap, size = (found.float() - wanted.float()).norm(dim=dim), wanted.float().norm(dim=dim)
    return float(torch.where(gap == 0, gap, gap / size).median())


def _to_pack_as_trained(vocabulary: int, *, long: bool) -> list[tuple[IntArray, IntArray]]:
    """Two responses to one prompt and another sequence; if `long`, of several kernel tiles."""
    (first, one), (second, other) = _two_sequences(vocabulary)
    more = 16 if long else 1
    prompt, third = np.tile(first, more), np.tile(other, more)
    return [(prompt, np.tile(one, more)), (prompt, third), (np.tile(second, more), third)]


def _two_sequences(vocabulary: int) -> list[tuple[IntArray, IntArray]]:
    return [
        (_tokens(range(1, 4), vocabulary), _tokens(range(2, 9), vocabulary)),
        (_tokens(range(5, 7), vocabulary), _tokens(range(9, 5, -1), vocabulary)),
    ]


def _tokens(numbers: Sequence[int], vocabulary: int) -> IntArray:
    return np.array(numbers, np.int32) % vocabulary


def _set_modes(model: PreTrainedModel, *, recomputes: bool | Literal["selective"]) -> None:
    """Disable dropout everywhere: the trainer's log-probabilities must equal the engine's.

    Gradient checkpointing works only in training mode, so only its layers get that mode.
    """
    model.eval()
    if not recomputes:
        return
    if not model.supports_gradient_checkpointing:
        raise UnsupportedModelError(f"{type(model).__name__} lacks gradient checkpointing")
    options: dict[str, Any] = {"use_reentrant": False}
    if recomputes == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
            for name in [n for n, v in vars(module).items() if "dropout" in n and v]:
                if isinstance(getattr(module, name), float):
                    setattr(module, name, 0.0)
