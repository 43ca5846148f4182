"""The controller's side of the Ray launcher, with a driver that speaks to nobody."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import fake_ray_driver
import msgspec
import pytest
from fake_processes import generator_spec, spec
from msgspec.structs import replace

from asyncrl.config.run_config import RunConfig, load_config
from asyncrl.errors import AsyncrlError, ConfigError, UserError
from asyncrl.launch.agents.agent_state import AgentProcess
from asyncrl.launch.agents.wait_for_agents import needs_of_run
from asyncrl.launch.child_spec import TrainerSpec, keys_of
from asyncrl.launch.nodes import Machines, NodeInfo, ranks_apart
from asyncrl.launch.ray import launcher as launcher_of_ray
from asyncrl.launch.ray import messages
from asyncrl.launch.ray.launcher import DriverProcess, RayLauncher, check_ray, open_ray
from asyncrl.launch.ray.messages import Slot, shortage, without_missing_gpus
from asyncrl.launch.records import ProcessRecords, end_leftovers
from asyncrl.startup.launching import slots_of
from asyncrl.wire import RunKey
from asyncrl.wire.messages import from_agent, to_agent

CONFIG = load_config(
    None,
    ["launcher.kind=ray", "launcher.generators=2", "launcher.ray.generator.cpus=3.5"],
)
KEYS = keys_of(RunKey.new(), "trainer", "trainer")
NODE = NodeInfo(
    "b2", "10.0.0.2", "two", "m", "3.11", "1", shares_run_directory=True, has_model=True
)


def test_resources_that_ray_counts_itself_are_refused() -> None:
    with pytest.raises(ConfigError, match="CPU is none of Ray's custom resources"):
        load_config(None, ["launcher.kind=ray", "launcher.ray.trainer.resources={CPU: 2}"])


async def until(condition: Callable[[], Any]) -> Any:
    ends = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < ends, "it did not come"
        await asyncio.sleep(0.02)
    return found


@pytest.fixture(autouse=True)
def _a_driver_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    support = str(Path(fake_ray_driver.__file__).parent)
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([support, str(Path.cwd()), before]))
    monkeypatch.setenv("FAKE_DRIVER", "open")
    monkeypatch.setattr(launcher_of_ray, "DRIVER_MODULE", "fake_ray_driver")


class Opened:
    """A launcher, and agents that the test plays."""

    def __init__(self, run: Path, launcher: RayLauncher) -> None:
        self.run = run
        self.launcher = launcher
        self.roster = launcher.roster

    def join(self, slot: str, node: str = "n1", life: str = "000001") -> None:
        ours, name = self.roster._needs.ours, f"{slot}-{life}"
        role = "trainer" if slot.startswith("trainer") else "generator"
        hello = from_agent.Hello(role, "host", "10.0.0.2", 0, ours.python, ours.asyncrl, "b")
        welcome = self.roster.hello(name, hello, time.monotonic())
        assert isinstance(welcome, to_agent.Welcome)
        info = replace(NODE, id=node, python=ours.python, asyncrl=ours.asyncrl)
        facts = msgspec.to_builtins(info)
        self.state(name, facts=json.dumps(facts))
        self.roster.place()

    def state(self, agent: str, *processes: tuple[str, int | None], facts: str = "") -> None:
        hosted = tuple(from_agent.Hosted(name, code, "", "", "") for name, code in processes)
        state = from_agent.State(self.roster.session, facts, hosted)
        assert self.roster.state(agent, state, time.monotonic())

    def start(self, name: str) -> AgentProcess:
        what = spec() if name.startswith("trainer") else generator_spec(name)
        handle = self.launcher.start(what, KEYS)
        assert isinstance(handle, AgentProcess)
        return handle

    def says(self, message: messages.FromDriver) -> None:
        """As if the driver had said it."""
        stream = self.launcher._driver.process.stdout
        assert stream is not None
        stream.feed_data(messages.line(message))

    @property
    def log(self) -> str:
        return (self.run / "logs" / "ray.log").read_text()


def needs(config: RunConfig, run: Path, records: ProcessRecords) -> Any:
    return needs_of_run(
        config,
        gpus={"trainer": 0, "generator": 0},
        optional_gpus=frozenset(),
        run_directory=run,
        model_path=str(run),
        records=records,
    )


def with_launcher(
    run: Path, check: Callable[[Opened], Awaitable[None]], config: RunConfig = CONFIG
) -> None:
    async def carry_out() -> None:
        records = ProcessRecords(run)
        driver = await DriverProcess.start(run / "logs" / "ray.log")
        records.add("ray", driver.process.pid)
        slots = slots_of(config)
        driver.tell(messages.Open(None, slots, "pack", {}, 1.0, 1.0))
        opened = await driver.opened()
        asked = needs(config, run, records)
        try:
            launcher = RayLauncher(config, asked, RunKey.new(), driver, opened, slots, print)
        except UserError:
            await driver.close()
            raise
        try:
            await check(Opened(run, launcher))
        finally:
            await launcher.close()

    asyncio.run(carry_out())


def test_each_process_is_on_the_agent_of_its_slot_and_so_are_replacements(tmp_path: Path) -> None:
    async def check(world: Opened) -> None:
        one, zero = world.start("generator-1"), world.start("generator-0.3")
        trainer = world.start("trainer")
        world.join("generator-0")
        world.join("trainer", "n2")
        assert [one.node, zero.node] == [None, "n1"]
        assert (trainer.node, trainer.address) == ("n1", "10.0.0.2"), "they share memory"
        assert one.lost_with_machine, "should it be given up: it had no node"
        world.join("generator-1")
        assert one.node == "n1"
        assert not one.lost_with_machine
        assert [one.spec.threads, trainer.spec.threads] == [3, 1]
        assert world.launcher.uses_relays, "the controller's memory is another"

    with_launcher(tmp_path, check)


def test_a_lost_actor_and_a_lost_node_are_told_apart(tmp_path: Path) -> None:
    async def check(world: Opened) -> None:
        for slot in ("trainer", "generator-0"):
            world.join(slot, f"node of {slot}")
        trainer, generator = world.start("trainer"), world.start("generator-0")
        world.says(messages.Lost("generator-0", "its Ray actor was lost: killed"))
        await until(lambda: generator.exit_code() == -9)
        assert generator.cause().endswith("was lost: its Ray actor was lost: killed")
        assert not generator.lost_with_machine, "it counts"
        again = world.start("generator-0.1")
        assert again.node is None
        world.join("generator-0", "node of generator-0", life="000002")
        assert again.node is not None
        world.says(messages.NodeLeft("node of trainer"))
        await until(lambda: trainer.exit_code() == -9)
        assert "its node left the Ray cluster" in trainer.cause()
        assert trainer.lost_with_machine, "it counts against no limit"
        assert again.exit_code() is None

    with_launcher(tmp_path, check)


@pytest.mark.parametrize("code", [143, 0])
def test_an_end_that_may_be_its_machines_is_held_until_that_is_known(
    tmp_path: Path, code: int
) -> None:
    async def check(world: Opened) -> None:
        for slot in ("trainer", "generator-0", "generator-1"):
            world.join(slot)
        one, two, failed = map(world.start, ("generator-0", "generator-1", "trainer"))
        world.state("trainer-000001", ("trainer", 1))
        assert failed.exit_code() == 1, "an error is told at once"
        world.roster.hold_seconds = 1000.0
        world.state("generator-0-000001", ("generator-0", code))
        assert one.exit_code() is None
        world.says(messages.NodeLeft("n1"))
        await until(lambda: one.exit_code() == -9)
        assert one.lost_with_machine
        world.join("generator-1", life="000002")
        two = world.start("generator-1.1")
        world.state("generator-1-000002", ("generator-1.1", code))
        assert two.exit_code() is None
        world.roster.hold_seconds = 0.0
        world.state("generator-1-000002", ("generator-1.1", code))
        assert (two.exit_code(), two.lost_with_machine) == (code, False)
        world.roster.hold_seconds = 1000.0
        asked = world.start("generator-1.2")
        asked.end(by_force=False)
        world.state("generator-1-000002", ("generator-1.2", code))
        assert asked.exit_code() == code, "it was asked for"

    with_launcher(tmp_path, check)


def test_the_secret_and_the_environment_of_ray_are_nowhere_to_be_read(tmp_path: Path) -> None:
    setting = "launcher.ray.runtime_env={env_vars: {A: word}}"
    config = load_config(None, ["launcher.kind=ray", setting])
    assert config.launcher.ray.runtime_env == {"env_vars": {"A": "word"}}

    async def check(world: Opened) -> None:
        process = world.start("trainer")
        assert isinstance(process.spec, TrainerSpec)
        sent = process.spec.config()
        assert sent.launcher.ray.runtime_env == {}
        assert sent.run == config.run
        await until(lambda: f"serving Serve('{world.launcher.address}')" in world.log)

    with_launcher(tmp_path, check, config)


def test_a_resumed_run_ends_the_driver_of_a_killed_controller(tmp_path: Path) -> None:
    async def check(world: Opened) -> None:
        said: list[str] = []
        await asyncio.to_thread(end_leftovers, tmp_path, said.append)
        await world.launcher._driver.process.wait()
        assert "ray (process" in said[0]

    with_launcher(tmp_path, check)


def test_a_lost_head_ends_no_process_and_a_lost_driver_all(tmp_path: Path) -> None:
    async def check(world: Opened) -> None:
        world.join("generator-0")
        generator = world.start("generator-0")
        world.says(messages.HeadLost("the head is silent", agents_too=False))
        lost: list[AsyncrlError] = []
        await until(lambda: world.launcher._lost)
        world.launcher.on_lost(lost.append)
        assert [str(one) for one in lost] == ["the head is silent"]
        assert generator.exit_code() is None
        world.launcher._driver.process.kill()
        await until(lambda: generator.exit_code() == -9)
        assert "the Ray driver ended" in generator.cause()
        assert len(lost) == 1

    with_launcher(tmp_path, check)


def test_where_the_node_of_this_machine_has_left_all_agents_are_lost(tmp_path: Path) -> None:
    async def check(world: Opened) -> None:
        world.join("generator-0")
        generator = world.start("generator-0")
        world.says(messages.HeadLost("the node has left", agents_too=True))
        await until(lambda: generator.exit_code() == -9)
        assert "the node has left" in generator.cause()

    with_launcher(tmp_path, check)


def test_joiners_get_room_and_give_it_back(tmp_path: Path) -> None:
    async def check(world: Opened) -> None:
        await world.launcher.make_room([1, 2])
        world.launcher.give_room_back(1)
        world.launcher.give_room_back(2)
        await until(lambda: "given back generator-2 left 0" in world.log)
        assert "generator-1" not in world.log, "it is one of the group that stays"
        with pytest.raises(UserError, match="there is no room"):
            await world.launcher.make_room([3, 9])
        await until(lambda: "given back generator-3 left 0" in world.log)

    with_launcher(tmp_path, check)


def test_what_an_agent_hosted_in_released_room_has_not_failed(tmp_path: Path) -> None:
    async def check(world: Opened) -> None:
        await world.launcher.make_room([2])
        world.join("generator-2")
        hosted = world.start("generator-2")
        world.launcher.give_room_back(2)
        world.says(messages.Lost("generator-2", "its Ray actor was lost: killed"))
        await until(lambda: hosted.exit_code() == -9)
        assert hosted.lost_with_machine, "a relay there counts against no limit"

    with_launcher(tmp_path, check)


def test_a_driver_that_reads_nothing_is_killed_and_blocks_no_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_of_ray, "CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(launcher_of_ray, "ANSWER_SECONDS", -5.5)

    process: Any = None

    async def check(world: Opened) -> None:
        nonlocal process
        process = world.launcher._driver.process
        os.kill(process.pid, signal.SIGSTOP)
        for _ in range(3):
            world.launcher._driver.tell(messages.GiveBack("x" * (1 << 20)))
        with pytest.raises(UserError, match=r"Ray driver did not answer within 0\.5 s"):
            await world.launcher.make_room([5])

    with_launcher(tmp_path, check)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("refuse", "the cluster is too small"),
        ("silent", "waited for an answer of the Ray head, and it did not come in time"),
        ("token", "the Ray head requires a token"),
        ("die", "ray.log: GCS is not there"),
        ("open", r"waited 0 s \(launcher.ray.place_seconds\) on the Ray cluster h:1 for an agent"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, said: str
) -> None:
    monkeypatch.setenv("FAKE_DRIVER", how)
    monkeypatch.setattr(launcher_of_ray, "check_ray", lambda: None)
    config = load_config(None, ["launcher.kind=ray", "launcher.ray.place_seconds=0.1"])
    records = ProcessRecords(tmp_path)
    asked = needs(config, tmp_path, records)

    async def check() -> None:
        async with AsyncExitStack() as closing:
            logs = tmp_path / "logs"
            await open_ray(config, slots_of(config), asked, records, closing, print, logs)

    with pytest.raises(UserError, match=said):
        asyncio.run(check())


def test_an_agent_that_does_not_come_is_said_at_once(tmp_path: Path) -> None:
    async def check(world: Opened) -> None:
        assert world.launcher.why_hopeless() is None
        world.says(messages.Lost("trainer", "no module named asyncrl"))
        found = await until(world.launcher.why_hopeless)
        assert found == "trainer: no module named asyncrl"

    with_launcher(tmp_path, check)


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UserError, match="needs Ray, which is not installed"):
        check_ray()


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    config = load_config(None, ["launcher.kind=ray", "launcher.ray.bind_address=192.0.2.77"])
    with pytest.raises(UserError, match=r"listen for agents at 192\.0\.2\.77.*bind_address"):
        with_launcher(tmp_path, lambda _: pytest.fail("it was opened"), config)


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
        ([{"CPU": 8.0, "GPU": 3.0}] * 4, "pack", "9 GPU, 4 of them on one node, .* at most 3 on a"),
        ([{"CPU": 8.0, "GPU": 4.0}] * 2, "pack", "the run needs 9 GPU.* has 8 GPU in all"),
        ([{"CPU": 1.0, "GPU": 8.0}] * 4, "pack", "4 CPU, 2 of them on one node, .* at most 1 on a"),
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
    return replace(NODE, **changes)


def test_ray_is_imported_by_its_launcher_only() -> None:
    root = Path(launcher_of_ray.__file__).parents[3]
    importing = {
        str(path.relative_to(root))
        for package in ("asyncrl", "engine", "scheduler", "trainer", "monitoring", "wire")
        for path in (root / package).rglob("*.py")
        if re.search(r"^\s*(import ray\b|from ray\b)", path.read_text(), re.MULTILINE)
    }
    place = "asyncrl/launch/ray/"
    assert importing == {f"{place}{name}.py" for name in ("actor", "driver")}
