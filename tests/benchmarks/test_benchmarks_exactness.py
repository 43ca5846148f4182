"""benchmarks.exactness at a small size: exact modes pass, biased ones are detected, missing named.

An exact mode fails below the benchmark's p-value of 1e-6, which takes ten of `false_alarms`. Seeds
are fixed: a test always passes or always fails.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from false_alarms import Claims

from benchmarks.exactness import engines, kept, main
from benchmarks.exactness.kept import TRAPS
from benchmarks.exactness.model import draw, random_policy
from benchmarks.exactness.pure import PURE
from benchmarks.exactness.stats import distance

CLAIMS = Claims(__file__)
run_pure = functools.cache(main.run_pure)


@pytest.mark.parametrize("mode", [*PURE, *TRAPS])
def test_modes_are_as_exact_as_they_say(mode: str) -> None:
    found = run_pure(mode, main.QUICK, 0)
    assert found.as_expected, found
    assert found.distance.samples == main.QUICK
    if found.exact:
        CLAIMS.take(10)
        assert found.distance.tv_low < 0.01
    else:
        assert found.distance.tv_low > 0.05


def test_the_trap_repeats_the_past_and_drafts_do_not() -> None:
    notes = {m: run_pure(m, main.QUICK, 0).notes for m in ("trap-minpq", "trap-drafts")}
    assert notes["trap-minpq"]["repeated"] > 2 * notes["trap-minpq"]["repeated_fresh"]
    drafts = notes["trap-drafts"]
    assert drafts["repeated"] == pytest.approx(drafts["repeated_fresh"], rel=0.06)


def test_by_block_keeps_more_the_longer_the_row() -> None:
    short, long = (kept.measure(0.03, n, 64, 10_240 // n) for n in (16, 512))
    assert long.token < long.block
    assert short.block / short.token < 1.2
    assert long.block / long.token > 1.3
    assert abs(short.token - short.specrl_1) < 0.05


# The statistics.


def test_the_confidence_interval_covers_the_true_distance() -> None:
    """Samplers of known distance: 200 intervals, each end of which fails 1 time in 40."""
    probabilities = random_policy(0, 16, 1).sequence_distribution()
    other = random_policy(1, 16, 1).sequence_distribution()
    rng = np.random.default_rng(0)
    missed = {"low": 0, "high": 0}
    for share in (0.0, 0.01, 0.1, 0.5):
        truth = (1 - share) * probabilities + share * other
        tv = 0.5 * np.abs(truth - probabilities).sum()
        for _ in range(50):
            counts = rng.multinomial(5000, truth, size=2)
            seen = distance(counts, probabilities)
            missed["low"] += seen.tv_low > tv
            missed["high"] += seen.tv_high < tv
            assert seen.tv_low <= seen.tv_high
    # Binomial(200, 0.025) exceeds 17 once in 100,000.
    assert max(missed.values()) <= 17


def test_p_values_of_exact_samples_are_uniform() -> None:
    probabilities = random_policy(0, 8, 1).sequence_distribution()
    rng = np.random.default_rng(0)
    values = [
        distance(rng.multinomial(2000, probabilities, size=2), probabilities).p_value
        for _ in range(60)
    ]
    assert 0.3 < np.mean(values) < 0.7
    assert min(values) > 1e-5


def test_a_sample_of_probability_zero_is_never_exact() -> None:
    probabilities = np.array([0.5, 0.5, 0.0])
    seen = distance(np.array([[500, 500, 0], [500, 500, 1]]), probabilities)
    assert seen.p_value == 0.0
    with pytest.raises(ValueError, match="counts"):
        distance(np.array([[1, 2], [1, 1]]), probabilities)


def test_draws_follow_the_tables() -> None:
    table = np.array([[0.0, 1.0, 0.0], [0.25, 0.0, 0.75]])
    drawn = draw(np.random.default_rng(0), np.repeat(table, 4000, axis=0))
    assert (drawn[:4000] == 1).all()
    assert abs((drawn[4000:] == 2).mean() - 0.75) < 0.03
    assert not (drawn[4000:] == 1).any()


# The command.


def test_modes_that_cannot_run_are_reported_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines.util, "find_spec", lambda name: None)
    monkeypatch.setattr(kept, "table", lambda tokens: [])
    file = tmp_path / "exactness.json"
    monkeypatch.setenv("ASYNCRL_SGLANG_PYTHON", str(tmp_path / "none"))
    modes = "plain,specrl-1,vllm-chain,vllm-verify,sglang-tree"
    assert main.main(["--samples", "5000", "--modes", modes, "--json", str(file)]) == 0
    said = capsys.readouterr()
    assert said.err.count("MISSING") == 3
    assert said.out.count("MISSING") == 3
    assert "does not exist" in said.err
    raw = json.loads(file.read_text())["raw"]
    assert raw["missing"].keys() == {"vllm-chain", "vllm-verify", "sglang-tree"}
    assert raw["modes"].keys() == {"plain", "specrl-1"}
    assert raw["modes"]["plain"]["samples"] == 5000


def test_a_wrong_sampler_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PURE, "plain", (PURE["specrl-1"][0], True))
    monkeypatch.setattr(kept, "table", lambda tokens: [])
    assert main.main(["--samples", "20000", "--modes", "plain"]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modes", "chian"], "'chian' is not one of"),
        (["--samples", "10"], "at least 1,000"),
        (["--engine", "torch", "--modes", "plain"], "not allowed with"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(arguments)
    assert said in capsys.readouterr().err


def test_modes_in_which_no_draft_is_accepted_certify_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = (np.zeros(1000, np.int64), {"drafted": 1000.0, "accepted": 0.0})
    monkeypatch.setattr(engines.TorchBench, "_drafted", lambda *_: nothing)
    with pytest.raises(engines.UnavailableError, match="0 accepted"):
        list(main.run_engine("torch", ["torch-chain"], 1000, 0))


@pytest.mark.parametrize("mode", ["torch-chain", "torch-tree", "torch-verify"])
def test_the_torch_engine_is_certified(mode: str) -> None:
    (found,) = main.run_engine("torch", [mode], 6000, 0)
    CLAIMS.take(10)
    assert found.as_expected, found
    assert found.notes["accepted"] > 500
