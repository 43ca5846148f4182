"""Samples that wait for their environment take no slot: others are started meanwhile."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled_world import World

from asyncrl.scheduler import events
from asyncrl.scheduler.commands import RunOutcome
from asyncrl.scheduler.config import SchedulerConfig


def made(*, sessions, mode="verify", ahead=6, k=0, **values):
    ahead = {"max_runahead_groups": ahead} if mode == "verify" else {}
    config = SchedulerConfig(
        **{"group_size": 2, "groups_per_step": 3, "on_update": mode, "max_off_policy_steps": k}
        | ahead
        | values
    )
    return World(config, total_steps=3, sessions=sessions)


def wait(world, name, count):
    """The first samples of a generator wait for their environments, and it reports so."""
    g = world.generators[name]
    g.away = set(list(g.running)[:count])
    g.told_away = count
    world.tell(events.EnvironmentWaits(name, count))
    world.scheduler.check()


def test_run_ahead_takes_the_slots_of_samples_that_wait():
    world = made(sessions=16, max_in_flight_per_generator=4)
    name = world.join(4)
    world.trainer_joins()
    g = world.generators[name]
    assert len(g.running) == 4
    wait(world, name, 3)
    assert len(g.running) == 7
    assert max(sample.group for sample in g.running) == 3, "a group of the step after"
    wait(world, name, 1)  # two are back: they wait for slots here, and nothing is started
    assert len(g.running) == 7
    wait(world, name, 7)
    assert len(g.running) == 11


def test_so_many_environments_are_open_and_no_more():
    world = made(sessions=6, max_in_flight_per_generator=4, k=1)
    name = world.join(4)
    world.trainer_joins()
    wait(world, name, 4)
    assert len(world.generators[name].running) == 6
    few = made(sessions=2, max_in_flight_per_generator=4)
    name = few.join(4)
    few.trainer_joins()
    wait(few, name, 4)
    assert len(few.generators[name].running) == 4, "a smaller number of sessions lowers no limit"


def test_kv_that_is_kept_for_them_stops_run_ahead_and_not_due_samples():
    world = made(sessions=64, max_in_flight_per_generator=2, runahead_kv_limit=0.5)
    name = world.join(2)
    world.trainer_joins()
    world.fill(name, 0.9)
    wait(world, name, 2)
    wait(world, name, 4)
    wait(world, name, 64)
    assert {sample.group for sample in world.generators[name].running} == {0, 1, 2}


def test_a_generator_whose_samples_wait_takes_over_groups():
    """The one with idle slots gets work, although its samples are not finished."""
    world = made(sessions=64, mode="keep", groups_per_step=4, max_in_flight_per_generator=2)
    first, second = world.join(2), world.join(2)
    world.trainer_joins()
    assert all(len(g.running) == 2 for g in world.generators.values())
    wait(world, first, 2)
    wait(world, first, 4)
    assert [len(world.generators[name].running) for name in (first, second)] == [6, 2]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    sessions=st.sampled_from([0, 3, 8, 64]),
    mode=st.sampled_from(["verify", "keep"]),
    k=st.integers(0, 1),
)
def test_in_any_order_every_group_is_trained_on_once(seed, sessions, mode, k):
    """Samples leave for their environments and come back; reports are late. The world asserts."""
    rng = random.Random(seed)
    world = made(sessions=sessions, mode=mode, k=k)
    for slots in (2, 3):
        world.join(slots)
    world.trainer_joins()
    for _ in range(4000):
        if world.finished is not None:
            break
        happenings = world.enabled()
        for g in world.generators.values():
            present = [sample for sample in g.running if sample not in g.away]
            happenings += [("leave", g, sample) for sample in present[:1]] if sessions else []
            happenings += [("back", g, sample) for sample in sorted(g.away)[:2]]
            happenings += [("say", g, len(g.away))] if len(g.away) != g.told_away else []
        kind, g, what = rng.choice(happenings)
        if kind == "leave":
            g.away.add(what)
        elif kind == "back":
            g.away.discard(what)
        elif kind == "say":
            g.told_away = what
            world.tell(events.EnvironmentWaits(g.name, what))
        else:
            world.happen((kind, g, what))
        world.scheduler.check()
    assert world.finished is RunOutcome.DONE
    assert sorted(world.consumed) == list(range(9))
