"""Warnings that a run prints: unusual settings, and measurements that show a problem.

Pure functions. Each returns the text of a warning, or None.
"""

from __future__ import annotations

from asyncrl.config import RunConfig
from asyncrl.processes.generator.deadlines import deadline_warning
from asyncrl.processes.generator.lenient_reuse import lenient_warning
from engine.config import MAX_TOP_K_LOGPROBS
from wire.noise_floor import NoiseFloor

MAX_OUTSIDE_SHARE = 0.001
"""Share of tokens outside the stored top-K above which a larger K is worth suggesting."""
MIN_OUTSIDE_TOKENS = 20_000
"""Tokens that must have been generated before that share is meaningful."""
MAX_NOISE_FLOOR = 0.02
"""Share of tokens that verification may reject under unchanged weights without a warning. An
optimizer step that learns makes verification reject 4% to 10% (docs/simulation.md): above this, the
engine's arithmetic is a notable part of what is regenerated. In float32 the share is 0."""
MIN_CUT_SAMPLES = 3
"""Responses that must have been cut before that share is meaningful: one cut loses the rest of a
response, which may be thousands of tokens."""


def at_start(config: RunConfig) -> list[str]:
    """Warnings about settings under which samples do not follow the policy."""
    warnings = (lenient_warning(config.cache), deadline_warning(config.scheduler))
    return [warning for warning in warnings if warning is not None]


def noise_floor(config: RunConfig, measured: NoiseFloor) -> str | None:
    """Warn when verification rejects tokens of the very policy that verifies them.

    By any rule, a response of L tokens loses about TV L / 2 of them to differences between the
    kernels, TV being their total variation per token, half of `abs_mean`. If it loses four times as
    much, these differences do not explain it.
    """
    share, cut = measured.share, measured.cut_samples
    if share is None or share <= MAX_NOISE_FLOOR or cut < MIN_CUT_SAMPLES:
        return None
    text = (
        f"WARNING: verification rejects {share:.1%} of the tokens of the very policy that verifies "
        f"them ({cut} of {measured.samples} responses that were verified again under the weights "
        "that drew them). As much is lost at every update. Samples still follow the policy. "
    )
    apart = measured.abs_mean or 0.0
    if share > apart * measured.judged / measured.samples:
        return (
            f"{text}Rounding does not explain it: the log-probabilities of the accepted tokens "
            f"differ by {apart:.2g} only. Please report this as a defect of engine.kind: "
            f"{config.engine.kind}."
        )
    return (
        f"{text}Its decoding and scoring kernels compute different probabilities. Set "
        "engine.dtype: float32, or a lower sampling.max_tokens."
    )


def outside_top_k(config: RunConfig, *, drawn: int, outside: int) -> str | None:
    """Suggest a larger top-K when verification rejects many tokens because K is small.

    Args:
        config: of the run.
        drawn: response tokens generated so far.
        outside: how many of those were not among the top K stored with them.
    """
    verifies = config.scheduler.on_update == "verify"
    if not verifies or drawn < MIN_OUTSIDE_TOKENS or outside < MAX_OUTSIDE_SHARE * drawn:
        return None
    share, k = outside / drawn, config.engine.top_k_logprobs
    half_life = max(1, round(0.69 / share))
    return (
        f"{share:.1%} of the tokens lie outside the {k} most probable ones that are stored with "
        "each (engine.top_k_logprobs). Verification must reject those, so half of all responses "
        f"are cut within {half_life:,} tokens even if the policy does not change. This is exact "
        f"but slow: {_fewer_outside(config)}."
    )


def _fewer_outside(config: RunConfig) -> str:
    """What the user can still change so that fewer tokens lie outside the stored ones."""
    top_p = config.sampling.top_p
    mass = "set sampling.top_p below 1" if top_p == 1 else f"lower sampling.top_p (it is {top_p:g})"
    mass += f", or sampling.top_k to at most {MAX_TOP_K_LOGPROBS}"
    if config.engine.top_k_logprobs >= MAX_TOP_K_LOGPROBS:
        return f"{mass}; engine.top_k_logprobs is at its limit"
    return f"set engine.top_k_logprobs to {MAX_TOP_K_LOGPROBS}, or {mass}"
