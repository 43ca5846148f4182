"""Log-probabilities of hidden states, without ever holding tokens x vocabulary.

    hidden [N, C] ─► a block of logits ─► LogitMap ─► running log-sum-exp, entropy, target's logit
                     (a part of the vocabulary, or whole rows where sampling is truncated)
A block has at most BLOCK numbers and is dropped at once. The backward pass keeps one number a
token, the logarithm of the softmax's denominator, and recomputes each block: a third more
arithmetic of the head, for memory that does not grow with N x V. Blocks of the vocabulary write
each row of the weight's gradient once. Top-k, top-p and min-p need whole rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PretrainedConfig

from asyncrl.rollout.model_parts import float32_logits
from asyncrl.rollout.sampled_set import left_out_by
from asyncrl.rollout.truncation import EVERYTHING, Truncation
from asyncrl.trainer.algorithms.base import Routes
from asyncrl.trainer.cpu.layers import MIN_ROWS, OnednnLinear, product, weight_gradient

LOGIT_BUDGET = 1 << 25
"""Logits (numbers) up to which all are computed at once and kept for the backward pass."""
BLOCK = {"cpu": 1 << 23, "cuda": 1 << 26}
"""Logits (numbers) of a block beyond it, by device: on a CPU a block stays near the cache."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of N response tokens under a policy. `logprobs` carries a gradient."""

    logprobs: Tensor
    """`[N]` nats, of the processed distribution, float32 (float64 for float64 models)."""
    entropy: Tensor
    """`[N]` nats."""
    outside: Tensor
    """`[N]` bool: current truncation excludes the drawn token, which was added."""
    routes: Routes | None = None
    """Router logits, if requested; carries the gradient."""


@dataclass(frozen=True, slots=True)
class LogitMap:
    """Elementwise, from the head's product x to the logits that sampling takes.

        softcap * tanh(scale * x / softcap) / temperature

    A model's `logits` are already scaled and capped.
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        """Scale and cap of a model's own head: Granite, Cohere, Gemma."""
        text: Any = config.get_text_config()
        divisor = getattr(text, "logits_scaling", None) or 1.0
        scale = getattr(text, "logit_scale", None) or 1 / divisor
        return cls(scale=scale, softcap=getattr(text, "final_logit_softcapping", None))

    def applied(self, x: Tensor) -> Tensor:
        """Scale and cap, but do not divide by the temperature."""
        x = x if self.scale == 1 else x * self.scale
        return x if self.softcap is None else torch.tanh(x / self.softcap) * self.softcap

    def apply_(self, x: Tensor) -> Tensor:
        """Apply in place, in float32 or more."""
        factor = self.scale if self.softcap is None else self.scale / self.softcap
        if self.softcap is not None:
            x = x.mul_(factor).tanh_()
            factor = self.softcap
        factor /= self.temperature
        return x if factor == 1 else x.mul_(factor)

    def pull_back_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient of the logits, the result of `apply_`, into that of x in place."""
        if self.softcap is not None:
            tanh = logits * (self.temperature / self.softcap)
            grad = grad.addcmul_(grad * tanh, tanh, value=-1)
        factor = self.scale / self.temperature
        return grad if factor == 1 else grad.mul_(factor)


@dataclass(frozen=True, slots=True)
class Processing:
    """The map from logits to the distribution from which tokens are drawn."""

    logits: LogitMap
    truncation: Truncation = EVERYTHING


def score_tokens(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    processing: Processing,
    dtype: torch.dtype | None = None,
) -> TokenScores:
    """Processed log-probability and entropy of `[N]` targets, from `[N, C]` hidden states.

    Products are computed in `dtype`, by default the weight's.
    """
    weight, bias = head.weight, getattr(head, "bias", None)
    assert isinstance(weight, Tensor)  # noqa: S101 - for the type checker
    kind = weight.dtype if dtype is None else dtype
    by_onednn = isinstance(head, OnednnLinear) and kind == torch.float32
    plan = _Plan(processing, _Onednn() if by_onednn else _Products(), kind)
    with torch.autocast(hidden.device.type, enabled=False):
        return TokenScores(*_Score.apply(hidden, weight, bias, targets, plan))


def process(logits: Tensor, targets: Tensor, processing: Processing) -> TokenScores:
    """Score `[N]` targets under a model's `[N, V]` logits, all in memory at once."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if processing.logits.temperature != 1.0:
        logits = logits / processing.logits.temperature
    outside = torch.zeros_like(targets, dtype=torch.bool)
    if processing.truncation.is_active:
        left_out, outside = _left_out(processing.truncation, logits.detach(), targets)
        logits = logits.masked_fill(left_out, -torch.inf)
    logprobs = torch.log_softmax(logits, -1)
    with torch.no_grad():
        entropy = torch.special.entr(logprobs.exp()).sum(-1)
    return TokenScores(logprobs.gather(-1, targets[:, None])[:, 0], entropy, outside)


def _left_out(truncation: Truncation, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`[N, V]` tokens that may not be drawn, without the targets; `[N]` targets among them."""
    left_out = left_out_by(truncation, torch.log_softmax(logits, -1))
    outside = left_out.gather(-1, targets[:, None])[:, 0]
    return left_out.scatter_(-1, targets[:, None], value=False), outside


class _Products:
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`[n, C]` and `[v, C]` to `[n, v]`; float32 on a GPU in 16 bits."""
        if x.is_cuda and x.dtype.itemsize == 2:
            return float32_logits(x, weight, bias)
        return linear(x, weight, bias)

    def for_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """`[n, v]` and `[v, C]` to `[n, C]`."""
        return grad @ weight

    def for_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """`[n, v]` and `[n, C]` to `[v, C]`."""
        return grad.t() @ x


class _Onednn(_Products):
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias) if len(x) < MIN_ROWS else product(x, weight, bias)

    def for_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        return product(grad, weight.t())

    def for_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        return weight_gradient(x, grad)


@dataclass(frozen=True, slots=True)
class _Plan:
    processing: Processing
    products: _Products
    dtype: torch.dtype

    def converted(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Convert to the type of the products."""
        b = None if bias is None else bias.to(self.dtype)
        return hidden.to(self.dtype), weight.to(self.dtype), b

    def logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute a block of logits in float32 or more."""
        raw = self.products.forward(x, weight, bias)
        return self.processing.logits.apply_(raw.to(torch.promote_types(raw.dtype, torch.float32)))


class _Score(torch.autograd.Function):
    """Log-probabilities, entropy, `outside` from `[N, C]`, `[V, C]`, `[V]` or None, `[N]`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, w, b = plan.converted(hidden, weight, bias)
        forward = _by_rows if plan.processing.truncation.is_active else _by_vocabulary
        logprobs, entropy, outside, log_sums = forward(plan, (x, w, b, targets))
        ctx.plan = plan
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums)
        ctx.mark_non_differentiable(entropy, outside)
        return logprobs, entropy, outside

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias, targets, log_sums = ctx.saved_tensors
        plan: _Plan = ctx.plan
        inputs = (*plan.converted(hidden, weight, bias), targets)
        out = _Gradients(
            torch.zeros_like(hidden, dtype=log_sums.dtype) if ctx.needs_input_grad[0] else None,
            torch.zeros_like(weight) if ctx.needs_input_grad[1] else None,
            torch.zeros_like(bias) if ctx.needs_input_grad[2] else None,
        )
        truncated = plan.processing.truncation.is_active
        backward = _by_rows_backward if truncated else _by_vocabulary_backward
        backward(plan, inputs, log_sums, grads[0], out)
        for_hidden = None if out.hidden is None else out.hidden.to(hidden.dtype)
        return for_hidden, out.weight, out.bias, None, None


@dataclass(frozen=True, slots=True)
class _Gradients:
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def add(
        self, plan: _Plan, grad: Tensor, x: Tensor, w: Tensor, rows: slice, part: slice
    ) -> None:
        """Add those of a block, given that of its products; `rows` of N, `part` of V."""
        if self.bias is not None:
            self.bias[part] += grad.sum(0)
        grad = grad.to(plan.dtype)
        if self.hidden is not None:
            self.hidden[rows] += plan.products.for_input(grad, w)
        if self.weight is not None:
            self.weight[part] += plan.products.for_weight(grad, x)


_Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""`[N, C]`, `[V, C]`, `[V]` and `[N]` targets, in the type of the products."""
_Forward = tuple[Tensor, Tensor, Tensor, Tensor]


def _by_vocabulary(plan: _Plan, inputs: _Inputs) -> _Forward:
    """Softmax of whole rows, a part of the vocabulary at a time (arXiv 1805.02867)."""
    x, w, b, targets = inputs
    kind = torch.promote_types(plan.dtype, torch.float32)
    top = torch.full((len(x),), -torch.inf, dtype=kind, device=x.device)
    total, weighed, chosen = (torch.zeros_like(top) for _ in range(3))
    for part in _parts(len(w), _block(x) // max(1, len(x))):
        logits = plan.logits(x, w[part], None if b is None else b[part])
        inside, column = _within(targets, part)
        chosen = torch.where(inside, logits.gather(1, column[:, None])[:, 0], chosen)
        higher = torch.maximum(top, logits.amax(1))
        shrink, top = (top - higher).exp(), higher
        masses = (logits - top[:, None]).exp_()
        total = total * shrink + masses.sum(1)
        weighed = weighed * shrink + torch.linalg.vecdot(masses, logits)
    log_sums = top + total.log()
    outside = torch.zeros_like(targets, dtype=torch.bool)
    return chosen - log_sums, log_sums - weighed / total, outside, log_sums


def _by_vocabulary_backward(
    plan: _Plan, inputs: _Inputs, log_sums: Tensor, above: Tensor, out: _Gradients
) -> None:
    x, w, b, targets = inputs
    everything = slice(0, len(x))
    for part in _parts(len(w), _block(x) // max(1, len(x))):
        logits = plan.logits(x, w[part], None if b is None else b[part])
        inside, column = _within(targets, part)
        grad = (logits - log_sums[:, None]).exp_().mul_(-above[:, None])
        grad.scatter_add_(1, column[:, None], (above * inside)[:, None])
        grad = plan.processing.logits.pull_back_(grad, logits)
        out.add(plan, grad, x, w[part], everything, part)


def _by_rows(plan: _Plan, inputs: _Inputs) -> _Forward:
    """Compute some tokens at a time, with all of the vocabulary."""
    x, w, b, targets = inputs
    found = []
    for rows in _parts(len(x), _block(x) // len(w)):
        logits, outside = _truncated(plan, x[rows], w, b, targets[rows])
        log_sums = torch.logsumexp(logits, 1)
        chosen = logits.gather(1, targets[rows, None])[:, 0]
        entropy = torch.special.entr((logits - log_sums[:, None]).exp_()).sum(1)
        found.append((chosen - log_sums, entropy, outside, log_sums))
    logprobs, entropy, outside, log_sums = (torch.cat(one) for one in zip(*found, strict=True))
    return logprobs, entropy, outside, log_sums


def _by_rows_backward(
    plan: _Plan, inputs: _Inputs, log_sums: Tensor, above: Tensor, out: _Gradients
) -> None:
    x, w, b, targets = inputs
    everything = slice(0, len(w))
    for rows in _parts(len(x), _block(x) // len(w)):
        logits, _ = _truncated(plan, x[rows], w, b, targets[rows])
        grad = (logits - log_sums[rows, None]).exp_().mul_(-above[rows, None])
        grad.scatter_add_(1, targets[rows, None], above[rows, None])
        if plan.processing.logits.softcap is not None:
            logits = logits.nan_to_num_(neginf=0.0)  # left out: the gradient is 0 already
        grad = plan.processing.logits.pull_back_(grad, logits)
        out.add(plan, grad, x[rows], w, rows, everything)


def _truncated(
    plan: _Plan, x: Tensor, w: Tensor, b: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits of whole rows, -inf where truncation excludes a token; targets that it excluded."""
    logits = plan.logits(x, w, b)
    left_out, outside = _left_out(plan.processing.truncation, logits, targets)
    return logits.masked_fill_(left_out, -torch.inf), outside


def _within(targets: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """`[N]` True if a target is in this part of the vocabulary, and its column there, else any."""
    column = targets - part.start
    inside = (column >= 0) & (targets < part.stop)
    return inside, column.clamp(0, part.stop - part.start - 1)


def _block(x: Tensor) -> int:
    return BLOCK.get(x.device.type, BLOCK["cuda"])


def _parts(count: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))
