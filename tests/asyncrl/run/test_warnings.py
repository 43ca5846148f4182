"""Warnings about settings and measurements of a run."""

from __future__ import annotations

from asyncrl.config import RunConfig, parse_config
from asyncrl.run import warnings
from asyncrl.wire.noise_floor import NoiseFloor
from asyncrl.wire.records import TokenCounts


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
