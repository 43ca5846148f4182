"""Which relays are started, and when a lost one is replaced."""

from __future__ import annotations

import asyncio

import pytest
from fake_processes import FakeLauncher, run_config, started_fleet

from asyncrl.errors import RunFailed
from asyncrl.fleet import relays
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.fleet.shutdown import attended
from asyncrl.launch.child_spec import RelayKeys, keys_of
from asyncrl.wire import RunKey
from asyncrl.wire.messages import to_generator, to_relay, to_trainer

CONFIG = run_config(launcher={"kind": "ray", "generators": 2, "ray": {"max_relay_restarts": 1}})
NODES = {"trainer": "a", "generator-0": "b", "generator-1": "b"}


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(relays, "_NOT_READY_SECONDS", 0.0)


def relayed_fleet() -> tuple[Fleet, FakeLauncher]:
    launcher = FakeLauncher(uses_relays=True, nodes=dict(NODES))
    fleet, _ = started_fleet(CONFIG, launcher=launcher)
    return fleet, launcher


def test_a_launcher_of_one_machine_has_no_relays() -> None:
    fleet, _ = started_fleet(CONFIG)
    assert fleet.start_relays() == []
    assert fleet.relays.alive == []


def test_each_node_with_processes_has_one() -> None:
    fleet, launcher = relayed_fleet()
    launcher.handles["generator-0"].node = launcher.handles["generator-1"].node = None
    assert fleet.start_relays() == []
    assert [one.node for one in fleet.relays.alive] == ["a"], "the generators are not placed yet"
    launcher.handles["generator-0"].node = launcher.handles["generator-1"].node = "b"
    fleet.start_relays()
    fleet.start_relays()
    found = [(one.name, one.node, one.role) for one in fleet.relays.alive]
    assert found == [("relay-0", "a", "relay"), ("relay-1", "b", "relay")]
    assert [worker.name for worker in fleet.everyone()] == [*NODES], "no relay is a generator"


def test_a_lost_relay_is_replaced_until_the_limit() -> None:
    fleet, launcher = relayed_fleet()
    fleet.start_relays()
    launcher.handles["relay-1"].code = -9
    [(lost, reason)] = fleet.deaths()
    assert (lost.name, reason) == ("relay-1", "was killed by SIGKILL")
    assert fleet.start_relays() == ["started relay-1.1 in place of relay-1"]
    fleet.cut_off("relay-1.1", "nonsense")
    assert [worker.name for worker, _ in fleet.deaths()] == ["relay-1.1"]
    with pytest.raises(RunFailed, match=r"relay-1.1 was lost, and .*max_relay_restarts \(1\)"):
        fleet.start_relays()


def test_what_a_lost_machine_costs_counts_against_no_limit() -> None:
    """Its relay is missed before its processes are known to be lost, and cannot be replaced."""
    fleet, launcher = relayed_fleet()
    launcher.handles["generator-1"].node = "c"
    fleet.start_relays()
    launcher.handles["relay-2"].code = -9
    assert fleet.deaths()
    assert fleet.start_relays() == ["started relay-2.1 in place of relay-2"]
    launcher.handles["relay-2.1"].code = launcher.handles["generator-1"].code = -9
    launcher.handles["generator-1"].lost_with_machine = True
    assert len(fleet.deaths()) == 2
    launcher.handles["relay-1"].code = -9
    assert fleet.deaths()
    assert fleet.start_relays() == ["started relay-1.1 in place of relay-1"]
    launcher.handles["relay-1.1"].code = -9
    assert fleet.deaths()
    with pytest.raises(RunFailed, match=r"max_relay_restarts \(1\)"):
        fleet.start_relays()


def test_a_relay_that_was_never_ready_is_tried_again_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, launcher = relayed_fleet()
    fleet.start_relays()
    for worker in fleet.relays.alive:
        worker.is_ready = worker.name == "relay-0"
    launcher.handles["relay-0"].code = launcher.handles["relay-1"].code = -9
    assert len(fleet.deaths()) == 2
    monkeypatch.setattr(relays, "_NOT_READY_SECONDS", 1000.0)
    assert fleet.start_relays() == ["started relay-0.1 in place of relay-0"]
    monkeypatch.setattr(relays, "_NOT_READY_SECONDS", 0.0)
    with pytest.raises(RunFailed, match="relay-1 was lost"):
        fleet.start_relays()


def test_a_node_whose_processes_are_gone_gets_no_other() -> None:
    fleet, launcher = relayed_fleet()
    fleet.start_relays()
    for name in ("relay-1", "generator-0", "generator-1"):
        launcher.handles[name].code = -9
    assert len(fleet.deaths()) == 3
    assert fleet.start_relays() == []


def test_relays_end_last() -> None:
    fleet, launcher = relayed_fleet()
    fleet.start_relays()
    for worker in fleet.relays.alive:
        worker.is_ready = True
    asyncio.run(fleet.shut_down())
    sent = [type(message) for _, message in fleet._hub.sent]  # type: ignore[attr-defined]
    assert sent == [
        *(to_trainer.Shutdown, to_generator.Shutdown, to_generator.Shutdown),
        *(to_relay.Shutdown, to_relay.Shutdown),
    ]
    assert all(handle.code == 0 for handle in launcher.handles.values())


def test_a_relay_that_is_lost_while_the_run_ends_is_replaced() -> None:
    """The trainer's last checkpoint may be reported through it."""
    fleet, launcher = relayed_fleet()
    fleet.start_relays()

    async def main(is_over: bool) -> None:
        async with attended(fleet._hub, fleet.relays, lambda: is_over, fleet.alive):
            async with asyncio.timeout(60):
                while launcher.handles["relay-1"].code is None or not (
                    is_over or "relay-1.1" in launcher.handles
                ):
                    launcher.handles["relay-1"].code = -9
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.5 * is_over)

    asyncio.run(main(is_over=True))
    assert "relay-1.1" not in launcher.handles, "all were killed: nothing is started any more"
    asyncio.run(main(is_over=False))
    assert launcher.handles["relay-1.1"].spec.role == "relay"


def test_processes_are_told_of_relays_where_there_are_any() -> None:
    fleet, launcher = relayed_fleet()
    fleet.start_relays()
    assert all(launcher.handles[name].spec.relayed for name in NODES)
    alone = FakeLauncher()
    started_fleet(CONFIG, launcher=alone)
    assert not any(handle.spec.relayed for handle in alone.handles.values())


def test_what_is_kept_for_a_lost_process_is_given_up() -> None:
    fleet, launcher = relayed_fleet()
    launcher.handles["generator-0"].code = -9
    fleet.deaths()
    assert fleet._hub.abandoned == ["generator-0"]  # type: ignore[attr-defined]


def test_a_relay_has_no_key_to_speak_for_others() -> None:
    """A child shows the controller's pass to a hub that cannot make any."""
    key = RunKey.new()
    child, direct = (
        keys_of(key, "generator-0", "generator", relayed=relayed).control
        for relayed in (True, False)
    )
    relay = keys_of(key, "relay-0", "relay", relayed=True)
    assert isinstance(relay, RelayKeys)
    assert child.hub == relay.children.public != direct.hub
    assert child.identity == direct.identity
    assert relay.children.passes == b""
    assert relay.control == key.line("control", "relay-0")


def test_a_silent_relay_is_replaced_before_those_who_speak_through_it_are_silent() -> None:
    fleet, launcher = relayed_fleet()
    fleet.start_relays()
    everyone = [*fleet.alive, *fleet.relays.alive]
    for worker in everyone:
        worker.is_ready = True
        worker.heard -= 0.3 * CONFIG.launcher.silence_seconds
    found = fleet.deaths()
    assert [worker.name for worker, _ in found] == ["relay-0", "relay-1"]
    assert (
        "sent nothing for 36 s (launcher.silence_seconds, a quarter of it for a relay)"
        in found[0][1]
    )
    assert [worker.name for worker in fleet.alive] == [*NODES]
    assert launcher.handles["relay-0"].ended == ["kill"]
