"""Whether a run would have been better without a drafter.

A drafter of ours costs vLLM its asynchronous scheduling, which prepares a step while the one before
runs (decision 0033). vLLM fixes that when it starts: it cannot be switched back while it runs.
"""

from __future__ import annotations

from asyncrl.wire.records.step import EngineStats

_STEPS = 2000
"""Fewer say nothing: the planner is still learning."""
_WORTH = 0.02
"""Accepted drafts, as a share of generated tokens, that are worth a drafter."""


def advice_on_drafting(stats: EngineStats) -> str:
    """A sentence if hardly any draft was worth feeding in many steps; "" otherwise.

    Args:
        stats: of an engine on a GPU, with a drafter.
    """
    tokens = stats.tokens
    share = tokens.accepted / tokens.generated if tokens.generated else 0.0
    if stats.steps < _STEPS or share >= _WORTH:
        return ""
    return (
        f"drafting did not pay: {tokens.accepted} of {tokens.generated} tokens ({share:.1%}) came "
        f"from drafts in {stats.steps} steps. vLLM schedules synchronously because of the drafter; "
        "with cache.max_draft_tokens: 0 it starts without one and schedules asynchronously"
    )
