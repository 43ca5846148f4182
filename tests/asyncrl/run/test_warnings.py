"""What a run says without being asked."""

from __future__ import annotations

from asyncrl.config import RunConfig, parse_config
from asyncrl.run import warnings as advice


def config(**sections: object) -> RunConfig:
    return parse_config(sections, source="test")


def test_a_default_run_has_nothing_to_warn_of() -> None:
    assert advice.at_start(config()) == []
    assert advice.follows_the_policy(config())


def test_biased_and_cut_samples_are_announced() -> None:
    said = advice.at_start(
        config(cache={"reuse": "lenient"}, scheduler={"sample_deadline_seconds": 3})
    )
    assert "lenient" in said[0]
    assert "BIASED" in said[0]
    assert "sample_deadline_seconds is 3" in said[1]
    assert not advice.follows_the_policy(config(cache={"reuse": "lenient"}))
    assert not advice.follows_the_policy(config(scheduler={"sample_deadline_seconds": 3}))


def test_a_top_k_that_is_too_small_is_said_once_there_is_evidence() -> None:
    run = config(engine={"top_k_logprobs": 8})
    assert advice.outside_top_k(run, drawn=1000, outside=500) is None, "no evidence yet"
    assert advice.outside_top_k(run, drawn=100_000, outside=10) is None, "next to nothing"
    said = advice.outside_top_k(run, drawn=100_000, outside=3000)
    assert said is not None
    assert "3.0% of the tokens lie outside the 8 most probable" in said
    assert "within 23 tokens" in said
    assert "top_k_logprobs to 64" in said
    keeps = config(scheduler={"on_update": "keep"})
    assert advice.outside_top_k(keeps, drawn=100_000, outside=3000) is None


def test_an_engine_that_does_not_use_its_weights_is_found_out() -> None:
    run = config(engine={"device": "cpu", "dtype": "float32"})
    assert advice.engine_disagrees(run, None) is None
    assert advice.engine_disagrees(run, 1e-5) is None
    said = advice.engine_disagrees(run, 0.04)
    assert said is not None
    assert "differ by 0.04 on average" in said
    half = config(engine={"dtype": "bfloat16"})
    assert advice.engine_disagrees(half, 0.02) is None, "what rounding does"
    old_kv = config(scheduler={"max_off_policy_steps": 1}, engine={"dtype": "float32"})
    assert advice.engine_disagrees(old_kv, 0.04) is None, "old KV explains it"
