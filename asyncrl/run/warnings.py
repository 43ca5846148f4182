"""What a run says without being asked, because somebody would want to know. Pure functions."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.processes.deadlines import deadline_warning
from asyncrl.processes.lenient_reuse import lenient_warning

MISMATCH_FLOAT32 = 1e-3
MISMATCH_BFLOAT16 = 0.05
"""Mean difference of log-probabilities, in nats, that rounding alone does not make."""
OUTSIDE_SHARE = 0.001
"""Share of tokens outside the stored top-K from which on it is worth saying so."""
OUTSIDE_TOKENS = 20_000
"""So many tokens are needed before that share is believed."""


def at_start(config: RunConfig) -> list[str]:
    """What of the settings makes a run something else than most would think."""
    warnings = (lenient_warning(config.cache), deadline_warning(config.scheduler))
    return [warning for warning in warnings if warning is not None]


def engine_disagrees(config: RunConfig, fresh: float | None) -> str | None:
    """Whether engine and trainer say different things of the same tokens; None if they agree.

    Args:
        config: of the run.
        fresh: mean absolute difference of the log-probabilities of tokens drawn, or verified, under
            the very policy that trains on them; None where a step had none.
    """
    scheduler = config.scheduler
    old_kv = scheduler.on_update != "recompute" and scheduler.max_off_policy_steps > 0
    if fresh is None or old_kv:
        return None  # what new weights say on the KV of old ones no policy says
    if fresh <= (MISMATCH_FLOAT32 if _computes_in_float32(config) else MISMATCH_BFLOAT16):
        return None
    return (
        "WARNING: engine and trainer disagree: log-probabilities of the same tokens under the same "
        f"policy differ by {fresh:.2g} on average. Either their arithmetic differs much, or the "
        "engine does not use the weights that it was sent. Training is then not on-policy, "
        "whatever the staleness says. Compare engine.kind: torch, and see `mismatch` in "
        "metrics.jsonl."
    )


def _computes_in_float32(config: RunConfig) -> bool:
    if config.engine.dtype != "auto":
        return config.engine.dtype == "float32"
    return config.engine.device == "cpu" or not Path("/dev/nvidiactl").exists()


def follows_the_policy(config: RunConfig) -> bool:
    """Whether every sample follows, to its end, the policy of the versions that it carries."""
    lenient, deadline = config.cache.reuse == "lenient", config.scheduler.sample_deadline_seconds
    return not lenient and deadline is None


def outside_top_k(config: RunConfig, *, drawn: int, outside: int) -> str | None:
    """Whether verification loses much to a small K; None while that is not known or not so.

    Args:
        config: of the run.
        drawn: response tokens drawn so far.
        outside: of those, not among the top K that were stored with them.
    """
    verifies = config.scheduler.on_update == "verify"
    if not verifies or drawn < OUTSIDE_TOKENS or outside < OUTSIDE_SHARE * drawn:
        return None
    share, k = outside / drawn, config.engine.top_k_logprobs
    half = max(1, round(0.69 / share))
    return (
        f"{share:.1%} of the tokens lie outside the {k} most probable ones that are stored with "
        "each (engine.top_k_logprobs). Verification must reject those, so half of all answers are "
        f"cut within {half:,} tokens whatever the policies say. Exact, but slow: set "
        f"engine.top_k_logprobs to {max(64, 8 * k)}, or sampling.top_p below 1."
    )
