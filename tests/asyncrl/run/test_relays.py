"""Which relays are started, and when a lost one is replaced."""

from __future__ import annotations

import asyncio

import pytest
from fake_processes import FakeLauncher, run_config, started_fleet

from asyncrl.errors import RunFailed
from asyncrl.run import relays
from asyncrl.run.fleet import Fleet
from wire.messages import to_generator, to_relay, to_trainer

CONFIG = run_config(launcher={"kind": "ray", "generators": 2, "ray": {"max_relay_restarts": 1}})
NODES = {"trainer": "a", "generator-0": "b", "generator-1": "b"}


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "_PAUSE_SECONDS", 0.0)


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
    found = [(one.name, one.node, one.handle.spec.role) for one in fleet.relays.alive]
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
