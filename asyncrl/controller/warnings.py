"""Warnings that a run prints: unusual settings, and measurements that show a problem.

Pure functions that return the text of a warning, or None.
"""

import math

from asyncrl.config.run_config import RunConfig
from asyncrl.engine.config import MAX_TOP_K_LOGPROBS
from asyncrl.generator.lenient_reuse import lenient_warning
from asyncrl.generator.sample_table import deadline_warning
from asyncrl.wire.records.noise_floor import NoiseFloor
from asyncrl.wire.records.step import SignalTotals, StepMetrics, TokenCounts

MIN_OUTSIDE_SHARE = 0.01
"""Share of tokens outside the stored top-K above which a larger K is worth suggesting: by the model
of docs/modes.md, a tenth of all rejections comes from there at 250 tokens, a third at 4,000."""
MIN_REJECTED_SHARE = 0.1
"""Share of tokens that verification must reject before a larger K is worth suggesting."""
MIN_JUDGED_TOKENS = 20_000
"""Tokens that must have been verified before these shares are meaningful."""
MAX_NOISE_FLOOR = 0.02
"""Share of tokens that verification may reject under unchanged weights without a warning. A useful
optimizer step makes verification reject 4% to 10% (docs/modes.md): above this, the engine's
arithmetic is a notable part of what is regenerated. In float32 the share is 0."""
MIN_ACCEPTED_TOKENS = 200
"""Tokens that must have been accepted before their differences predict those of a run."""
MIN_CUT_SAMPLES = 3
"""Cut responses that make that share meaningful: one cut may lose thousands of tokens."""
MOSTLY_CUT = 0.9
"""Share of a step's samples cut at the limit above which the limit is what the run learns."""


def at_start(config: RunConfig) -> list[str]:
    """Warnings about settings under which samples do not follow the policy."""
    return [*filter(None, (lenient_warning(config.cache), deadline_warning(config.scheduler)))]


def noise_floor(config: RunConfig, measured: NoiseFloor) -> str | None:
    """Warn if verification rejects tokens of the very policy that verifies them.

    By any rule, differences between kernels cost about TV L / 2 of a response's L tokens; TV, their
    total variation per token, is half of `abs_mean`. They do not explain four times that loss.
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
            f"{config.engine_kinds}."
        )
    return (
        f"{text}Its decoding and scoring kernels compute different probabilities. "
        f"{_against_rounding(config)}"
    )


def kept_by_verification(config: RunConfig, measured: NoiseFloor) -> str | None:
    """Describe the noise floor's cost at the run's lengths; None if it is too small to name."""
    longest = config.sampling.max_tokens
    at_longest = measured.whole_share(longest)
    if at_longest is None or measured.accepted < MIN_ACCEPTED_TOKENS or at_longest > 0.99:
        return None
    mean = max(1, round(measured.judged / measured.samples))
    at_mean = measured.whole_share(mean) or 0.0
    apart = math.sqrt(measured.square_mean or 0.0)
    return (
        f"noise floor: decoding and verification differ by {apart:.2g} "
        f"nats a token (root mean square over {measured.accepted:,}), so under unchanged weights "
        f"verification keeps {at_mean:.0%} of responses of {mean:,} tokens whole, the mean so far, "
        f"and {at_longest:.0%} of those of sampling.max_tokens ({longest:,})"
    )


def _against_rounding(config: RunConfig) -> str:
    engine, ways = config.engine, []
    if engine.logits_dtype == "model":
        ways.append("engine.logits_dtype: float32")
    if all(one.kind != "torch" for one in config.engines) and not engine.batch_invariant:
        ways.append("engine.batch_invariant: true on GPUs, which are then 20% to 40% slower")
    ways += ["a lower sampling.max_tokens", "on a CPU, engine.dtype: float32"]
    return f"Set {', or '.join(ways)}."


def small_top_k(config: RunConfig, tokens: TokenCounts) -> str | None:
    """Suggest a larger top-K if verification rejects much and many tokens lie outside K."""
    k = config.engine.top_k_logprobs
    judged, reported = tokens.verified + tokens.rejected, tokens.generated + tokens.verified
    if judged < MIN_JUDGED_TOKENS or k >= MAX_TOP_K_LOGPROBS:
        return None
    rejected, outside = tokens.rejected / judged, tokens.outside_top_k / reported
    if rejected < MIN_REJECTED_SHARE or outside < MIN_OUTSIDE_SHARE:
        return None
    return (
        f"Verification rejects {rejected:.0%} of the tokens, and {outside:.1%} of all tokens are "
        f"drawn outside the {k} most probable ones (engine.top_k_logprobs). A response is also cut "
        "where new weights would have drawn another token there, so a larger K keeps more: set "
        f"engine.top_k_logprobs to {MAX_TOP_K_LOGPROBS}."
    )


def no_signal(config: RunConfig, step: StepMetrics) -> str | None:
    """Warn if a step learned nothing from its rewards, with the reason as far as it is known."""
    if not step.learned_nothing:
        return None
    batch, learning = step.batch, step.learning
    if batch.zero_variance_groups == batch.groups:
        equal = "the samples of each have the same reward"
        if learning.reward_std < 1e-9:
            equal = f"all samples have the reward {learning.reward_mean:.3g}"
        why = f"none of its {batch.groups} groups carries signal ({equal})"
        remedy = "check the reward function (`asyncrl samples` shows what it judged), or take "
        remedy += "prompts that the model solves sometimes"
    elif config.trainer.mask_truncated_completions and batch.truncated_share == 1.0:
        why = "all samples were cut off, and trainer.mask_truncated_completions leaves these out"
        remedy = f"raise sampling.max_tokens ({config.sampling.max_tokens})"
    else:
        why = "its gradient is 0"
        remedy = "check the loss's settings in trainer"
    return f"WARNING: step {step.step} learned nothing from its rewards: {why}; {remedy}"


def mostly_cut(config: RunConfig, step: StepMetrics) -> str | None:
    """Warn if almost all samples of a step were cut off."""
    share = step.batch.truncated_share
    if not step.batch.samples or share < MOSTLY_CUT:
        return None
    limits = [f"sampling.max_tokens ({config.sampling.max_tokens})"]
    if (seconds := config.scheduler.sample_deadline_seconds) is not None:
        limits.append(f"scheduler.sample_deadline_seconds ({seconds:g})")
    if config.environment.name is not None:
        limits.append(f"environment.max_turns ({config.environment.max_turns})")
    return (
        f"WARNING: {share:.0%} of the samples of step {step.step} were cut off before they ended; "
        f"raise {' or '.join(limits)}, or check that responses end (sampling.stop, the tokenizer's "
        "end token)"
    )


def little_signal(signal: SignalTotals, steps: int) -> str | None:
    """Say at the end of training if half of the steps or more learned nothing."""
    if not signal.steps_without or 2 * signal.steps_without < steps:
        return None
    return (
        f"WARNING: {signal.steps_without} of {steps} steps learned nothing from their rewards: no "
        "group carried signal, or the gradient was 0"
    )
