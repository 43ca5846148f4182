"""Processes of a run that are not started: a launcher, handles and a hub that only take notes."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.errors import UserError
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.fleet.process_state import GeneratorWorker
from asyncrl.launch.child_spec import (
    ChildKeys,
    ChildSpec,
    GeneratorSpec,
    RelaySpec,
    SpecsOfRun,
    TrainerSpec,
)
from asyncrl.launch.shared_memory import local_run_id
from asyncrl.tasks.prompts import Prompt, Task
from asyncrl.wire import RunKey, Unreachable
from asyncrl.wire.messages.from_trainer import TrainerReport
from asyncrl.wire.transport.refusals import Refusals
from asyncrl.wire.weights.layout import WeightManifest


@dataclass
class FakeHandle:
    spec: Any
    """Of the role that the test has started."""
    code: int | None = None
    ended: list[str] = field(default_factory=list)
    log: str = ""

    node: str | None = ""
    address: str = ""

    lost_with_machine = False

    def cause(self) -> str:
        return ""

    def exit_code(self) -> int | None:
        return self.code

    def end(self, *, by_force: bool) -> None:
        self.ended.append("kill" if by_force else "term")
        self.code = -9 if by_force else 0

    def log_tail(self, lines: int = 12) -> str:
        return self.log or f"the log of {self.spec.name}"


@dataclass
class FakeLauncher:
    handles: dict[str, FakeHandle] = field(default_factory=dict)
    threads: int = 1
    uses_relays: bool = False
    room: int = 8
    """Generators that there is room for."""
    given_back: list[int] = field(default_factory=list)
    nodes: dict[str, str] = field(default_factory=dict)
    """Where processes are, by name; a relay is where it is started."""

    async def make_room(self, generators: Any) -> None:
        if max(generators) >= self.room:
            raise UserError(f"there is no room for generator-{max(generators)}")

    def give_room_back(self, generator: int) -> None:
        self.given_back.append(generator)

    def start(self, spec: ChildSpec, _keys: ChildKeys, node: str | None = None) -> FakeHandle:
        place = node if node is not None else self.nodes.get(spec.name, "")
        self.handles[spec.name] = FakeHandle(spec, node=place)
        return self.handles[spec.name]


@dataclass
class FakeHub:
    """Takes note of what is sent; a process that was told to shut down ends."""

    launcher: FakeLauncher
    sent: list[tuple[str, Any]] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    refusals: Refusals = field(default_factory=Refusals)

    async def send(self, peer: str, message: Any) -> None:
        handle = self.launcher.handles[peer]
        if handle.code is not None:
            raise Unreachable(f"{type(message).__name__} could not be sent to {peer}")
        self.sent.append((peer, message))
        if type(message).__name__ == "Shutdown":
            handle.code = 0

    def send_soon(self, peer: str, message: Any) -> None:
        if self.launcher.handles[peer].code is None:
            self.sent.append((peer, message))

    async def attend(self) -> None:
        """Nobody says anything."""
        await asyncio.Event().wait()

    def abandon(self, peer: str) -> None:
        self.abandoned.append(peer)

    def take(self) -> list[tuple[str, Any]]:
        """What was sent since the last call."""
        taken, self.sent = self.sent, []
        return taken


class FakeProgress:
    """Takes note of what the user is told, and of the calls without an answer."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.calls: list[tuple[str, Any]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def group_failed(self, group: int, reason: str) -> None:
        self.said.append(f"group {group} is not trained on: {reason}")

    def __getattr__(self, name: str) -> Any:
        def note(*values: Any) -> None:
            self.calls.append((name, values))

        return note


def run_config(**sections: object) -> RunConfig:
    return parse_config(sections, source="the test")


RUN_ID = local_run_id("test", os.getpid())


def spec() -> TrainerSpec:
    return TrainerSpec(
        name="trainer", run_directory="runs/test", model_path="model", control_address="ipc://a",
        data_address="ipc://b", parent=1, threads=1, run_id=RUN_ID,
    )  # fmt: skip


def generator_spec(name: str = "generator-0") -> GeneratorSpec:
    return GeneratorSpec(
        name=name, run_directory="runs/test", model_path="model", control_address="ipc://a",
        data_address="ipc://b", parent=1, threads=1, run_id=RUN_ID,
    )  # fmt: skip


def relay_spec(name: str = "relay-0") -> RelaySpec:
    return RelaySpec(
        name=name, run_directory="runs/test", control_address="ipc://a", parent=1, threads=1,
        run_id=RUN_ID,
    )  # fmt: skip


def specs(ranks: int = 1) -> SpecsOfRun:
    """What a fleet is given."""
    trainer, generator = spec(), generator_spec()
    return SpecsOfRun(
        msgspec.structs.replace(trainer, ranks=ranks),
        msgspec.structs.replace(generator, ranks=ranks),
        relay_spec(),
    )


def task(train: int = 6, evaluation: int = 4) -> Task:
    def prompts(kind: str, n: int) -> list[Prompt]:
        return [Prompt(f"{kind}-{i}", np.array([i, 7], np.int32), "", {}) for i in range(n)]

    return Task(prompts("train", train), prompts("held-out", evaluation), (0,), None)


def weights(version: int) -> WeightManifest:
    return WeightManifest(version, "/dev/null", 0, ())  # exists, and is never opened


def started_fleet(
    config: RunConfig, version: int = 0, launcher: FakeLauncher | None = None, slots: int = 2
) -> tuple[Fleet, FakeHub]:
    """A fleet whose processes are all ready with these weights."""
    launcher = launcher or FakeLauncher()
    hub = FakeHub(launcher)
    given = specs(config.trainer.ranks)
    fleet = Fleet(config.launcher, launcher, given, hub, RunKey.new())  # type: ignore[arg-type]
    fleet.start_all()
    for rank in fleet.ranks:
        rank.ready(version, None)
    for one in fleet.every_generator:
        one.ready(version, slots, None)
    fleet.trainer.weights = weights(version)
    fleet.trainer.report = TrainerReport(version, 0, 0.0)
    return fleet, hub


def generator(fleet: Fleet, index: int = 0) -> GeneratorWorker:
    return fleet.generators()[index]
