"""Warnings about settings and measurements of a run."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.controller import warnings
from asyncrl.wire.records.noise_floor import NoiseFloor
from asyncrl.wire.records.step import TokenCounts


def config(**sections: object) -> RunConfig:
    return parse_config(sections, source="test")


def test_a_default_run_has_no_warnings() -> None:
    assert warnings.at_start(config()) == []
    assert config().samples_follow_policy


def test_biased_and_cut_samples_are_warned_about() -> None:
    warning = warnings.at_start(
        config(cache={"reuse": "lenient"}, scheduler={"sample_deadline_seconds": 3})
    )
    assert "lenient" in warning[0]
    assert "BIASED" in warning[0]
    assert "sample_deadline_seconds is 3" in warning[1]
    assert not config(cache={"reuse": "lenient"}).samples_follow_policy
    assert not config(scheduler={"sample_deadline_seconds": 3}).samples_follow_policy


def test_a_larger_top_k_is_suggested_where_much_is_rejected_and_many_tokens_lie_outside() -> None:
    def said(run: RunConfig, **changes: int) -> str | None:
        counts = {"generated": 80_000, "verified": 20_000, "rejected": 5_000}
        return warnings.small_top_k(run, TokenCounts(**counts | {"outside_top_k": 4_000} | changes))

    run = config(engine={"top_k_logprobs": 8})
    text = said(run)
    assert text is not None
    assert "rejects 20% of the tokens, and 4.0% of all tokens are drawn outside the 8 most" in text
    assert text.endswith("set engine.top_k_logprobs to 64.")
    assert said(run, verified=12_000, rejected=3_000) is None, "too few tokens"
    assert said(run, rejected=2_000) is None, "verification keeps nearly all"
    assert said(run, outside_top_k=900) is None, "few tokens lie outside"
    assert said(config(engine={"top_k_logprobs": 64})) is None, "K is at its limit"


def test_what_the_noise_floor_costs_is_said_at_the_runs_lengths() -> None:
    run = config(sampling={"max_tokens": 16_384}, engine={"max_model_len": 20_000})

    def measured(square: float | None, rejected: int = 0) -> NoiseFloor:
        return NoiseFloor(samples=2, judged=6000, rejected=rejected, square_mean=square)

    said = warnings.kept_by_verification(run, measured(1e-4))
    assert said == (
        "noise floor: decoding and verification differ by 0.01 nats a token (root mean square over "
        "6,000), so under unchanged weights verification keeps 78% of responses of 3,000 tokens "
        "whole, the mean so far, and 52% of those of sampling.max_tokens (16,384)"
    )
    assert warnings.kept_by_verification(run, measured(1e-12)) is None, "nothing worth naming"
    assert warnings.kept_by_verification(run, measured(None)) is None
    assert warnings.kept_by_verification(run, measured(1e-4, rejected=5900)) is None, "too few"


def test_what_verification_keeps_is_what_its_rule_accepts() -> None:
    """Sums of normal differences whose exponential has mean 1, as a ratio of probabilities has."""
    rng = np.random.default_rng(0)
    tokens, square = 400, 1e-3
    sums = rng.normal(-square * tokens / 2, np.sqrt(square * tokens), 200_000)
    accepted = np.minimum(1, np.exp(sums)).mean()
    assert NoiseFloor(square_mean=square).whole_share(tokens) == pytest.approx(accepted, abs=5e-3)


def test_squares_are_averaged_over_those_who_measured_them() -> None:
    new = NoiseFloor(samples=1, judged=100, abs_mean=0.1, square_mean=0.02)
    old = NoiseFloor(samples=1, judged=300, abs_mean=0.1)
    assert (new + old).square_mean == (old + new).square_mean == 0.02
    assert (old + old).square_mean is None
    again = NoiseFloor(samples=1, judged=300, abs_mean=0.1, square_mean=0.04)
    assert (new + again).square_mean == pytest.approx(0.035)


def test_a_noise_floor_that_is_not_about_0_is_warned_about_once_enough_responses_are_cut() -> None:
    run = config(engine={"dtype": "bfloat16"})

    def measured(cut: int, rejected: int, apart: float | None) -> NoiseFloor:
        return NoiseFloor(
            samples=50, cut_samples=cut, judged=10_000, rejected=rejected, abs_mean=apart
        )

    assert warnings.noise_floor(run, NoiseFloor()) is None
    assert warnings.noise_floor(run, measured(2, 2000, 0.0)) is None, "too few responses"
    assert warnings.noise_floor(run, measured(9, 200, 0.0)) is None, "a share of 2%"
    # 200 tokens a response: differences of 1e-3 nats explain a share of up to 0.2.
    rounding = warnings.noise_floor(run, measured(3, 1000, 1e-3))
    assert rounding is not None
    assert "rejects 10.0% of the tokens" in rounding
    assert "3 of 50 responses" in rounding
    assert rounding.endswith("Set a lower sampling.max_tokens, or on a CPU, engine.dtype: float32.")
    remote = {"kind": "vllm", "logits_dtype": "model"}
    advice = warnings.noise_floor(config(engine=remote), measured(3, 1000, 1e-3)) or ""
    assert "Set engine.logits_dtype: float32, or engine.batch_invariant: true on GPUs" in advice
    remote = {"kind": "sglang", "batch_invariant": True}
    advice = warnings.noise_floor(config(engine=remote), measured(3, 1000, 1e-3)) or ""
    assert "batch_invariant" not in advice
    assert "logits_dtype" not in advice
    for apart in (1e-4, 0.0):
        defect = warnings.noise_floor(run, measured(3, 1000, apart))
        assert defect is not None
        assert "Rounding does not explain it" in defect
        assert "engine.kind: torch" in defect
    nothing_accepted = NoiseFloor(samples=3, cut_samples=3, judged=9, rejected=9)
    assert "report this as a defect" in (warnings.noise_floor(run, nothing_accepted) or "")
