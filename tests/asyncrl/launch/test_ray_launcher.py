"""The controller's side of the Ray launcher, with a broker that speaks to nobody."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_broker
import msgspec
import pytest
from fake_processes import generator_spec, relay_spec, spec
from msgspec.structs import replace

from asyncrl.config.run_config import load_config
from asyncrl.errors import AsyncrlError, ConfigError, UserError
from asyncrl.launch.child_spec import TrainerSpec, keys_of
from asyncrl.launch.nodes import Machines, NodeInfo, ranks_apart
from asyncrl.launch.ray import connect as opening
from asyncrl.launch.ray import messages
from asyncrl.launch.ray.launcher import RayLauncher
from asyncrl.launch.ray.nodes import (
    Slot,
    refusal,
    shortage,
    without_missing_gpus,
)
from asyncrl.launch.records import ProcessRecords, end_leftovers
from asyncrl.startup.launching import slots_of
from asyncrl.wire import RunKey

CONFIG = load_config(
    None,
    ["launcher.kind=ray", "launcher.generators=2", "launcher.ray.generator.cpus=3.5"],
)
KEYS = keys_of(RunKey.new(), "trainer", "trainer")


def test_resources_that_ray_counts_itself_are_refused() -> None:
    with pytest.raises(ConfigError, match="CPU is none of Ray's custom resources"):
        load_config(None, ["launcher.kind=ray", "launcher.ray.trainer.resources={CPU: 2}"])


def wait_for(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)


@pytest.fixture
def open_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], RayLauncher]:
    (tmp_path / "logs").mkdir()
    support = str(Path(fake_broker.__file__).parent)
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([support, str(Path.cwd()), before]))
    monkeypatch.setattr(opening, "BROKER_MODULE", "fake_broker")
    monkeypatch.setattr(opening, "check_ray", lambda: None)

    def open_it(how: str) -> RayLauncher:
        monkeypatch.setenv("FAKE_BROKER", how)
        records = ProcessRecords(tmp_path)
        return asyncio.run(
            RayLauncher.open(CONFIG, slots_of(CONFIG), tmp_path, str(tmp_path), records)
        )

    return open_it


def test_processes_are_started_and_their_ends_are_known(
    open_one: Callable[[str], RayLauncher], tmp_path: Path
) -> None:
    launcher = open_one("open")
    assert launcher.lines()[1] == "trainer: node 10.0.0.2 (two)"
    assert launcher.node_ip == "10.0.0.1"
    assert launcher.threads == 3
    trainer = launcher.start(spec(), KEYS)
    wait_for(lambda: trainer.exit_code() is not None)
    assert trainer.exit_code() == -9
    assert trainer.cause() == "its Ray actor was lost: gone"
    one, two = (
        launcher.start(generator_spec(name), KEYS) for name in ("generator-0", "generator-1.4")
    )
    wait_for(lambda: one.log_tail() == "3")
    assert one.exit_code() is None
    one.end(by_force=True)
    wait_for(lambda: one.exit_code() == -9)
    one.end(by_force=True)
    lost: list[AsyncrlError] = []
    launcher.on_lost(lost.append)
    launcher._broker.process.kill()
    wait_for(lambda: lost)
    assert two.exit_code() == -9
    assert "the process that speaks to Ray ended" in two.cause()
    asyncio.run(launcher.close())


def test_nodes_that_share_memory_are_one_unless_relays_are_always_used() -> None:
    one, same, other = node(id="a"), node(id="b"), node(id="c", memory="else")
    auto = Machines("m", [one, same], always=False)
    assert [auto.name_of(one), auto.name_of(same), auto.are_several] == ["a", "a", False]
    auto.note(other)  # a replacement
    assert [auto.name_of(other), auto.are_several] == ["c", True]
    apart = [replace(same, shares_run_directory=False, disk=disk) for disk in "xyx"]
    blind = Machines("m", [one, *apart], always=False)
    assert blind.are_several, "files have to be copied"
    assert len({blind.name_of(node) for node in [one, *apart]}) == 2, "their ids are the same"
    always = Machines("m", [one, same], always=True)
    assert [always.name_of(one), always.name_of(same), always.are_several] == ["a", "b", True]
    assert Machines("elsewhere", [one], always=False).are_several, "the controller's machine counts"


def test_a_relay_goes_to_a_node_and_takes_no_slot(
    open_one: Callable[[str], RayLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = open_one("open")
    handle = launcher.start(generator_spec(), KEYS)
    wait_for(lambda: handle.log_tail() == "3")
    assert (handle.node, launcher.uses_relays) == ("b2", True), "the controller's memory is another"
    orders: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "_orders", SimpleNamespace(put=orders.append))
        relay = launcher.start(relay_spec(), KEYS, "b2")
    assert relay.node is None, "it is not placed yet"
    assert (orders[0].slot, orders[0].node) == (None, "b2")
    asyncio.run(launcher.close())


def test_the_environment_of_ray_is_on_no_command_line(
    open_one: Callable[[str], RayLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = open_one("open")
    secret = "launcher.ray.runtime_env={env_vars: {A: word}}"
    config = load_config(None, ["launcher.kind=ray", secret])
    assert config.launcher.ray.runtime_env == {"env_vars": {"A": "word"}}
    monkeypatch.setattr(launcher, "_config", config)
    orders: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "_orders", SimpleNamespace(put=orders.append))
        launcher.start(spec(), KEYS)
    asyncio.run(launcher.close())
    sent = msgspec.convert(json.loads(orders[0].order)["spec"], TrainerSpec).config()
    assert sent.launcher.ray.runtime_env == {}
    assert sent.run == config.run


def test_a_resumed_run_ends_the_broker_of_a_killed_controller(
    open_one: Callable[[str], RayLauncher], tmp_path: Path
) -> None:
    launcher = open_one("open")
    assert launcher._broker.process.poll() is None
    said: list[str] = []
    end_leftovers(tmp_path, said.append)
    wait_for(lambda: launcher._broker.process.poll() is not None)
    assert "ray (process" in said[0]
    asyncio.run(launcher.close())


def test_a_lost_head_is_told_and_ends_no_process(
    open_one: Callable[[str], RayLauncher],
) -> None:
    launcher = open_one("head")
    handle = launcher.start(generator_spec(), KEYS)
    wait_for(lambda: handle.log_tail() == "3")
    lost: list[str] = []
    launcher.on_lost(lambda error: lost.append(f"{error} {handle.exit_code()}"))
    launcher._orders.put(None)  # the writer ends
    launcher._broker.input.close()
    wait_for(lambda: lost)
    assert lost[0] == "the head is silent None"
    asyncio.run(launcher.close())


def test_a_broker_that_reads_nothing_is_killed_and_blocks_no_event_loop(
    open_one: Callable[[str], RayLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = open_one("open")
    os.kill(launcher._broker.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(opening, "CLOSE_SECONDS", 0.5)
    for _ in range(3):  # the writer waits for room in the pipe, and holds the file's lock
        launcher._orders.put(messages.Start(0, "a", "x" * (1 << 20), b""))

    async def close() -> int:
        closing, turns = asyncio.create_task(launcher.close()), 0
        while not closing.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(close()) > 10
    assert launcher._broker.process.poll() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("refuse", "the cluster is too small"),
        ("silent", "waited for an answer of the Ray head, and it did not come in time"),
        ("token", "the Ray head asks for a token"),
        ("die", "its last words: GCS is not there"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_refused(
    open_one: Callable[[str], RayLauncher], how: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        open_one(how)


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UserError, match="needs Ray, which is not installed"):
        opening.check_ray()


@pytest.mark.parametrize("setting", ["gpus=[0]", "colocate=true", "pin_cores=true"])
def test_settings_of_one_machine_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="is for launcher"):
        load_config(None, ["launcher.kind=ray", f"launcher.{setting}"])


SLOTS = (Slot("trainer", 2, 1), Slot("generator-0", 1, 4), Slot("generator-1", 1, 4))


def test_each_rank_of_the_trainer_has_a_place_of_its_own() -> None:
    ranks = ["launcher.kind=ray", "launcher.generators=1", "trainer.ranks=2"]
    config = load_config(None, [*ranks, "trainer.device=cuda", "launcher.ray.trainer.cpus=2"])
    assert [(one.name, one.cpus, one.gpus) for one in slots_of(config)] == [
        ("trainer", 2, 1), ("trainer-1", 2, 1), ("generator-0", 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ips", "network", "is_refused"),
    [
        (["10.0.0.2", "10.0.0.2"], "lo", False),
        (["10.0.0.2", "10.0.0.3"], "lo", True),
        (["10.0.0.2", "10.0.0.3"], "127.0.0.0/8", True),
        (["10.0.0.2", "10.0.0.3"], "10.0.0.0/24", False),
    ],
)
def test_ranks_on_several_machines_need_a_network(
    ips: list[str], network: str, is_refused: bool
) -> None:
    found = ranks_apart([node(ip=ip) for ip in ips], network)
    assert (found is not None) == is_refused
    assert found is None or "on several machines, 10.0.0.2 (two) and 10.0.0.3 (two)" in found


@pytest.mark.parametrize(
    ("nodes", "strategy", "said"),
    [
        ([{"CPU": 8.0, "GPU": 9.0}], "pack", None),
        ([{"CPU": 8.0, "GPU": 3.0}] * 4, "pack", "no node of the Ray cluster has 4 GPU"),
        ([{"CPU": 8.0, "GPU": 4.0}] * 2, "pack", "the Ray cluster has 8 GPU.* in all"),
        ([{"CPU": 1.0, "GPU": 8.0}] * 2, "pack", "no node of the Ray cluster has 2 CPU"),
        ([{"CPU": 8.0, "GPU": 8.0}] * 2, "strict_spread", "a node for each of 3 processes"),
        ([{"CPU": 8.0, "GPU": 8.0}] * 3, "strict_spread", None),
    ],
)
def test_too_small_a_cluster_is_known_before_anybody_waits(
    nodes: list[dict[str, float]], strategy: str, said: str | None
) -> None:
    found = shortage(SLOTS, nodes, strategy)
    if said is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(said, found)


def test_gpus_that_are_optional_are_left_out_where_there_are_none() -> None:
    slots = (Slot("trainer", 1, 1, gpus_are_optional=True), Slot("generator-0", 1, 1))
    assert [slot.gpus for slot in without_missing_gpus(slots, {"CPU": 4.0})] == [0, 1]
    assert without_missing_gpus(slots, {"GPU": 1.0}) == slots


def node(**changes: Any) -> NodeInfo:
    return replace(fake_broker.NODE, **changes)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([node(), node(), node()], None),
        ([node(), node(), node(shares_run_directory=False)], None),
        ([node(), node(), node(python="3.12")], "generator-1 would run on .* with Python 3.12"),
        ([node(), node(asyncrl="2"), node()], "generator-0 would .* which has asyncrl 2"),
        ([node(), node(asyncrl=""), node()], "which has no asyncrl"),
        ([node(), node(has_model=False), node()], "folder /model does not exist"),
        ([node(shares_run_directory=False), node(), node()], "see this run's folder /run"),
        ([node(), node(unreachable="timed out"), node()], "reached at 10.1.1.1: timed out"),
    ],
)
def test_nodes_that_do_not_fit_are_refused(nodes: list[NodeInfo], said: str | None) -> None:
    found = refusal(
        SLOTS,
        nodes,
        python="3.11",
        asyncrl="1",
        run_directory="/run",
        model="/model",
        bind_address="10.1.1.1",
    )
    if said is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(said, found)


def test_ray_is_imported_by_its_launcher_only() -> None:
    root = Path(opening.__file__).parents[3]
    importing = {
        str(path.relative_to(root))
        for package in ("asyncrl", "engine", "scheduler", "trainer", "monitoring", "wire")
        for path in (root / package).rglob("*.py")
        if re.search(r"^\s*(import ray\b|from ray\b)", path.read_text(), re.MULTILINE)
    }
    place = "asyncrl/launch/ray/"
    assert importing == {f"{place}{name}.py" for name in ("actor", "broker", "cluster")}
