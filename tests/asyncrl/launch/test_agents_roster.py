"""Which agent gets which process: no sockets, a clock that the test moves."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_processes import generator_spec, relay_spec, spec
from msgspec.structs import replace
from typer.testing import CliRunner

from asyncrl.cli.entry import app
from asyncrl.config.launcher import host_and_port
from asyncrl.errors import UserError
from asyncrl.launch.agents.agent_state import AgentProcess
from asyncrl.launch.agents.hosting import Ports
from asyncrl.launch.agents.registry import AgentRegistry, Needs
from asyncrl.launch.agents.secret import read_secret, write_secret
from asyncrl.launch.child_spec import ChildSpec, Role, TrainerSpec, keys_of
from asyncrl.launch.nodes import NodeInfo
from asyncrl.wire import RunKey
from asyncrl.wire.messages import from_agent, to_agent

FACTS: dict[str, Any] = {
    "hostname": "h", "memory": "m", "python": "3.11", "asyncrl": "1 (a)",
    "shares_run_directory": True, "has_model": True, "disk": "d",
}  # fmt: skip
OURS = NodeInfo("controller", "", "h", "m d", "3.11", "1 (a)", True, True)
NEEDS = Needs(
    "test", "{}", OURS, "/model", "/runs/test",
    {"trainer": 0, "generator": 0}, frozenset(), "mark",
    silence_seconds=20.0, silence_setting="s", lost_seconds=60.0, relay_per_node=False,
)  # fmt: skip


class World:
    """A roster, and agents that say what they are told to."""

    def __init__(self, needs: Needs = NEEDS) -> None:
        self.said: list[str] = []
        self.roster = AgentRegistry(needs, "session", lambda: None, self.said.append)
        self.now = 0.0

    def hello(self, name: str, role: str = "any", **changes: Any) -> object:
        hello = from_agent.Hello(role, "h", "10.0.0.1", 0, "3.11", "1 (a)", "begins")
        return self.roster.hello(name, replace(hello, **changes), self.now)

    def state(self, name: str, *hosted: tuple[str, int | None], **changes: Any) -> bool:
        told = tuple(from_agent.Hosted(one, code, "", "", "") for one, code in hosted)
        state = from_agent.State("session", msgspec.json.encode(FACTS).decode(), told)
        return self.roster.state(name, replace(state, **changes), self.now)

    def join(self, name: str, role: str = "any", **facts: Any) -> None:
        assert isinstance(self.hello(name, role), to_agent.Welcome)
        assert self.state(name, facts=msgspec.json.encode(FACTS | facts).decode())
        self.roster.place()

    def start(self, name: str, role: Role, node: str | None = None) -> AgentProcess:
        made: dict[Role, ChildSpec] = {
            "trainer": replace(spec(), name=name),
            "generator": generator_spec(name),
            "relay": relay_spec(name),
        }
        what = made[role]
        return self.roster.add(what, keys_of(RunKey.new(), name, role), node)

    def wanted(self, name: str) -> list[str]:
        return [one.name for one in self.roster.orders(self.roster.agents[name]).processes]


def test_a_process_goes_to_an_agent_of_its_role_and_waits_until_there_is_one() -> None:
    world = World()
    generator, trainer = world.start("generator-0", "generator"), world.start("trainer", "trainer")
    assert generator.node is trainer.node is None
    world.join("a")
    assert world.wanted("a") == ["trainer"], "the trainer comes first"
    world.join("b", "trainer")
    assert generator.node is None
    world.join("c", "generator")
    assert world.wanted("c") == ["generator-0"]
    assert generator.exit_code() is None
    assert world.roster.offered() == 0


def test_orders_are_repeated_until_the_agent_has_carried_them_out() -> None:
    world = World()
    world.join("a")
    process = world.start("generator-0", "generator")
    agent = world.roster.agents["a"]
    for _ in range(2):
        (wanted,) = world.roster.orders(agent).processes
        assert wanted.start is not None
        assert "keys" not in repr(wanted.start)
    world.state("a", ("generator-0", None))
    assert world.roster.orders(agent).processes[0].start is None
    process.end(by_force=False)
    assert world.roster.orders(agent).processes[0].ending
    world.state("a", ("generator-0", 0))
    assert world.wanted("a") == []
    assert process.exit_code() == 0
    assert world.roster.offered() == 1, "it was told to end, so its agent is as good as before"


def test_an_agent_on_which_a_process_failed_is_asked_last_and_offers_nothing() -> None:
    world = World()
    world.join("bad", "generator")
    world.start("generator-0", "generator")
    world.state("bad", ("generator-0", 1))
    assert world.roster.offered() == 0
    world.join("good", "any")
    assert world.roster.offered() == 1
    world.start("generator-0.1", "generator")
    assert world.wanted("good") == ["generator-0.1"]
    world.start("generator-0.2", "generator")
    assert world.wanted("bad") == ["generator-0.2"], "better than none"


def test_a_silent_agent_is_lost_with_its_processes_but_not_while_the_controller_is_suspended() -> (
    None
):
    world = World()
    world.join("a")
    process = world.start("generator-0", "generator")
    for world.now in range(0, 20, 2):
        world.roster.look(world.now)
    world.now = 500.0  # Ctrl-Z
    world.roster.look(world.now)
    assert process.exit_code() is None
    for world.now in range(500, 520, 2):
        world.roster.look(world.now)
    assert process.exit_code() == -9
    assert "a (any) was lost: it was silent for" in process.cause()
    assert process.lost_with_machine
    assert not world.state("a"), "it comes back: of another life"
    assert not world.roster.agents


def test_an_agent_that_begins_anew_has_lost_what_it_had_and_one_that_repeats_itself_has_not() -> (
    None
):
    world = World()
    world.join("a")
    process = world.start("trainer", "trainer")
    world.hello("a")
    assert process.exit_code() is None
    world.hello("a", beginning="again")
    assert process.exit_code() == -9
    assert not world.state("a", session="of another controller")


def test_an_agent_of_another_version_is_refused() -> None:
    refused = World().hello("a", asyncrl="2 (b)")
    assert isinstance(refused, to_agent.Refused)
    assert "has asyncrl 2 (b)" in refused.reason
    assert isinstance(World().hello("a", python="3.12"), to_agent.Refused)


def test_a_trainer_needs_the_runs_folder_and_a_generator_does_not() -> None:
    world = World()
    world.join("a", "trainer", shares_run_directory=False)
    assert "must see the run's folder /runs/test" in world.said[-1]
    assert world.start("trainer", "trainer").node is None
    assert "--runs" in world.roster.orders(world.roster.agents["a"]).note
    world.join("b", "generator", shares_run_directory=False)
    assert world.roster.could_begin_with() == (False, 1)
    world.join("c", "generator", has_model=False)
    assert world.roster.could_begin_with() == (False, 1)
    assert "model's folder /model does not exist" in world.said[-1]


def test_a_process_at_loopback_serves_one_machine_only() -> None:
    world = World()
    world.hello("a", "trainer", address="127.0.0.1")
    world.state("a")
    assert world.roster.could_begin_with()[0]
    world.join("b", "generator")
    assert world.roster.could_begin_with() == (False, 1)
    assert any("a (trainer): it reaches the controller at 127.0.0.1" in one
               for one in world.roster.of_no_use())  # fmt: skip
    del world.roster.agents["b"]
    world.start("trainer", "trainer")
    world.join("c", "generator")
    assert world.roster.offered() == 0
    assert "agent a (trainer) has a process at 127.0.0.1" in world.said[-1]


def test_one_agent_for_any_role_cannot_be_both() -> None:
    world = World()
    world.join("a")
    assert world.roster.could_begin_with() == (True, 0)
    world.join("b")
    assert world.roster.could_begin_with() == (True, 1)
    world.join("c", "trainer")
    assert world.roster.could_begin_with() == (True, 2)


def test_ranks_of_a_trainer_are_placed_together_or_not_at_all() -> None:
    world = World()
    processes = []
    for rank, name in enumerate(["trainer", "trainer-1"]):
        what = replace(spec(), name=name, rank=rank, ranks=2)
        key = keys_of(RunKey.new(), name, "trainer")
        processes.append(world.roster.add(what, key, None))
    generator = world.start("generator-0", "generator")
    world.join("a")
    assert world.roster.could_begin_with(2) == (1, 0)
    assert [one.node for one in processes] == [None, None]
    assert generator.node is None, "what a rank may need is kept for it"
    world.join("b", "generator")
    assert world.wanted("b") == ["generator-0"]
    world.join("c", "trainer")
    assert (world.wanted("c"), world.wanted("a")) == (["trainer"], ["trainer-1"])


def test_gpus_are_given_up_where_they_are_optional_only() -> None:
    for optional, fits in ((frozenset({"trainer"}), True), (frozenset[str](), False)):
        world = World(
            dataclasses.replace(NEEDS, gpus={"trainer": 1, "generator": 0}, optional_gpus=optional)
        )
        world.join("a")
        world.roster.gpus.settle()
        assert bool(world.roster.free("trainer")) == fits


def test_a_machine_with_gpus_that_comes_a_second_later_is_not_wasted() -> None:
    optional = frozenset({"trainer", "generator"})
    needs = dataclasses.replace(NEEDS, gpus={"trainer": 1, "generator": 1}, optional_gpus=optional)
    world = World(needs)
    world.join("cpu", "trainer")
    assert world.roster.could_begin_with() == (True, 0), "if no other comes"
    assert "no use" not in world.said[-1]
    world.hello("gpu", "trainer", gpus=1)
    world.state("gpu")
    world.join("g", "generator")
    assert [one.name for one in world.roster.free("trainer")] == ["gpu"]
    world.roster.gpus.settle()
    assert world.roster.gpus.of("generator") == 0
    assert [one for one in world.said if "no agent for a generator has the GPUs" in one]
    assert not [one for one in world.said if "no agent for a trainer" in one]
    world.start("trainer", "trainer")
    assert world.wanted("gpu") == ["trainer"]
    placed = world.roster.agents["gpu"].processes["trainer"].spec
    assert isinstance(placed, TrainerSpec)
    assert placed.gpus == 1
    del world.roster.agents["gpu"]
    assert world.roster.free("trainer") == [], "the run began with a GPU for its trainer"


def test_a_relay_goes_to_its_node_and_takes_no_room() -> None:
    world = World()
    world.join("a", "generator")
    world.join("b", "generator", memory="elsewhere")
    assert world.roster.machines.are_several
    relay = world.start("relay-0", "relay", "b")
    assert relay.node == "b"
    assert world.roster.offered() == 2
    gone = world.start("relay-1", "relay", "nowhere")
    assert gone.exit_code() == -9


def test_an_agent_that_leaves_gets_nothing_more_and_is_forgotten_when_it_has_nothing() -> None:
    world = World()
    world.join("a", "generator")
    process = world.start("generator-0", "generator")
    world.state("a", ("generator-0", None), leaves_in=30.0)
    assert world.roster.leaving() == ["generator-0"]
    assert world.roster.offered() == 0
    world.state("a", ("generator-0", 0), leaves_in=20.0)
    assert process.exit_code() == 0
    assert process.lost_with_machine
    assert not world.roster.agents


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_a_secret_is_read_where_no_other_user_can(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    assert write_secret(file)
    assert file.stat().st_mode & 0o777 == 0o600
    secret = file.read_bytes()
    assert not write_secret(file), "one that is there stays"
    assert file.read_bytes() == secret
    file.chmod(mode)
    if mode & 0o040 and file.stat().st_uid != 0:
        with pytest.raises(UserError, match="mode"):
            read_secret(file, "--key-file")
        return
    assert read_secret(file, "--key-file") == RunKey(secret)
    file.chmod(0o600)
    file.write_text(secret.hex() + "\n", encoding="ascii")
    assert read_secret(file, "--key-file") == RunKey(secret)


def test_a_secret_is_written_whole_or_not_at_all_and_by_one_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other, link = tmp_path / "key", RunKey.new(), os.link

    def killed(_: object, path: Path) -> None:
        path.touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunKey, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            write_secret(file)
    assert not file.exists()

    def slower(source: Path, target: Path) -> None:
        other.write(target)
        link(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", slower)
        assert not write_secret(file), "another one was faster"
    assert read_secret(file, "--key-file") == other
    file.unlink()
    assert write_secret(file)


@pytest.mark.parametrize("address", ["[::]:5900", "[::1]:5900", "::1:5900", "host", "host:0"])
def test_an_address_that_agents_cannot_use_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"is not HOST:PORT .* Agents do not speak IPv6"):
        host_and_port(address)
    assert host_and_port("train-0:5900") == ("train-0", 5900)


def test_an_advertised_ipv6_address_is_refused(tmp_path: Path) -> None:
    words = ["agent", "--controller", "a:1", "--key-file", str(tmp_path), "--advertise", "fd00::1"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UserError)
    assert "--advertise fd00::1: must be an IPv4 address" in str(done.exception)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660, 0o620, 0o602])
def test_a_secret_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    write_secret(file)
    file.chmod(mode)
    with pytest.raises(UserError, match=f"has mode {mode:04o}"):
        read_secret(file, "--key-file")


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33, b"z" * 64])
def test_a_file_without_a_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(UserError, match="is not a secret"):
        read_secret(file, "--key-file")


def test_ports_come_from_the_range_and_go_back_to_it() -> None:
    ports = Ports("5910-5914")
    assert ports.give("trainer", "trainer") == (5910,)
    assert ports.give("relay-0", "relay") == (5911, 5912, 5913)
    with pytest.raises(UserError, match="needs 3 ports; --ports has 1"):
        ports.give("relay-1", "relay")
    ports.take_back("trainer")
    assert ports.give("trainer.1", "trainer") == (5910,)
    assert Ports("").give("trainer", "trainer") == ()


@pytest.mark.parametrize("text", ["5910", "5910-5912", "0-9", "9-5", "65000-70000", "a-b"])
def test_a_range_of_ports_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="must be FIRST-LAST with at least 4 ports"):
        Ports(text)
