"""The simulator: results that follow from arithmetic, and what holds for the data in every mode."""

from __future__ import annotations

import functools
import json
import math
import random
import time
from statistics import NormalDist

import numpy as np
import pytest
from false_alarms import Claims
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.errors import UserError
from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.simulation.cost import H200, MODELS, Cost, roofline
from asyncrl.simulation.lengths import Survival, empirical, lognormal
from asyncrl.simulation.setting import Setting
from asyncrl.simulation.sim_generator import SimGenerator
from asyncrl.simulation.sim_request import SimRequest
from asyncrl.simulation.study import MODES, Cluster, compare, regime, right_choice
from asyncrl.simulation.tables import regime_table
from asyncrl.simulation.world import World

CLAIMS = Claims(__file__)
CHEAP = Cost(
    memory_seconds=0.01,
    token_seconds=1e-4,
    kv_seconds=0.0,
    step_seconds=0.0,
    train_token_seconds=1e-3,
    swap_seconds=0.0,
)
MESSAGE = CHEAP.message_seconds


def setting(**changes):
    config = SchedulerConfig(
        **{"group_size": 2, "groups_per_step": 4} | changes.pop("scheduler", {})
    )
    fields = {
        "generators": 1, "slots": 8, "steps": 3, "cost": CHEAP, "lengths": lambda _: 100,
        "prompt_tokens": 10,
    }  # fmt: skip
    return Setting(config=config, **fields | changes)


def test_a_synchronous_step_takes_the_time_that_arithmetic_predicts():
    outcome = World(setting(scheduler={"on_update": "keep", "max_off_policy_steps": 0})).run(1)
    # The first prompt has a step of its own; the others fit into steps bound by memory.
    prefills, decoding = 0.01, 100 * 0.01
    training = 8 * 110 * 1e-3
    # All rows end together, so the trainer starts only then.
    assert outcome.step_seconds == pytest.approx(
        prefills + decoding + training + 6 * MESSAGE, abs=3 * MESSAGE
    )
    assert outcome.trainer_idle == pytest.approx(1 - training / outcome.step_seconds, abs=1e-3)
    assert outcome.generator_idle == pytest.approx(
        1 - (prefills + decoding) / outcome.step_seconds, abs=5e-3
    )
    assert (outcome.staleness_max, outcome.regenerated) == (0, 0)


def test_a_step_with_more_rows_than_free_tokens_costs_arithmetic():
    cost = roofline(MODELS["7b"], H200, trainer_devices=8)
    few, many = cost.decode(8, 0), cost.decode(4 * cost.free_tokens, 0)
    assert few == pytest.approx(cost.step_seconds + cost.memory_seconds)
    assert many == pytest.approx(cost.step_seconds + 4 * cost.memory_seconds)
    # 15.2 GB over 3.36 TB/s, 15.2 GFLOP a token at 494 TFLOP/s.
    assert cost.memory_seconds == pytest.approx(4.52e-3, rel=0.01)
    assert cost.token_seconds == pytest.approx(3.07e-5, rel=0.01)


def test_by_token_a_prefix_survives_according_to_its_total_variation():
    """The seed is fixed."""
    rng, survival = random.Random(0), Survival("token")
    kept = [survival.kept([(0, 500.0), (1, 500.0)], 2, 1e-3, rng) for _ in range(36_000)]
    first, second = 1 - 2e-3, 1 - 1e-3
    expected = sum(first**i for i in range(1, 501))
    expected += first**500 * sum(second**i for i in range(1, 501))
    spread = math.sqrt(sum((k - expected) ** 2 for k in kept)) / len(kept)
    assert abs(sum(kept) / len(kept) - expected) < CLAIMS.sigmas() * spread
    assert survival.kept([(2, 50.0)], 2, 1e-3, rng) == 50
    assert survival.kept([(0, 50.0)], 2, 0.6, rng) == 0


def test_by_block_a_prefix_survives_according_to_the_walk_of_its_ratios():
    """Compared with the walk w = min(1, w r) over log-normal r. Seeds are fixed."""
    generator = np.random.default_rng(0)
    drift, length, rows = 0.01, 400, 4000
    deviation = 2 * NormalDist().inv_cdf((1 + drift) / 2)  # total variation of the one step
    weight, shares = np.ones(rows), []
    for _ in range(length):
        weight = np.minimum(
            1, weight * np.exp(generator.normal(-(deviation**2) / 2, deviation, rows))
        )
        shares.append(weight.mean())
    expected = float(np.mean(shares))
    rng, survival = random.Random(0), Survival("block", decisive=1.0)
    kept = [survival.kept([(0, float(length))], 1, drift, rng) / length for _ in range(rows)]
    # The discrete walk is reflected slightly later than the Brownian one.
    assert sum(kept) / rows == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(
    ("drift", "token", "block"), [(0.0033, 51.9, 53.9), (0.0117, 41.2, 45.1)], ids=["1", "17 steps"]
)
def test_both_rules_accept_as_much_as_was_measured_on_trained_policies(drift, token, block):
    """docs/exactness.md: accepted of 57.7 tokens, policies of the built-in task. Fixed seeds."""
    for rule, expected in (("token", token), ("block", block)):
        rng, survival = random.Random(0), Survival(rule)
        kept = [survival.kept([(0, 57.7)], 1, drift, rng) for _ in range(20000)]
        assert sum(kept) / 20000 == pytest.approx(expected, abs=1.0)


@pytest.mark.parametrize(
    ("length", "drift", "outside", "tail", "whole"),
    [
        (256, 0.0070, 0.049, 0.820, 0.868),
        (256, 0.0071, 0.32, 0.614, 0.855),
        (256, 0.0070, 0.19, 0.686, 0.850),
        (1024, 0.0035, 0.11, 0.618, 0.826),
    ],
)
def test_tokens_outside_the_top_k_cost_what_they_cost_on_markov_chains(
    length, drift, outside, tail, whole
):
    """docs/modes.md: measured with the tail as one symbol, and with K = the vocabulary."""
    stored = Survival("block", decisive=1.0, outside=outside)
    assert stored.expected([length], drift) == pytest.approx(tail, abs=0.06)
    assert Survival("block", decisive=1.0).expected([length], drift) == pytest.approx(
        whole, abs=0.04
    )


@pytest.mark.parametrize("rule", ["token", "block"])
def test_what_is_kept_on_average_is_what_is_expected(rule):
    """The seed is fixed."""
    rng, lengths = random.Random(0), (40, 400)
    survival = Survival(rule, outside=0.04, noise=2e-3)
    shares = [survival.kept([(0, float(n))], 1, 1e-3, rng) for n in 14_000 * lengths]
    spread = np.std(shares) / np.sqrt(len(shares)) / np.mean(lengths)
    kept = np.mean(shares) / np.mean(lengths)
    # Cuts lie between two tokens, and half a token is rounded down.
    error = CLAIMS.sigmas() * spread + 0.5 / 40
    assert kept == pytest.approx(survival.expected(lengths, 1e-3), abs=error)


def test_under_unchanged_weights_the_noise_floor_is_all_that_is_rejected():
    rng = random.Random(0)
    assert Survival("block", outside=0.05).kept([(3, 5000.0)], 3, 1e-3, rng) == 5000
    noisy = Survival("block", outside=0.05, noise=1e-3)
    assert noisy.expected([1000], 0.0) == pytest.approx(
        Survival("block", outside=0.05).expected([1000], 1e-3)
    )
    # Independent of the drift: variances add.
    both = Survival("block", noise=3e-3).expected([1000], 4e-3)
    assert both == pytest.approx(Survival("block").expected([1000], 5e-3))


def test_a_rejected_answer_is_drafted_only_as_far_as_it_was_generated():
    """Its old continuation decodes at four times the usual speed, the rest at the usual speed."""
    request = SimRequest(SampleId(0, 0), length=1000, drafted=400.0, speedup=4.0)
    request.replace(1, 100.0)
    assert request.progress_left() == 400 / 4 + 500
    assert request.grow(50, 1) == 200
    assert request.grow(100, 1) == 200 + 50
    assert request.progress_left() == 450


def test_due_work_takes_the_slot_of_run_ahead_work():
    generator = SimGenerator("g", setting(slots=1, prompt_tokens=0), random.Random(0))
    ahead, due = SampleId(9, 0), SampleId(1, 0)
    generator.start(ahead, 1)
    generator.advance(0.5)
    generator.start(due, 0)
    assert generator.tally.preempted == 1
    generator.advance(generator.next_end())
    assert generator.finish_next().sample == due
    generator.advance(generator.next_end())
    request = generator.finish_next()
    # None of its tokens was lost or generated twice.
    assert (request.sample, request.generated) == (ahead, 100)
    assert generator.tally.useful == pytest.approx(200)


def test_recompute_pays_for_the_contexts_of_running_requests():
    outcomes = compare(
        Cluster(generators=2, slots=16, steps=6, warm_up=1), ["keep(1)", "recompute(1)"]
    )
    assert outcomes["recompute(1)"].step_seconds > outcomes["keep(1)"].step_seconds
    assert outcomes["recompute(1)"].staleness_max == 1


@functools.cache
def mean_and_deviation():
    rng, draw = random.Random(1), lognormal(300, 1.0, 2000)
    lengths = [draw(rng) for _ in range(20000)]
    mean = sum(lengths) / len(lengths)
    return mean, math.sqrt(sum((x - mean) ** 2 for x in lengths) / len(lengths))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_on_answers_of_the_same_length_within_its_staleness(mode):
    """Seeds are fixed."""
    cluster = Cluster(
        generators=4, slots=32, steps=13, warm_up=1, median=300, longest=2000, drift=1e-3
    )
    outcome = cluster.simulate(mode)
    mean, deviation = mean_and_deviation()
    trained = 11 * cluster.step_groups * cluster.scheduler.group_size
    error = deviation * math.sqrt(1 / trained + 1 / 20000)
    assert abs(outcome.mean_length - mean) < CLAIMS.sigmas() * error
    assert outcome.staleness_max == MODES[mode][0]["max_off_policy_steps"]
    assert (outcome.regenerated > 0) == (MODES[mode][0]["on_update"] == "verify")
    assert 0 <= outcome.generator_idle < 1
    assert 0 <= outcome.trainer_idle < 1


def test_without_drift_nothing_is_regenerated_and_verification_is_nearly_free():
    outcomes = compare(Cluster(generators=4, slots=16, drift=0.0), ["keep(1)", "verify"])
    assert outcomes["verify"].regenerated == 0
    assert outcomes["verify"].step_seconds < 1.1 * outcomes["keep(1)"].step_seconds


def test_the_same_seed_gives_the_same_run():
    cluster = Cluster(generators=3, slots=8, steps=5, warm_up=1)
    assert cluster.simulate("verify") == cluster.simulate("verify")
    other = Cluster(generators=3, slots=8, steps=5, warm_up=1, seed=1)
    assert cluster.simulate("verify") != other.simulate("verify")


def test_lengths_of_a_run_can_be_used():
    draw = empirical([3, 5])
    assert {draw(random.Random(seed)) for seed in range(50)} == {3, 5}


def test_the_map_has_every_place():
    cluster = Cluster(generators=2, slots=8, steps=4, warm_up=1)
    places = regime(cluster, medians=(100, 200), drifts=(1e-3,), modes=("sync", "verify"))
    assert [(place.median, place.drift) for place in places] == [(100, 1e-3), (200, 1e-3)]
    assert regime_table(places).row_count == 2
    assert [right_choice(place) for place in places] == ["verify", "verify"]


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match=r"unknown '70b': the simulator has 1\.5b, 7b, 32b"):
        Cluster(model="70b").simulate("sync")
    with pytest.raises(UserError, match="'fast' is not a mode"):
        Cluster().simulate("fast")
    with pytest.raises(UserError, match="at least one device"):
        roofline(MODELS["7b"], H200, trainer_devices=0)


def test_the_command_prints_every_mode():
    arguments = ["simulate", "--generators", "2", "--slots", "8", "--steps", "4", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    outcomes = json.loads(done.stdout)
    assert list(outcomes) == list(MODES)
    assert outcomes["sync"]["step_seconds"] > outcomes["keep(4)"]["step_seconds"]
    first, size, *others = done.stderr.splitlines()
    assert first.startswith("simulating")
    assert size == "4 steps of 2 generators in each mode"
    assert [line.partition(":")[0] for line in others] == list(MODES), "as each is done"


def test_what_the_command_simulates_by_default_takes_less_than_a_minute():
    began = time.process_time()
    Cluster().simulate("sync")
    # A mode with verification takes up to twice as long as this one.
    assert 2 * len(MODES) * (time.process_time() - began) < 60


def test_a_rejected_request_drafts_no_more_than_it_had_generated():
    """50 of 100 tokens exist; the new policy rejects them, then accepts all of them as drafts."""
    shared = setting(slots=1, prompt_tokens=0, drift=1.0, redraft=1.0)
    generator, sample = SimGenerator("g", shared, random.Random(0)), SampleId(1, 0)
    generator.start(sample, 1)
    generator.advance(0.01 + 50 * 0.01)
    generator.install(1)
    generator.verify((sample,), 1)
    assert generator.tally.rejected == pytest.approx(50)
    generator.advance(generator.next_end())
    request = generator.finish_next()
    # Scoring; 1 token from verification, 49 drafted 16 per step, 50 at one per step.
    seconds = 0.51 + 0.01 + (49 / 17 + 50) * 0.01
    assert generator.tally.busy == pytest.approx(seconds, abs=0.02)
    assert request.oldest_version == 1


def test_a_rejected_answer_gets_another_length_longer_than_what_stays():
    """Its first length is known; after a rejection lengths are drawn, of which one is too short."""
    drawn = iter([7, 30])
    shared = setting(
        slots=1, prompt_tokens=0, lengths=lambda _: next(drawn), known={SampleId(1, 0): 100},
        drift=0.02, redraft=0.0, new_length=1.0,
    )  # fmt: skip
    generator, sample = SimGenerator("g", shared, random.Random(3)), SampleId(1, 0)
    generator.start(sample, 1)
    generator.advance(0.01 + 50 * 0.01)
    generator.install(1)
    generator.verify((sample,), 1)
    kept = 50 - generator.tally.rejected
    assert 7 <= kept < 30  # by the seed: so 7 is refused, and 30 is taken
    generator.advance(generator.next_end())
    assert generator.finish_next().generated == pytest.approx(30)


def test_a_share_of_the_groups_carries_signal_and_the_others_are_left_out():
    small = {"generators": 2, "slots": 16, "steps": 12, "groups_per_step": 4}
    all_of_them = Cluster(**small).simulate("verify")
    half = Cluster(**small, signal_share=0.5).simulate("verify")
    assert all_of_them.without_signal == 0
    assert half.without_signal == pytest.approx(0.5, abs=0.15)
    assert half.step_seconds > 1.5 * all_of_them.step_seconds


@pytest.mark.parametrize("share", ["0", "1.5", "half"])
def test_impossible_shares_with_signal_are_refused(share):
    done = CliRunner().invoke(app, ["simulate", "--signal-share", share])
    assert done.exit_code == 2
    assert "--signal-share" in done.output


def test_the_command_says_which_share_carries_signal():
    small = ["--generators", "2", "--slots", "8", "--steps", "4", "--signal-share", "0.5"]
    done = CliRunner().invoke(app, ["simulate", *small])
    assert done.exit_code == 0, done.output
    assert "50% of the groups carry signal" in " ".join(done.output.split())
