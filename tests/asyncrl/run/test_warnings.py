"""Warnings about settings and measurements of a run."""

from __future__ import annotations

from asyncrl.config import RunConfig, parse_config
from asyncrl.run import warnings
from wire.noise_floor import NoiseFloor


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


def test_a_small_top_k_is_warned_about_once_enough_tokens_are_measured() -> None:
    run = config(engine={"top_k_logprobs": 8})
    assert warnings.outside_top_k(run, drawn=1000, outside=500) is None, "too few tokens"
    assert warnings.outside_top_k(run, drawn=100_000, outside=10) is None, "a negligible share"
    warning = warnings.outside_top_k(run, drawn=100_000, outside=3000)
    assert warning is not None
    assert "3.0% of the tokens lie outside the 8 most probable" in warning
    assert "within 23 tokens" in warning
    assert warning.endswith(
        "set engine.top_k_logprobs to 64, or set sampling.top_p below 1, "
        "or sampling.top_k to at most 64."
    )
    for engine, sampling, advice in (
        (
            {"top_k_logprobs": 64},
            {},
            "below 1, or sampling.top_k to at most 64; engine.top_k_logprobs is at its",
        ),
        ({"top_k_logprobs": 64}, {"top_p": 0.9}, "lower sampling.top_p (it is 0.9), or"),
        ({"top_k_logprobs": 32}, {"top_p": 0.9}, "set engine.top_k_logprobs to 64, or lower samp"),
    ):
        run = config(engine=engine, sampling=sampling)
        assert advice in (warnings.outside_top_k(run, drawn=100_000, outside=3000) or "")
    keeps = config(scheduler={"on_update": "keep"})
    assert warnings.outside_top_k(keeps, drawn=100_000, outside=3000) is None


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
    assert "Set engine.dtype: float32" in rounding
    for apart in (1e-4, 0.0):
        defect = warnings.noise_floor(run, measured(3, 1000, apart))
        assert defect is not None
        assert "Rounding does not explain it" in defect
        assert "engine.kind: torch" in defect
    nothing_accepted = NoiseFloor(samples=3, cut_samples=3, judged=9, rejected=9)
    assert "report this as a defect" in (warnings.noise_floor(run, nothing_accepted) or "")
