"""When generators are told to install weights, and that no verification is lost on the way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_processes import FakeLauncher, run_config, started_fleet, weights
from msgspec.structs import replace

from asyncrl.errors import RunFailed
from asyncrl.fleet.weight_routes import MAX_TRIES
from asyncrl.wire.messages import from_relay, to_relay
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.weights.layout import BroadcastPlace, WeightManifest

CONFIG = run_config(launcher={"kind": "ray", "generators": 2})
NODES = {"trainer": "a", "generator-0": "a", "generator-1": "b"}
NEAR, FAR = "generator-0", "generator-1"
RELAYS = ("relay-0", "relay-1")


def published(version: int, trainer: str = "trainer") -> WeightManifest:
    return replace(weights(version), path=f"/gone/asyncrl-run-{trainer}-weights-{version % 2}")


def verify(version: int) -> tuple[tg.Verify, ...]:
    return (tg.Verify((), (), version),)


class Run:
    """A trainer and a generator on one node, another generator on another one."""

    def __init__(self) -> None:
        self.launcher = FakeLauncher(uses_relays=True, nodes=dict(NODES))
        self.fleet, self.hub = started_fleet(CONFIG, launcher=self.launcher)
        self.publish(0)
        self.fleet.start_relays()
        for name in RELAYS:
            self.ready(name)

    def ready(self, name: str) -> None:
        worker = self.fleet.relays.get(name)
        assert worker is not None
        worker.ready(from_relay.RelayReady(f"{name}/source", f"{name}/node"))
        self.fleet.look_after_weights()

    def publish(self, version: int, trainer: str = "trainer") -> None:
        self.offer(published(version, trainer))

    def offer(self, weights: WeightManifest) -> None:
        self.fleet.trainer.weights = weights
        self.fleet.look_after_weights()

    def told(self, name: str) -> list[Any]:
        """What one process was told since the last call."""
        found = [message for peer, message in self.hub.sent if peer == name]
        self.hub.sent = [one for one in self.hub.sent if one[0] != name]
        return found

    def fetched(self) -> to_relay.FetchWeights:
        """The last order of the far relay."""
        orders = [one for one in self.told("relay-1") if isinstance(one, to_relay.FetchWeights)]
        return orders[-1]

    def arrive(self, relay: str = "relay-1") -> WeightManifest:
        order = self.fetched()
        manifest = replace(order.manifest, path=f"/{relay}/{order.manifest.policy_version}")
        worker = self.fleet.relays.get(relay)
        assert worker is not None
        here = from_relay.WeightsHere(order.attempt, manifest, 0.1, 5, {})
        self.fleet.installations.arrived(worker, here)
        return manifest

    def fail(self, *, superseded: bool) -> None:
        relay = self.fleet.relays.get("relay-1")
        assert relay is not None
        failed = from_relay.WeightsFailed(self.fetched().attempt, "nothing came", superseded)
        self.fleet.installations.failed(relay, failed)

    def check(self, path: str, *, exists: bool, relay: str = "relay-1") -> None:
        worker = self.fleet.relays.get(relay)
        assert worker is not None
        self.fleet.installations.checked(worker, from_relay.WeightsChecked(path, exists))

    def installed(self, version: int) -> bool:
        [worker] = [one for one in self.fleet.generators() if one.name == FAR]
        return self.fleet.installations.is_answered(worker, version)


@pytest.fixture
def run() -> Run:
    return Run()


def test_the_trainers_node_installs_at_once_and_another_when_its_relay_has_them(run: Run) -> None:
    run.publish(1)
    for name in (NEAR, FAR):
        run.fleet.install(name, 1, rebuild_kv=True, verify=verify(1))
    assert run.told(NEAR) == [tg.InstallWeights(published(1), True, 0, verify(1))]
    assert run.told("relay-0")[-1].manifest == published(1)
    assert run.told(FAR) == []
    run.arrive()
    assert run.told(FAR) == [], "that was version 0, which was on its way"
    manifest = run.arrive()
    assert run.told(FAR) == [tg.InstallWeights(manifest, True, 0, verify(1))]
    assert run.installed(1)


def test_relays_know_each_others_keys_and_nobody_elses(run: Run) -> None:
    [parent] = run.fetched().parents
    assert (parent.name, parent.address) == ("relay-0", "relay-0/source")
    keys = parent.keys
    assert keys is not None
    hub = run.fleet.installations.run_key.hub("weights relay-0")
    assert (hub.public, hub.name_in(keys.identity)) == (keys.hub, "relay-1")


def test_a_newer_version_is_no_reason_to_wait(run: Run) -> None:
    run.arrive()
    run.publish(1)
    run.fleet.install(FAR, 1, verify=verify(1))
    run.publish(2)
    assert run.arrive().policy_version == 1
    [command] = run.told(FAR)
    assert (command.manifest.policy_version, command.verify) == (1, verify(1))


def test_a_superseded_version_keeps_its_verifications(run: Run) -> None:
    run.arrive()
    run.publish(1)
    run.fleet.install(FAR, 1, verify=verify(1))
    run.publish(2)
    run.fail(superseded=True)  # the trainer has overwritten version 1
    assert run.told(FAR) == []
    manifest = run.arrive()
    assert run.told(FAR) == [tg.InstallWeights(manifest, False, 0, verify(1))]
    assert manifest.policy_version == 2


def test_a_version_that_only_a_lost_trainer_had_is_not_waited_for(run: Run) -> None:
    """The evaluation still wants version 5; the new trainer has published version 0."""
    run.fleet.install(FAR, 5)
    manifest = run.arrive()
    assert run.told(FAR) == [tg.InstallWeights(manifest)]


def test_two_requests_that_wait_are_one(run: Run) -> None:
    run.publish(1)
    run.arrive()
    run.fleet.install(FAR, 1, verify=verify(1))
    run.fleet.install(FAR, 1, rebuild_kv=True, verify=verify(0))
    manifest = run.arrive()
    assert run.told(FAR) == [tg.InstallWeights(manifest, True, 0, verify(1) + verify(0))]


def test_what_could_not_be_read_is_no_answer_and_is_told_again(run: Run) -> None:
    """The relay was killed between its word and the generator's look at the file."""
    run.publish(1)
    run.arrive()
    manifest = run.arrive()
    run.fleet.install(FAR, 1, verify=verify(1))
    assert len(run.told(FAR)) == 1
    assert not run.installed(0)
    assert run.told(FAR) == [], "first the relay says whether its file is there"
    assert run.told("relay-1") == [to_relay.CheckWeights(manifest.path)]
    run.launcher.handles["relay-1"].code = -9
    run.fleet.deaths()
    run.fleet.relays._started.clear()
    run.fleet.start_relays()
    run.fleet.look_after_weights()
    run.ready("relay-1.1")
    [order] = run.told("relay-1.1")
    relay = run.fleet.relays.get("relay-1.1")
    assert relay is not None
    new = replace(manifest, path="/new/1")
    here = from_relay.WeightsHere(order.attempt, new, 0.1, 5, {})
    run.fleet.installations.arrived(relay, here)
    assert run.told(FAR) == [tg.InstallWeights(new, False, 0, verify(1))]
    assert run.installed(1)
    assert run.installed(1), "a repeated answer is the scheduler's"


def test_a_broadcast_is_told_of_at_once_and_fetched_only_if_it_did_not_arrive(run: Run) -> None:
    run.arrive()
    offered = replace(published(1), broadcast=BroadcastPlace("a", 1, "s"))
    run.offer(offered)
    run.told("relay-0")
    for name in (NEAR, FAR):
        run.fleet.install(name, 1, rebuild_kv=True, verify=verify(1))
        assert run.told(name) == [tg.InstallWeights(offered, True, 0, verify(1))]
    run.fleet.look_after_weights()
    assert run.told("relay-0") == run.told("relay-1") == []
    assert run.installed(1)

    newer = replace(published(2), broadcast=offered.broadcast)
    run.offer(newer)
    run.fleet.install(FAR, 2, verify=verify(2))
    assert not run.installed(1)
    assert len(run.told(FAR)) == 1
    run.fleet.look_after_weights()
    assert run.told("relay-0")[-1].manifest == published(2)
    manifest = run.arrive()
    assert manifest.broadcast is None
    assert run.told(FAR) == [tg.InstallWeights(manifest, False, 0, verify(2))]
    assert run.installed(2)


def test_a_generator_that_missed_a_broadcast_is_told_of_a_newer_one(run: Run) -> None:
    run.arrive()
    place = BroadcastPlace("a", 1, "s")
    older, newer = (replace(published(version), broadcast=place) for version in (1, 2))
    run.offer(older)
    run.fleet.install(FAR, 1, verify=verify(1))
    run.offer(newer)
    assert not run.installed(0)
    assert run.told(FAR) == [tg.InstallWeights(one, False, 0, verify(1)) for one in (older, newer)]
    assert run.installed(2)


def test_who_has_lost_a_file_is_replaced(run: Run) -> None:
    manifest = run.arrive()
    run.fleet.install(FAR, 0)
    assert not run.installed(-1)
    run.check(manifest.path, exists=False)
    assert run.launcher.handles["relay-1"].ended == ["kill"]
    run.fleet.installations.check(run.fleet.trainer)
    assert run.told("relay-0")[-1] == to_relay.CheckWeights(published(0).path)
    run.check(published(0).path, exists=True, relay="relay-0")
    assert run.launcher.handles["trainer"].ended == []
    run.check(published(0).path, exists=False, relay="relay-0")
    assert run.launcher.handles["trainer"].ended == ["kill"]
    assert run.launcher.handles["relay-0"].ended == []


def test_a_trainer_whose_file_is_gone_before_anybody_has_read_it_is_replaced(run: Run) -> None:
    orders = [one for one in run.told("relay-0") if isinstance(one, to_relay.ServeWeights)]
    relay = run.fleet.relays.get("relay-0")
    assert relay is not None
    failed = from_relay.WeightsFailed(orders[-1].attempt, "it was removed", True)
    run.fleet.installations.failed(relay, failed)
    assert run.told("relay-0") == [to_relay.CheckWeights(published(0).path)]
    run.check(published(0).path, exists=False, relay="relay-0")
    assert run.launcher.handles["trainer"].ended == ["kill"]


def test_a_generator_that_cannot_read_what_is_there_is_replaced(run: Run) -> None:
    manifest = run.arrive()
    run.fleet.install(FAR, 0)
    for _ in range(MAX_TRIES):
        assert len(run.told(FAR)) == 1
        assert not run.installed(-1)
        run.check(manifest.path, exists=True)
    assert run.launcher.handles[FAR].ended == []
    assert not run.installed(-1)
    assert run.launcher.handles[FAR].ended == ["kill"]


def test_requests_end_with_their_trainer_and_their_generator(run: Run) -> None:
    run.arrive()
    run.publish(1)
    run.fleet.install(FAR, 1)
    run.fleet.trainer.is_gone = True
    run.fleet.look_after_weights()
    assert run.told("relay-0")[-1] == to_relay.ForgetWeights()
    run.fleet.install(FAR, 1)
    run.fleet.trainer.is_gone = False
    run.publish(1, "trainer.1")
    run.arrive()
    assert run.told(FAR) == [], "whoever asked asks again"
    run.publish(2, "trainer.1")
    run.fleet.install(FAR, 2)
    run.fleet.installations.drop(FAR)
    run.arrive()
    assert run.told(FAR) == []


def test_a_node_without_processes_gets_no_weights_until_it_has_one_again(run: Run) -> None:
    run.arrive()
    [far] = [one for one in run.fleet.generators() if one.name == FAR]
    run.launcher.handles[FAR].code = 0
    run.fleet.deaths()
    run.publish(1)
    assert run.told("relay-1") == []
    run.launcher.nodes["generator-1.1"] = "b"
    run.fleet.restart(far)
    run.fleet.look_after_weights()
    assert run.fetched().manifest == published(1)


def test_a_node_that_gets_no_weights_ends_the_run_and_is_named(run: Run) -> None:
    for _ in range(MAX_TRIES):
        run.fail(superseded=False)
    assert run.launcher.handles["relay-1"].ended == ["kill"]
    [(_, reason)] = run.fleet.deaths()
    assert "cannot get the weights: nothing came" in reason
    for number in range(MAX_TRIES):
        order = to_relay.FetchWeights(published(0), (), -1)
        if number == 0:
            run.fleet.relays._started.clear()
            run.fleet.start_relays()
            run.ready("relay-1.1")
        [order] = run.told("relay-1.1")
        relay = run.fleet.relays.get("relay-1.1")
        assert relay is not None
        failed = from_relay.WeightsFailed(order.attempt, "nothing came", False)
        if number < MAX_TRIES - 1:
            run.fleet.installations.failed(relay, failed)
    with pytest.raises(RunFailed, match="do not reach a node of the run, after 6 tries: nothing"):
        run.fleet.installations.failed(relay, failed)


def test_on_one_machine_nothing_waits_and_a_missing_file_ends_the_trainer(tmp_path: Path) -> None:
    fleet, hub = started_fleet(CONFIG)
    fleet.trainer.weights = replace(weights(1), path=str(tmp_path / "weights"))
    fleet.install(FAR, 1)
    assert hub.take() == [(FAR, tg.InstallWeights(fleet.trainer.weights))]
    (tmp_path / "weights").touch()
    fleet.installations.check(fleet.trainer)
    assert hub.launcher.handles["trainer"].ended == []
    (tmp_path / "weights").unlink()
    fleet.installations.check(fleet.trainer)
    assert hub.launcher.handles["trainer"].ended == ["kill"]
    asyncio.run(fleet.shut_down())
