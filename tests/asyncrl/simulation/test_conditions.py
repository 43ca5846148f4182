"""The simulator with a network, losses and slow generators."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.errors import UserError
from asyncrl.rollout.trajectory import UNKNOWN_VERSION, SampleId
from asyncrl.scheduler import events
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.scheduler.scheduler import Scheduler
from asyncrl.simulation import fleet as fleets
from asyncrl.simulation.cost import Cost
from asyncrl.simulation.failures import Failures, Stragglers
from asyncrl.simulation.network import Network
from asyncrl.simulation.setting import Setting
from asyncrl.simulation.sim_request import SimRequest
from asyncrl.simulation.world import World

COST = Cost(
    memory_seconds=0.01, token_seconds=1e-4, kv_seconds=0.0, step_seconds=0.0,
    train_token_seconds=1e-3, swap_seconds=0.5,
)  # fmt: skip
GB = 1e9


def setting(*, scheduler=None, **changes):
    config = SchedulerConfig(**{"group_size": 2, "groups_per_step": 8} | (scheduler or {}))
    fields = {
        "generators": 4, "slots": 8, "steps": 6, "cost": COST, "prompt_tokens": 10,
        "lengths": lambda rng: 50 + int(150 * rng.random()), "generators_per_node": 2,
    }  # fmt: skip
    return Setting(config=config, **fields | changes)


# ------------------------------------------------------------------------------ network


def test_a_chain_takes_one_link_and_a_chunk_more_for_each_node():
    network = Network(bandwidth_gbit=8, latency_ms=10, chunk_mib=100 / 2**20 * 1e6)
    # 1 GB/s: 10 GB in 10 s, a chunk of 0.1 GB in 0.1 s.
    for node in (0, 1, 5):
        expected = 10 + 0.1 * node + 0.01 * (node + 1)
        assert network.weights_seconds(node, 10 * GB) == pytest.approx(expected)
    changed = replace(network, delta_share=0.25)
    assert changed.weights_seconds(3, 10 * GB) == pytest.approx(2.5 + 3 * 0.025 + 0.04)
    assert changed.fetch_seconds(10 * GB) == pytest.approx(10.01), "a joiner needs whole weights"


def test_a_tree_shares_each_link_and_is_less_deep():
    tree = Network(bandwidth_gbit=8, fan_out=2, chunk_mib=100 / 2**20 * 1e6)
    assert [tree.depth(node) for node in range(8)] == [1, 1, 2, 2, 2, 2, 3, 3]
    assert tree.weights_seconds(6, 10 * GB) == pytest.approx(2 * (10 + 2 * 0.1))


def test_each_generator_verifies_as_soon_as_the_weights_are_at_its_node(monkeypatch):
    """Two nodes: 1 s for the weights, 0.25 s for the chunk; the second node is later by a chunk."""
    installed = {}
    verified = {}
    swap, verify = fleets.Fleet.swap, fleets.Fleet.verify

    def swapping(self, event):
        installed.setdefault((event.policy_version, event.generator), self._agenda.now)
        return swap(self, event)

    def verifying(self, generator, due):
        verified.setdefault((due.min_version, generator.name), self._agenda.now)
        verify(self, generator, due)

    monkeypatch.setattr(fleets.Fleet, "swap", swapping)
    monkeypatch.setattr(fleets.Fleet, "verify", verifying)
    network = Network(bandwidth_gbit=8, chunk_mib=0.25 * GB / 2**20)
    outcome = World(setting(network=network, weights_bytes=GB)).run(1)
    for version in range(1, 6):
        first, second = installed[version, "g0"], installed[version, "g2"]
        assert second - first == pytest.approx(0.25)
        assert installed[version, "g1"] == first
    assert verified, "nothing was verified"
    for (version, name), seconds in verified.items():
        assert seconds == installed[version, name], "it did not begin with the weights"
    assert outcome.weights_seconds_max == pytest.approx(1.25)
    assert outcome.weights_seconds_mean == pytest.approx(1.125)


def test_trajectories_share_the_link_of_the_trainers_node():
    quick = World(setting(scheduler={"on_update": "keep"})).run(1)
    slow = replace(setting(scheduler={"on_update": "keep"}), network=Network(1e-5))
    outcome = World(slow).run(1)
    sent = outcome.data_bytes_per_second * outcome.step_seconds
    assert sent == pytest.approx(9 * 16 * (10 + outcome.mean_length), rel=1e-6)
    on_link = sent * 8 / 1e4  # some 16 s
    assert on_link < outcome.step_seconds < on_link + quick.step_seconds
    many = World(replace(slow, trainer_nodes=100)).run(1)
    assert many.step_seconds < quick.step_seconds + on_link / 50


def test_latency_delays_every_message():
    base = World(setting(scheduler={"on_update": "keep"})).run(1)
    far = setting(scheduler={"on_update": "keep"}, network=Network(latency_ms=100))
    # Synchronous: published, installed, finished, delivered.
    assert World(far).run(1).step_seconds == pytest.approx(base.step_seconds + 0.4, abs=0.02)


# ------------------------------------------------------------------------------- losses


def losing(mode, seed, **failures):
    config = {"on_update": mode, "max_off_policy_steps": 1, "max_attempts": 100}
    rates = {"per_node_hour": 600.0, "restart_seconds": 3.0, **failures}
    return setting(scheduler=config, seed=seed, steps=12, failures=Failures(**rates))


def record(monkeypatch):
    """Every event that schedulers are told."""
    told, tell = [], Scheduler.on_event

    def telling(self, event):
        told.append(event)
        commands = tell(self, event)
        if len(told) % 10 == 0:
            self.check()
        return commands

    monkeypatch.setattr(Scheduler, "on_event", telling)
    return told


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["verify", "keep", "recompute"])
@pytest.mark.parametrize("scope", ["generator", "node"])
def test_lost_generators_come_back_and_every_group_is_trained_once(monkeypatch, mode, seed, scope):
    told = record(monkeypatch)
    outcome = World(losing(mode, seed, scope=scope)).run(0)
    lengths = {(e.sample, e.length) for e in told if isinstance(e, events.SampleFinished)}
    assert len(lengths) == 12 * 16, "a lost answer came again with another length"
    kinds = Counter(type(event) for event in told)
    assert kinds[events.GeneratorLost] == outcome.generators_lost > 0
    assert kinds[events.GeneratorJoined] > 4, "none came back"
    steps = [event for event in told if isinstance(event, events.StepFinished)]
    assert [event.step for event in steps] == list(range(12))
    assert [group for event in steps for group in event.groups] == list(range(12 * 8))
    assert outcome.lost > 0
    assert outcome.staleness_max <= 1
    assert outcome.groups_failed == 0
    without = World(replace(losing(mode, seed), failures=Failures())).run(0)
    assert outcome.generator_idle > without.generator_idle
    assert outcome.mean_length == pytest.approx(without.mean_length, rel=0.15)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["verify", "keep"])
def test_a_lost_trainer_returns_to_its_checkpoint(monkeypatch, mode, seed):
    told = record(monkeypatch)
    rates = {"trainer_per_hour": 400.0, "checkpoint_every": 2}
    outcome = World(losing(mode, seed, **rates)).run(0)
    assert outcome.trainers_lost > 0
    trained = {}
    for event in told:
        if isinstance(event, events.StepFinished):
            trained[event.step] = event.groups
        elif isinstance(event, events.TrainerJoined):
            assert event.policy_version % 2 == 0
            trained = {
                step: groups for step, groups in trained.items() if step < event.policy_version
            }
    assert [group for step in range(12) for group in trained[step]] == list(range(12 * 8))
    assert outcome.staleness_max <= 1
    assert any(isinstance(event, events.GeneratorRewound) for event in told)


def test_groups_fail_when_their_generators_are_lost_too_often():
    config = {"on_update": "keep", "max_attempts": 1}
    failures = Failures(300.0, "generator", 3.0)
    assert World(setting(scheduler=config, failures=failures)).run(0).groups_failed > 0


def test_a_run_that_cannot_go_on_says_so():
    failures = Failures(trainer_per_hour=36000.0, restart_seconds=2000.0)
    with pytest.raises(UserError, match="did not finish step 0 within a day"):
        World(setting(failures=failures, slots=2, generators=1)).run(0)
    config = {"on_update": "keep", "max_attempts": 1}
    with pytest.raises(UserError, match=r"run failed: every group of step \d failed"):
        World(setting(scheduler=config, failures=Failures(60000.0, "node", 0.01))).run(0)


def test_tokens_of_lost_policies_are_unknown_and_no_closer_than_before():
    request = SimRequest(SampleId(0, 0), 100)
    request.segments = [(3, 10.0), (5, 20.0), (6, 30.0)]
    request.rewind(6)
    assert request.oldest_version == 3, "nothing is lost"
    request.rewind(4)
    assert request.oldest_version == UNKNOWN_VERSION
    assert request.segments == [(3, 10.0), (3, 20.0), (2, 30.0)]


# --------------------------------------------------------------------------- stragglers


def test_slow_generators_take_as_many_times_as_long():
    base = setting(scheduler={"on_update": "keep"}, lengths=lambda _: 100)
    quick = World(base).run(1)
    slow = World(replace(base, stragglers=Stragglers(1.0, 3.0))).run(1)
    # 16 answers of 100 tokens at 10 ms, after a prefill of 10 ms; the rest is as before.
    assert slow.step_seconds == pytest.approx(quick.step_seconds + 2 * 1.01, abs=0.01)
    one = World(replace(base, stragglers=Stragglers(0.25, 3.0))).run(1)
    # The slowest one decides; meanwhile the answers of the others are trained on.
    assert one.step_seconds == pytest.approx(slow.step_seconds - 12 * 110 * 1e-3, abs=0.01)
    assert one.generator_idle > slow.generator_idle + 0.1


def test_which_generators_are_slow_follows_from_the_seed():
    slow = Stragglers(0.25, 2.0)
    assert slow.slowness(8, 0) == slow.slowness(8, 0)
    assert Counter(slow.slowness(8, 1)) == {1.0: 6, 2.0: 2}
    assert len({tuple(slow.slowness(8, seed)) for seed in range(20)}) > 5


# ------------------------------------------------------------------------------ the rest


def test_the_command_takes_the_conditions_and_refuses_impossible_ones():
    run = ["simulate", "--generators", "4", "--slots", "8", "--steps", "4", "--mode", "verify"]
    given = (
        "--bandwidth 100 --latency 1 --gpus-per-node 2 --fan-out 2 --chunk 4 --delta-share 0.25 "
        "--failures 5 --failure-scope generator --restart 60 --trainer-failures 2 "
        "--checkpoint-every 2 --slow-share 0.25 --slow-factor 1.5"
    )
    done = CliRunner().invoke(app, run + given.split())
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    for part in (
        "links of 100 Gbit/s, weights by a tree of fan-out 2 with 25% of their bytes",
        "latency 1 ms, 5 generator losses per node and hour, 2 trainer losses per hour",
        "25% of the generators 1.5 times as slow",
    ):
        assert part in text
    for option, value in {
        "bandwidth": "0", "latency": "-1", "gpus-per-node": "0", "fan-out": "0", "chunk": "0",
        "delta-share": "0", "failures": "-1", "failure-scope": "rack", "restart": "0",
        "trainer-failures": "-1", "checkpoint-every": "0", "slow-share": "1.5",
        "slow-factor": "0.5",
    }.items():  # fmt: skip
        refused = CliRunner().invoke(app, [*run, f"--{option}", value])
        assert (refused.exit_code, f"--{option}" in refused.output) == (2, True)


def test_a_simulated_run_makes_no_cycles():
    """It runs without garbage collection, so cycles would stay in memory until it ends."""
    worlds = [World(losing("verify", 0, trainer_per_hour=200.0)) for _ in range(2)]
    worlds[0].run(0)  # what is made once
    gc.collect()
    gc.disable()
    try:
        worlds[1].run(0)
        assert gc.collect() < 100
    finally:
        gc.enable()
