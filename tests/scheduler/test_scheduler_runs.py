"""Whole runs of the scheduler in a fake world that asserts on every command.

`World` carries out commands and knows what can happen next. It is driven in two ways: by a clock
(random durations, to the end of the run) and by hypothesis (any order of completions, losses,
joins, duplicates and failures).
"""

import random

import pytest
from any_order import AnyOrder
from hypothesis import HealthCheck, settings
from scheduled_world import World, make_world, run_clocked

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import events
from asyncrl.scheduler.commands import RunOutcome
from asyncrl.scheduler.config import SchedulerConfig


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_runs_to_the_end_in_order(bound, seed):
    world = make_world(max_off_policy_steps=bound)
    for slots in (3, 8, 1):
        world.join(slots)
    world.trainer_joins()
    run_clocked(world, random.Random(seed))
    assert world.finished is RunOutcome.DONE
    assert not world.failed
    assert max(world.staleness) <= bound
    if bound == 0:
        assert set(world.staleness) == {0}


@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize("ahead", [1, 6, 15])
def test_verify_runs_ahead_and_trains_on_nothing_too_old(bound, ahead):
    world = make_world(
        max_off_policy_steps=bound, on_update="verify", max_runahead_groups=ahead, steps=6
    )
    for slots in (3, 8, 1):
        world.join(slots)
    world.trainer_joins()
    furthest = 0

    def look(world, _):
        nonlocal furthest
        furthest = max(furthest, max(world.placed, default=0) // 6 - world.trained)

    run_clocked(world, random.Random(1), on_time=look)
    assert world.finished is RunOutcome.DONE
    assert not world.failed
    assert set(world.staleness) == set(range(bound + 1))
    assert world.verified > 0
    assert furthest == bound + -(-ahead // 6), "it did not run ahead as far as it may"


@pytest.mark.parametrize("mode", ["keep", "verify"])
def test_without_partial_rollouts_each_sample_has_one_version(mode):
    world = make_world(max_off_policy_steps=1, on_update=mode, steps=6, partial_rollout=False)
    for slots in (3, 8, 1):
        world.join(slots)
    world.trainer_joins()
    lines = set()

    def look(world, _):
        lines.update(w for w in world.scheduler.snapshot().waits if "partial_rollout" in w)

    run_clocked(world, random.Random(1), on_time=look)
    assert world.finished is RunOutcome.DONE
    assert not world.failed
    assert any("to finish the running samples" in line for line in lines)


def test_a_generator_with_a_full_kv_space_starts_no_run_ahead():
    world = make_world(max_off_policy_steps=0, on_update="verify", steps=3, runahead_kv_limit=0.5)
    name = world.join(4)
    world.fill(name, 0.5)
    world.trainer_joins()
    while any(g.running for g in world.generators.values()):
        finishing = [h for h in world.enabled() if h[0] == "finish"]
        world.happen(finishing[0])
        world.check()
    assert max(world.placed) == 5, "no run-ahead, although there are idle slots"
    world.fill(name, 0.49)
    assert len(world.generators[name].running) == world.generators[name].limit


def test_verify_without_staleness_is_faster_than_synchronous():
    times = {}
    for mode in ("keep", "verify"):
        world = make_world(max_off_policy_steps=0, on_update=mode, steps=8)
        for slots in (8, 8):
            world.join(slots)
        world.trainer_joins()
        times[mode] = run_clocked(world, random.Random(3))
        assert set(world.staleness) == {0}
    assert times["verify"] < 0.85 * times["keep"]  # simulated time


def test_asynchronous_is_faster_than_synchronous_and_runs_ahead():
    times = {}
    for bound in (0, 1):
        world = make_world(max_off_policy_steps=bound, steps=8)
        for _ in range(2):
            world.join(4)
        world.trainer_joins()
        times[bound] = run_clocked(world, random.Random(5))
    assert max(world.staleness) == 1
    assert times[1] < 0.8 * times[0]


def test_a_generator_that_installs_slowly_skips_versions_and_the_run_ends():
    world = make_world(max_off_policy_steps=2, steps=10)
    world.join(4)
    world.join(4)
    world.trainer_joins()

    def slow(h):
        return 3000.0 if h[:2] in (("install", "g1"), ("report", "g1")) else 1.0

    run_clocked(world, random.Random(1), slow=slow)
    installed = [e.policy_version for e in world.history if isinstance(e, events.WeightsInstalled)
                 and e.generator == "g1"]  # fmt: skip
    assert world.finished is RunOutcome.DONE
    assert len(installed) < 9
    assert installed == sorted(installed)


def test_a_straggler_blocks_only_its_own_slot():
    world = make_world(max_off_policy_steps=0, steps=1, groups_per_step=8, group_size=2)
    world.join(2)
    world.trainer_joins()
    straggler = ("finish", "g0", SampleId(0, 0))
    for _ in range(100):
        others = [h for h in world.enabled() if h != straggler]
        if not others:
            break
        world.happen(others[0])
    assert [s for g in world.generators.values() for s in g.running] == [SampleId(0, 0)]
    assert world.scheduler.snapshot().groups_waiting == 7


def test_losses_and_late_joins_in_a_clocked_run():
    for seed in range(4):
        world = make_world(max_off_policy_steps=1, steps=6)
        world.join(4)
        world.join(4)
        world.trainer_joins()
        rng = random.Random(seed)
        losses = [5.0, 12.0, 13.0]

        def disturb(w, now, losses=losses, rng=rng):
            if losses and now > losses[0] and w.finished is None:
                losses.pop(0)
                w.lose(rng.choice(sorted(w.generators)), acks_lost=rng.random() < 0.5)
                w.join(4, version=0)
                w.check()

        run_clocked(world, rng, on_time=disturb)
        assert world.finished is RunOutcome.DONE
        assert not world.failed


def test_a_prompt_returns_to_its_generator_in_the_next_epoch():
    config = SchedulerConfig(group_size=2, groups_per_step=8, on_update="keep")
    world = World(config, total_steps=6, group_key=lambda group: group % 8)
    world.join(8)
    world.join(8)
    world.trainer_joins()
    run_clocked(world, random.Random(0))
    same = [world.placed[g] == world.placed[g - 8] for g in range(8, 48)]
    assert sum(same) >= 0.8 * len(same)
    assert {world.placed[g] for g in range(8)} == {"g0", "g1"}


@pytest.mark.parametrize("kept", [0, 2])
def test_a_drained_run_trains_the_steps_that_are_begun_and_begins_nothing(kept):
    """With bound 2 and room for all samples, steps 0 to 2 are begun; with room for 2, one group."""
    world = make_world(max_off_policy_steps=2, steps=9, groups_per_step=2, group_size=2)
    world.join(12 if kept else 1)
    world.trainer_joins()
    begun = set(world.placed)
    world.drain()
    run_clocked(world, random.Random(1))
    assert world.finished is RunOutcome.STOPPED
    assert set(world.placed) == begun
    assert world.trained == (kept + 1 if kept else 0)
    assert set(world.consumed) == (begun if kept else set())


def test_bounds_change_from_the_first_step_that_nothing_is_begun_of():
    """One policy step of staleness, then none with run-ahead, then none without."""
    world = make_world(on_update="verify", max_off_policy_steps=1, max_runahead_groups=1, steps=12)
    for slots in (3, 8, 1):
        world.join(slots)
    world.trainer_joins()
    keep = {"on_update": "keep", "max_runahead_groups": None}
    orders = [
        {"max_off_policy_steps": 0, "max_runahead_groups": 6},
        keep | {"max_off_policy_steps": 0},
        keep | {"max_off_policy_steps": 3},
    ]

    def order(world, _):
        if orders and world.trained >= 3 * (4 - len(orders)) - 2:
            world.change(world.config.model_copy(update=orders.pop(0)))

    run_clocked(world, random.Random(2), on_time=order)
    assert world.finished is RunOutcome.DONE
    assert len(world.changes) == 3
    assert not orders
    assert not world.failed


def test_a_resumed_run_begins_at_its_step():
    config = SchedulerConfig(group_size=2, groups_per_step=3, on_update="keep")
    world = World(config, first_step=3, total_steps=5)
    world.join(4, version=-1)
    world.trainer_joins()
    assert world.generators["g0"].install == 3
    run_clocked(world, random.Random(0))
    assert sorted(world.consumed) == list(range(9, 15))


AnyOrder.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyOrder = AnyOrder.TestCase
