"""The simulator: what it must reproduce by arithmetic, and what no mode may do to the data."""

from __future__ import annotations

import json
import math
import random

import pytest
from typer.testing import CliRunner

from asyncrl.cli import app
from asyncrl.errors import UserError
from asyncrl.simulation.cost import H200, MODELS, Cost, roofline
from asyncrl.simulation.lengths import empirical, lognormal, survivors
from asyncrl.simulation.study import MODES, Cluster, compare, regime, regime_table
from asyncrl.simulation.world import MESSAGE_SECONDS, Setting, World
from scheduler.config import SchedulerConfig

CHEAP = Cost(
    memory_seconds=0.01,
    token_seconds=1e-4,
    kv_seconds=0.0,
    step_seconds=0.0,
    train_token_seconds=1e-3,
    swap_seconds=0.0,
)


def setting(**changes):
    config = SchedulerConfig(
        **{"group_size": 2, "groups_per_step": 4} | changes.pop("scheduler", {})
    )
    fields = {
        "generators": 1, "slots": 8, "steps": 3, "cost": CHEAP, "lengths": lambda _: 100,
        "prompt_tokens": 10,
    }  # fmt: skip
    return Setting(config=config, **fields | changes)


def test_a_synchronous_step_takes_what_arithmetic_says():
    outcome = World(setting(scheduler={"max_off_policy_steps": 0})).run(1)
    prefills, decoding = 8 * 0.01, 100 * 0.01
    training = 8 * 110 * 1e-3
    # All rows end together: the trainer starts when the last one has.
    assert outcome.step_seconds == pytest.approx(
        prefills + decoding + training + 6 * MESSAGE_SECONDS, abs=3 * MESSAGE_SECONDS
    )
    assert outcome.trainer_idle == pytest.approx(1 - training / outcome.step_seconds, abs=1e-3)
    assert outcome.generator_idle == pytest.approx(
        1 - (prefills + decoding) / outcome.step_seconds, abs=5e-3
    )
    assert (outcome.staleness_max, outcome.regenerated) == (0, 0)


def test_more_rows_than_a_step_carries_for_nothing_cost_arithmetic():
    cost = roofline(MODELS["7b"], H200, trainer_devices=8)
    few, many = cost.decode(8, 0), cost.decode(4 * cost.free_tokens, 0)
    assert few == pytest.approx(cost.step_seconds + cost.memory_seconds)
    assert many == pytest.approx(cost.step_seconds + 4 * cost.memory_seconds)
    # 15.2 GB over 3.36 TB/s, 15.2 GFLOP a token at 494 TFLOP/s.
    assert cost.memory_seconds == pytest.approx(4.52e-3, rel=0.01)
    assert cost.token_seconds == pytest.approx(3.07e-5, rel=0.01)


def test_a_prefix_survives_as_the_total_variation_says():
    rng = random.Random(0)
    kept = [survivors([(0, 500.0), (1, 500.0)], 2, 1e-3, rng) for _ in range(20000)]
    first, second = 1 - 2e-3, 1 - 1e-3
    expected = sum(first**i for i in range(1, 501))
    expected += first**500 * sum(second**i for i in range(1, 501))
    spread = math.sqrt(sum((k - expected) ** 2 for k in kept)) / len(kept)
    assert abs(sum(kept) / len(kept) - expected) < 4 * spread
    assert survivors([(2, 50.0)], 2, 1e-3, rng) == 50
    assert survivors([(0, 50.0)], 2, 0.6, rng) == 0


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_on_answers_of_the_same_length_within_its_staleness(mode):
    """Seeds are fixed. False alarms: below 1e-4 for each mode, were they drawn anew."""
    cluster = Cluster(
        generators=4, slots=32, steps=13, warm_up=1, median=300, longest=2000, drift=1e-3
    )
    outcome = cluster.simulate(mode)
    rng, draw = random.Random(1), lognormal(300, 1.0, 2000)
    lengths = [draw(rng) for _ in range(20000)]
    mean = sum(lengths) / len(lengths)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in lengths) / len(lengths))
    trained = 11 * cluster.step_groups * cluster.group_size
    assert abs(outcome.mean_length - mean) < 4 * deviation * math.sqrt(1 / trained + 1 / 20000)
    assert outcome.staleness_max == MODES[mode][0]["max_off_policy_steps"]
    assert (outcome.regenerated > 0) == (MODES[mode][0]["on_update"] == "verify")
    assert 0 <= outcome.generator_idle < 1
    assert 0 <= outcome.trainer_idle < 1


def test_without_drift_nothing_is_written_again_and_verification_is_nearly_free():
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


def test_what_is_not_there_is_named():
    with pytest.raises(UserError, match=r"knows no '70b'; there are 1\.5b, 7b, 32b"):
        Cluster(model="70b").simulate("sync")
    with pytest.raises(UserError, match="no mode 'fast'"):
        Cluster().simulate("fast")
    with pytest.raises(UserError, match="at least one device"):
        roofline(MODELS["7b"], H200, trainer_devices=0)


def test_the_command_prints_every_mode():
    arguments = ["simulate", "--generators", "2", "--slots", "8", "--steps", "4", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    outcomes = json.loads(done.output)
    assert list(outcomes) == list(MODES)
    assert outcomes["sync"]["step_seconds"] > outcomes["keep(4)"]["step_seconds"]
