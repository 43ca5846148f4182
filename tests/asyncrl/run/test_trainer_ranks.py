"""The ranks of a trainer are started, told, lost and replaced together."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from fake_processes import FakeHub, FakeLauncher, run_config, spec, specs, weights

from asyncrl.controller.watchdog import first_cause
from asyncrl.errors import ConfigError
from asyncrl.fleet.pending_weight_updates import Installations
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.launch.child_spec import bind_to
from asyncrl.wire import RunKey
from asyncrl.wire.messages import to_trainer

CONFIG = run_config(trainer={"ranks": 3})


def started() -> tuple[Fleet, FakeHub]:
    hub = FakeHub(FakeLauncher())
    given = specs(ranks=3)
    fleet = Fleet(CONFIG.launcher, hub.launcher, given, hub, RunKey.new())  # type: ignore[arg-type]
    fleet.start_all()
    for rank in fleet.ranks:
        rank.ready(0, None)
    for one in fleet.every_generator:
        one.ready(0, 2, None)
    fleet.trainer.weights = weights(0)
    return fleet, hub


def test_each_rank_has_a_name_and_an_address_of_its_own_and_all_meet_in_one_file() -> None:
    fleet, hub = started()
    given = [rank.spec for rank in fleet.ranks]
    assert given == [hub.launcher.handles[one.name].spec for one in given]
    assert [(one.rank, one.ranks, bind_to(one)) for one in given] == [
        (0, 3, "ipc://b"), (1, 3, "ipc://b-1"), (2, 3, "ipc://b-2"),
    ]  # fmt: skip
    assert len({one.meeting for one in given}) == 1
    generator = hub.launcher.handles["generator-0"].spec
    assert [generator.data_address_of(rank) for rank in range(3)] == [bind_to(one) for one in given]
    assert fleet.trainer.name == "trainer"


def test_all_ranks_are_told_what_they_do_together() -> None:
    fleet, hub = started()
    asyncio.run(fleet.send_trainer(to_trainer.WriteCheckpoint()))
    assert [name for name, _ in hub.take()] == ["trainer", "trainer-1", "trainer-2"]


@pytest.mark.parametrize("lost", ["trainer", "trainer-2"])
def test_with_one_rank_the_whole_trainer_is_lost_and_replaced(lost: str) -> None:
    fleet, hub = started()
    before = hub.launcher.handles["trainer"].spec.meeting
    hub.launcher.handles[lost].code = -9
    deaths = fleet.deaths()
    worker, reason = first_cause(deaths) or (fleet.trainer, "")
    assert len(deaths) == 1
    assert (worker.name, reason) == (lost, "was killed by SIGKILL")
    assert all(one.is_gone and one.handle.exit_code() is not None for one in fleet.ranks)
    assert fleet.deaths() == [], "the others are ended, and not reported"
    assert fleet.restart_trainer(worker, None) == "trainer.1 and trainer-1.1 and trainer-2.1"
    after = [one.spec for one in fleet.ranks]
    assert [(one.name, one.rank, one.lineage) for one in after] == [
        ("trainer.1", 0, 1), ("trainer-1.1", 1, 1), ("trainer-2.1", 2, 1),
    ]  # fmt: skip
    assert {one.meeting for one in after} != {before}


def test_on_several_machines_ranks_choose_their_addresses_and_meet_in_the_runs_folder() -> None:
    apart = msgspec.structs.replace(
        spec(), ranks=2, data_address="tcp://10.0.0.1:*", run_directory="/runs/one", run_id="one-x"
    )
    assert str(apart.meeting) == "/runs/one/.ranks/one-x-ranks-0"
    before_they_are_placed = msgspec.structs.replace(apart, data_address="")
    assert [before_they_are_placed.data_address_of(rank) for rank in range(2)] == ["", ""]


def test_only_nodes_that_read_weights_fetch_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, hub = started()
    for node, name in enumerate(hub.launcher.handles):
        hub.launcher.handles[name].node = f"node-{node}"
    asked: list[set[str | None]] = []
    monkeypatch.setattr(
        Installations, "look", lambda _self, _trainer, _lineage, nodes: asked.append(set(nodes))
    )
    fleet.look_after_weights()
    assert asked == [{"node-0", "node-3"}], "rank 0's and generator-0's, not those of ranks 1 and 2"


def test_ranks_that_leave_with_a_machine_are_not_lost_before_their_checkpoint_is_complete() -> None:
    fleet, hub = started()
    for worker in fleet.ranks:
        worker.gives_way = True
    hub.launcher.handles["trainer-1"].code = hub.launcher.handles["trainer-2"].code = 0
    assert fleet.deaths() == [], "rank 0 completes the checkpoint of all"
    hub.launcher.handles["trainer"].code = 0
    left = fleet.deaths()
    assert [(worker.name, reason) for worker, reason in left] == [
        (name, "has left") for name in ("trainer", "trainer-1", "trainer-2")
    ]
    worker, _ = first_cause(left) or (fleet.trainer, "")
    fleet.configure(fleet.config.model_copy(update={"max_restarts": 0}))
    assert fleet.restart_trainer(worker, 3), "a machine that is taken away is nobody's fault"


def test_of_several_that_died_the_one_that_was_killed_is_named() -> None:
    """A rank that loses another ends by itself, perhaps before anybody looks."""
    fleet, hub = started()
    hub.launcher.handles["trainer"].code = 1
    hub.launcher.handles["trainer-1"].code = -9
    deaths = fleet.deaths()
    assert [worker.name for worker, _ in deaths] == ["trainer", "trainer-1"]
    assert first_cause(deaths) == deaths[1]
    assert first_cause(deaths[:1]) == deaths[0]
    assert first_cause([]) is None


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"trainer": {"rank_network": "eth0"}}, r"with launcher.kind: local all are on this one"),
        (
            {"trainer": {"rank_network": "10.1.0.0/16"}, "launcher": {"kind": "ray"}},
            r"neither keys nor encryption, .* launcher.trusted_network: true",
        ),
        (
            {
                "run": {"repeatable": True},
                "scheduler": {"on_update": "keep", "max_off_policy_steps": 0},
            },
            r"does not work with trainer.ranks: 2, because .* set trainer.ranks: 1",
        ),
        ({"monitoring": {"port": 65530}}, r"take the 9 ports after it"),
    ],
)
def test_what_several_ranks_do_not_work_with_is_refused(sections: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_config(**sections | {"trainer": {"ranks": 2} | sections.get("trainer", {})})
