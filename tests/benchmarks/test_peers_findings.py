"""What benchmarks.peers makes of its runs: steps to an accuracy, ratios, tables."""

from __future__ import annotations

import io
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from benchmarks.peers.contestants import EXAMPLE, KEEP, SYNC, TRL, VERIFY
from benchmarks.peers.findings import Findings, Run, step_of_accuracy, tables
from benchmarks.peers.measured_run import Usage
from benchmarks.peers.shared_data import Step

USAGE = Usage(20.0, 18.0, 700_000_000, 0.1, 1.0, 0.01)
TINY_WORKLOAD = replace(EXAMPLE, steps=4, accuracy=0.8)


def a_run(contestant: str, step_seconds: float, rewards: list[float], **values: object) -> Run:
    steps = [Step(step_seconds * (i + 1), reward, 100) for i, reward in enumerate(rewards)]
    run = Run(EXAMPLE.name, contestant, 0, 1, steps, USAGE)
    return replace(run, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.5, 0.7, 0.8, 0.9], 2),
        ([0.5, 0.9, 0.6, 0.9, 0.8], 3),  # one good step before a bad one is not enough
        ([0.5, 0.9, 0.75, 0.9], 1),  # and one bad step after good ones takes nothing back
        ([0.9, 0.8], 0),
        ([0.5, 0.7, 0.79], None),
        ([0.9, 0.1, 0.1], None),  # as falling as this, the fit is flat
    ],
)
def test_accuracy_is_where_the_rising_fit_reaches_it(
    rewards: list[float], expected: int | None
) -> None:
    assert step_of_accuracy(rewards, 0.8) == expected


def test_the_rising_fit_is_the_isotonic_regression() -> None:
    """Against its definition: the largest of means from a step back, of the smallest onwards."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        rewards = (np.linspace(0.6, 0.95, 30) + rng.normal(0, 0.08, 30)).tolist()
        fit = [
            max(min(fmean(rewards[a : b + 1]) for b in range(i, 30)) for a in range(i + 1))
            for i in range(30)
        ]
        for accuracy in (0.5, 0.7, 0.8, 0.9, 1.2):
            expected = next((i for i, value in enumerate(fit) if value >= accuracy), None)
            assert step_of_accuracy(rewards, accuracy) == expected


def test_the_crossing_is_found_in_noise() -> None:
    """Eighty steps of 128 answers, three runs: within six steps of the truth nearly always."""
    rng = np.random.default_rng(1)
    truth = 0.97 - 0.27 * np.exp(-np.arange(80) / 20)
    expected = int(np.argmax(truth >= 0.92))
    found = [
        step_of_accuracy((rng.binomial(3 * 128, truth) / (3 * 128)).tolist(), 0.92) or 0
        for _ in range(200)
    ]
    assert np.mean(np.abs(np.array(found) - expected) <= 6) > 0.9


def test_ratios_are_seconds_to_the_accuracy_and_seconds_for_the_same_steps() -> None:
    findings = Findings(
        [TINY_WORKLOAD],
        [
            a_run(TRL, 3.0, [0.5, 0.7, 0.75, 0.9]),
            a_run(VERIFY, 1.0, [0.5, 0.9, 0.9, 0.9]),
            a_run(SYNC, 2.0, [0.5, 0.9, 0.9, 0.9]),
            a_run(KEEP, 1.5, [0.5, 0.5, 0.5, 0.5]),
        ],
    )
    # Together: 0.5, 0.83, 0.85, 0.9, so step 2 for all that train on-policy. keep(1): never.
    assert findings.seconds_to_accuracy(TINY_WORKLOAD, TRL) == [6.0]
    assert findings.seconds_to_accuracy(TINY_WORKLOAD, KEEP) == []
    assert findings.fastest(TINY_WORKLOAD) == VERIFY
    expected = {"": 3.0, "_verify": 3.0, "_sync": 1.5, "_keep_1": 2.0}
    assert findings.ratios() == {
        f"peers_example{name}{suffix}": pytest.approx(ratio)
        for name, ratio in expected.items()
        for suffix in ("", "_steps", "_median_step")
        if name + suffix != "_keep_1"  # which did not reach the accuracy
    }


def test_the_fastest_mode_is_exactly_on_policy() -> None:
    rewards = [0.5, 0.9, 0.9, 0.9]
    runs = [
        a_run(TRL, 3.0, rewards),
        a_run(VERIFY, 1.0, rewards),
        a_run(SYNC, 0.8, rewards),
        a_run(KEEP, 0.5, rewards),
    ]
    findings = Findings([TINY_WORKLOAD], runs)
    assert findings.fastest(TINY_WORKLOAD) == SYNC
    assert findings.ratios()["peers_example"] == pytest.approx(3.0 / 0.8)
    assert Findings([TINY_WORKLOAD], runs[:1]).fastest(TINY_WORKLOAD) is None


def test_seconds_to_an_accuracy_are_medians_over_seeds() -> None:
    rewards = [0.5, 0.5, 0.9, 0.9]
    findings = Findings(
        [TINY_WORKLOAD],
        [
            *(a_run(TRL, seconds, rewards, seed=i) for i, seconds in enumerate((4.0, 9.0, 6.0))),
            *(a_run(VERIFY, seconds, rewards, seed=i) for i, seconds in enumerate((2.0, 1.0, 9.0))),
        ],
    )
    assert findings.ratios()["peers_example"] == pytest.approx(6.0 / 2.0)


def test_an_accuracy_that_nobody_reached_gives_no_ratio() -> None:
    low = [0.5, 0.5, 0.5, 0.6]
    findings = Findings([TINY_WORKLOAD], [a_run(TRL, 3.0, low), a_run(VERIFY, 1.0, low)])
    assert "peers_example" not in findings.ratios()
    assert findings.raw()["steps_to_accuracy"] == {"example, TRL": None, "example, verify": None}


def test_step_seconds_leave_out_the_first_step() -> None:
    ends = (10.0, 11.0, 13.0, 14.0)
    run = replace(a_run(TRL, 1.0, [0.5]), steps=[Step(end, 0.5, 10) for end in ends])
    assert run.step_seconds == 1.0
    assert run.seconds == 14.0
    assert run.tokens_per_second == pytest.approx(40 / 14)


def test_tables_show_every_contestant_and_what_is_missing() -> None:
    from rich.console import Console

    findings = Findings(
        [TINY_WORKLOAD],
        [
            a_run(TRL, 3.0, [0.5, 0.7, 0.8, 0.9]),
            a_run(VERIFY, 1.0, [0.5, 0.9, 0.9, 0.9], usage=replace(USAGE, others_share=0.5)),
        ],
        {"example, sync": "it failed [1]"},
    )
    console = Console(width=150, record=True, file=io.StringIO())
    for table in tables(findings):
        console.print(table)
    text = console.export_text()
    assert "verify *" in text
    assert "TRL *" not in text
    assert "sync is MISSING: it failed [1]" in text
    assert "2 (3)" in text  # TRL's steps: of all together, and of its own run
    assert "3.00" in text
    assert "verify" in text.split("peers_example")[1].splitlines()[0]
