"""Simulated environments: what follows from arithmetic, and what holds in every mode."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.errors import UserError
from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import events
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.simulation.cost import H100, H200, MODELS, Cost, kv_tokens
from asyncrl.simulation.environments import Environments
from asyncrl.simulation.lengths import Survival
from asyncrl.simulation.setting import Setting
from asyncrl.simulation.study import Cluster
from asyncrl.simulation.world import World

CHEAP = Cost(
    memory_seconds=0.01,
    token_seconds=1e-6,
    kv_seconds=0.0,
    step_seconds=0.0,
    train_token_seconds=1e-7,
    swap_seconds=0.0,
)
"""A token every 10 ms, whatever the number of rows; all else takes next to nothing."""
STEADY = Environments(
    2.0, 0.0, turns=3, turns_sigma=0.0, turn_tokens=50, turn_sigma=0.0, observation_tokens=20
)
"""Three turns of half a second each, with two seconds after the first two."""


def run(environments=STEADY, *, warm_up=1, **changes):
    values = {"group_size": 2, "groups_per_step": 4, "on_update": "keep"}
    config = SchedulerConfig(**values | changes.pop("scheduler", {}))
    fields = {
        "generators": 1, "slots": 8, "steps": 4, "cost": CHEAP, "lengths": lambda _: 150,
        "prompt_tokens": 10, "environments": environments, "sessions": 32,
    }  # fmt: skip
    world = World(Setting(config=config, **fields | changes))
    return world.run(warm_up), world


SYNC = {"max_off_policy_steps": 0}


def test_a_synchronous_step_waits_for_its_environments():
    outcome, _ = run(scheduler=SYNC)
    assert outcome.step_seconds == pytest.approx(3 * 0.5 + 2 * 2.0, abs=0.1)
    assert outcome.environment_idle == pytest.approx(4.0 / 5.5, abs=0.03)
    assert outcome.slots_used == pytest.approx(1.5 / 5.5, abs=0.03)
    assert (outcome.mean_length, outcome.turns_discarded) == (150, 0)


def test_while_samples_wait_others_decode_in_their_slots():
    """Asynchronous, four slots: the samples of the next step fill them, if they may be open."""
    sync, _ = run(scheduler=SYNC, slots=4, steps=8)
    waits = {"max_off_policy_steps": 2}
    ahead, _ = run(scheduler=waits, slots=4, steps=12, warm_up=4)
    narrow, _ = run(scheduler=waits, slots=4, steps=12, warm_up=4, sessions=0)
    assert ahead.slots_used > 0.85 > 0.5 > narrow.slots_used
    assert ahead.step_seconds == pytest.approx(8 * 1.5 / 4, rel=0.1)
    assert ahead.step_seconds < 0.6 * min(narrow.step_seconds, sync.step_seconds)


def test_one_turn_is_as_without_environments():
    single = Environments(5.0, turns=1, turns_sigma=0.0, turn_tokens=150, turn_sigma=0.0)
    for mode in (SYNC, {"on_update": "verify", "max_runahead_groups": 8}):
        with_environment, _ = run(single, scheduler=mode, drift=1e-3)
        without, _ = run(None, scheduler=mode, drift=1e-3)
        different = {"slots_used"}
        a, b = asdict(with_environment), asdict(without)
        assert {k: v for k, v in a.items() if k not in different} == {
            k: v for k, v in b.items() if k not in different
        }
        assert with_environment.slots_used > 0.1


def test_what_a_rejection_costs_depends_on_how_environments_go_back():
    mode = {"on_update": "verify", "max_runahead_groups": 8}
    seconds, discarded = {}, {}
    for go_back in ("restore", "replay", "start over"):
        environments = Environments(2.0, 0.5, turns=6, turn_tokens=50, go_back=go_back)
        outcome, _ = run(
            environments, scheduler=mode, steps=12, warm_up=3, drift=2e-3,
            survival=Survival("block"), redraft=0.0,
        )  # fmt: skip
        seconds[go_back], discarded[go_back] = outcome.step_seconds, outcome.turns_discarded
        assert outcome.staleness_max == 0
    assert seconds["restore"] < seconds["replay"] < seconds["start over"]
    assert 0 < discarded["restore"] < discarded["start over"]


@pytest.mark.parametrize("mode", [SYNC, {"on_update": "verify", "max_runahead_groups": 8}])
def test_plans_are_carried_out_to_the_end(mode):
    """Every sample has each of its turns; without rejections each action is given once."""
    environments = Environments(0.5, turns=4, turn_tokens=30)
    outcome, world = run(environments, scheduler=mode, drift=0.0, warm_up=0, slots=3)
    trained = [SampleId(group, sample) for group in range(16) for sample in range(2)]
    plans = [environments.plan(sample, 0) for sample in trained]
    assert outcome.mean_length == pytest.approx(sum(p.length for p in plans) / len(plans), abs=1)
    done = world._fleet.tally()
    actions = sum(len(plan.observations) for plan in plans)
    assert (done.turns, done.turns_discarded, done.rejected) == (actions, 0, 0)
    assert world._told[events.EnvironmentWaits] > 1
    for generator in world._fleet._generators.values():
        assert (generator.away, generator._kept, generator._keeping) == (0, 0.0, {})


def test_without_room_for_kv_everything_is_prefilled_again():
    room, _ = run(scheduler=SYNC)
    none, _ = run(scheduler=SYNC, kv_tokens=0)
    uneven = Environments(2.0, 1.0, turns=5, turn_tokens=50)
    some, _ = run(uneven, scheduler=SYNC, kv_tokens=1500)
    assert (room.prefilled_again, none.prefilled_again) == (0.0, 1.0)
    assert 0.0 < some.prefilled_again < 1.0
    slow = Cost(0.01, 1e-3, 0.0, 0.0, 1e-7, 0.0)
    with_kv, _ = run(scheduler=SYNC, cost=slow)
    without, _ = run(scheduler=SYNC, cost=slow, kv_tokens=0)
    assert with_kv.step_seconds < without.step_seconds


def test_lost_generators_and_trainers_lose_no_group():
    from asyncrl.simulation.failures import Failures

    failures = Failures(400.0, "generator", 3.0, 200.0, 1)
    outcome, _ = run(
        Environments(1.0, turns=4, turn_tokens=50), generators=2, steps=8, failures=failures,
        scheduler={"on_update": "verify", "max_runahead_groups": 8, "max_attempts": 50},
    )  # fmt: skip
    assert outcome.generators_lost > 0
    assert (outcome.staleness_max, outcome.groups_failed) == (0, 0)


def test_kv_that_fits():
    tokens = kv_tokens(MODELS["7b"], H200)
    assert tokens == pytest.approx((0.9 * 141e9 - 15.2e9) / 57_344, rel=1e-6)
    assert Cluster().kv_tokens() == tokens
    with pytest.raises(UserError, match=r"32B do not fit 1 H100"):
        kv_tokens(MODELS["32b"], replace(H100, memory_bytes=70e9))


def test_the_command():
    base = ["simulate", "--generators", "1", "--slots", "8", "--steps", "3", "--mode", "verify"]

    def said(*more):
        return CliRunner().invoke(app, [*base, *more])

    result = said("--environment-latency", "1", "--turns", "3", "--json")
    assert json.loads(result.stdout)["verify"]["environment_idle"] > 0
    table = said("--environment-latency", "1", "--turns", "3").output
    assert "environments that take 1 s a turn" in " ".join(table.split())
    assert "env. idle" in table
    for options, words in (
        (("--environment-latency", "1", "--median", "5"), "--median is for samples of one turn"),
        (("--environment-latency", "1", "--new-length", "0.5"), "--new-length is for samples"),
        (("--environment-latency", "1", "--regimes"), "--regimes is for samples of one turn"),
        (("--sessions", "5"), "--sessions needs --environment-latency"),
    ):
        assert words in str(said(*options).exception), options
