"""The set of tokens that sampling may draw: the settings of top-k, top-p and min-p.

The policy is the model's distribution after these operations, in this order:

    temperature   logits / temperature
    top_k         the k most probable tokens, and all that are as probable as the k-th
    top_p         of the rest, rescaled: the smallest set of most probable tokens whose mass
                  reaches top_p; of equally probable tokens the lower id comes first
    min_p         of the rest: tokens at least min_p times as probable as the most probable one
    rescaling     so that the remaining probabilities sum to 1

It is the order of Hugging Face's `generate`. vLLM's own sampler, which we do not use, applies min_p
before top_k; that differs if top_p and min_p are both set.

`asyncrl.rollout.sampled_set` computes the set. It depends on the distribution alone, never on the
token that was drawn, so a rule that is exact for a distribution is exact for its truncation.
"""

from dataclasses import dataclass

MAX_TOP_K = 1 << 20
"""Largest k of top-k; no vocabulary is larger."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """The settings of one distribution; the defaults leave everything in."""

    top_k: int = 0
    """Most tokens, ties aside; 0: all."""
    top_p: float = 1.0
    """Mass of the nucleus, in (0, 1]."""
    min_p: float = 0.0
    """Smallest ratio to the most probable token, in [0, 1]."""

    @property
    def is_active(self) -> bool:
        """True if it can leave a token out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def refusal(self) -> str | None:
        """Return the fault of the settings, as a sentence's end; None if they are valid."""
        if not 0 <= self.top_k <= MAX_TOP_K:
            return (
                f"top_k={self.top_k} must be from 1 to {MAX_TOP_K}, or 0 to sample from all tokens"
            )
        if not 0 < self.top_p <= 1:
            return f"top_p={self.top_p} must be in (0, 1]"
        if not 0 <= self.min_p <= 1:
            return f"min_p={self.min_p} must be from 0 to 1"
        return None


EVERYTHING = Truncation()
