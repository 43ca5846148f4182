"""What child processes are given when they are started: a spec, keys, and a place to meet.

spec       on the command line, a type for each role (`ChildSpec`)
keys       on standard input, a type for each role (`ChildKeys`)
meeting    the file through which the ranks of a trainer find each other (`TrainerSpec.meeting`)
"""

from __future__ import annotations

import shutil
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
from prometheus_client import CollectorRegistry

from asyncrl.config.run_config import RunConfig, load_config, parse_config
from asyncrl.monitoring.config import MonitoringConfig
from asyncrl.monitoring.metrics.exporter import Exporter, exporter_for
from asyncrl.wire.records.wrong_policy import TokenizerDigest
from asyncrl.wire.transport.keys import HubKeys, LineKeys, RunKey
from asyncrl.wire.weights.layout import SHARED_MEMORY

MEETINGS = ".ranks"
"""The folder, in that of a run, in which the ranks of a trainer on several machines meet.

It has a file for each trainer. The controller removes it before and after the processes of the run.
"""


def make_place(meeting: Path) -> Path:
    """Make the folder of a meeting, which only this user can access, and return the meeting."""
    meeting.parent.mkdir(mode=0o700, exist_ok=True)
    return meeting


def remove_meetings(run: Path) -> None:
    """Remove what trainers have left in a run's folder. None is alive."""
    shutil.rmtree(run / MEETINGS, ignore_errors=True)


Role = Literal["generator", "trainer", "relay"]


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="role"):
    """The arguments that the child processes of all roles have, as JSON on their command lines."""

    role: ClassVar[Role]
    name: str
    """Unique in the run, e.g. "generator-0"; a replacement is "generator-0.1"."""
    run_directory: str
    control_address: str
    """Where the controller listens."""
    parent: int
    """Process id of the launcher."""
    threads: int
    """Threads for tensor work."""
    process_index: int = 1
    """Index of the process in the run; the controller is 0. Determines its metrics port."""
    metrics_port: int | None = None
    """Where it serves its metrics, if its node has fixed that; None: `monitoring.port` says."""
    shares_run_directory: bool = True
    """Whether `run_directory` is the folder that the controller sees."""
    run_id: str = ""
    """In the names of the run's files in memory, so that no two runs share any
    (`asyncrl.launch.shared_memory`)."""
    weights_directory: str = str(SHARED_MEMORY)
    """Where the process's node has the run's files in memory: weights, exchanged rollouts."""
    relay_address: str = ""
    """Where the relay of its node listens; the launcher knows it on the process's node only."""
    config_json: str = ""
    """The run's resolved configuration; empty: it is read from the run directory. A process of
    another node may not see that one."""

    def exporter(self, config: MonitoringConfig, registry: CollectorRegistry) -> Exporter | None:
        """What serves its metrics; None where they are turned off. Raises ExporterError."""
        if self.metrics_port is None:
            return exporter_for(config, registry, self.process_index)
        return exporter_for(config.model_copy(update={"port": self.metrics_port}), registry, 0)

    def config(self) -> RunConfig:
        """The run's resolved configuration."""
        if self.config_json:
            values = msgspec.json.decode(self.config_json)
            return parse_config(values, source=f"the configuration that {self.name} was given")
        return load_config(Path(self.run_directory) / "config.yaml")


class ModelSpec(ProcessSpec, frozen=True, kw_only=True):
    """The arguments that trainers and generators have: those of processes with a model."""

    model_path: str
    data_address: str
    """Where the trainer listens for trajectories; of a rank: where this rank does."""
    ranks: int = 1
    """Processes of the trainer."""
    tokenizer: TokenizerDigest | None = None
    """Of the run's prompts, which the process's own must be; None: it is not compared."""
    gpus: int = 0
    """That its node has for it."""
    relayed: bool = False
    """Whether its control messages go through the relay of its node."""
    trace_key: str = ""
    """Of the run (`asyncrl.monitoring.tracing.tracer`)."""

    def data_address_of(self, rank: int) -> str:
        """Where a rank of a trainer on this machine listens for trajectories.

        Empty where the ranks choose it on their nodes.
        """
        return f"{self.data_address}-{rank}" if rank and self.data_address else self.data_address


class TrainerSpec(ModelSpec, frozen=True, kw_only=True, tag="trainer"):
    """The arguments of a rank of the trainer."""

    role: ClassVar[Literal["trainer"]] = "trainer"
    rank: int = 0
    """Of this process, among the ranks of its trainer."""
    lineage: int = 0
    """How many trainers the run had before this one."""
    resume_from: int | None = None
    """It continues from the checkpoint after this many steps; None: from the model."""
    engine_device: Literal["cpu", "cuda"] | None = None
    """Where the generators run, which a trainer with other GPUs cannot see; None: as torch decides
    in any process."""
    fence: str = ""
    """The word of this trainer (`asyncrl.trainer.checkpoint.trainer_lease`)."""
    ports: tuple[int, ...] = ()
    """That it listens at for trajectories, if the user has fixed one."""
    advertised: str = ""
    """Host under which other machines reach what it listens at; empty: the one that it binds."""

    @property
    def meeting(self) -> Path:
        """The file through which the ranks of a trainer meet.

        On one machine it is in the run's private folder; on several in `MEETINGS`, which all ranks
        see.
        """
        name = f"ranks-{self.lineage}"
        if self.data_address.startswith("ipc://"):
            return Path(self.data_address.removeprefix("ipc://")).parent / name
        return Path(self.run_directory) / MEETINGS / f"{self.run_id}-{name}"


class GeneratorSpec(ModelSpec, frozen=True, kw_only=True, tag="generator"):
    """The arguments of a generator."""

    role: ClassVar[Literal["generator"]] = "generator"
    stop_tokens: tuple[int, ...] = ()
    first: bool = True
    """False if it replaces a process that died."""
    home_directory: str = ""
    """The run's folder as the controller names it; empty: `run_directory`."""

    @property
    def index(self) -> int:
        """Number of the generator, which its replacements have too."""
        return int(self.name.removeprefix("generator-").split(".")[0])

    def here(self, path: str) -> Path:
        """Where a file is on this node whose path on its own node the controller names."""
        home = self.home_directory
        if home and path.startswith(f"{home}/"):
            return Path(self.run_directory) / path.removeprefix(f"{home}/")
        return Path(path)


class RelaySpec(ProcessSpec, frozen=True, kw_only=True, tag="relay"):
    """The arguments of a relay."""

    role: ClassVar[Literal["relay"]] = "relay"
    data_address: str = ""
    """Its node's address, where other nodes reach it, with `*` as port; its node fills it in."""
    ports: tuple[int, ...] = ()
    """That it listens at, if the user has fixed them: for its trainer's weights, its node's weights
    and files."""
    advertised: str = ""
    """As of a `TrainerSpec`."""


ChildSpec = TrainerSpec | GeneratorSpec | RelaySpec
"""The arguments of a child process, as JSON on its command line; its `role` says which they are."""


def bind_to(spec: TrainerSpec | RelaySpec, index: int = 0) -> str:
    """Where a process listens: its `data_address`, with the port of this index if it is fixed."""
    if index < len(spec.ports) and spec.data_address.endswith(":*"):
        return f"{spec.data_address[:-1]}{spec.ports[index]}"
    return spec.data_address


def reached_at(spec: TrainerSpec | RelaySpec, bound: str) -> str:
    """The address under which other machines reach what a process has bound to this one."""
    if not spec.advertised or not bound.startswith("tcp://"):
        return bound
    host = f"[{spec.advertised}]" if ":" in spec.advertised else spec.advertised
    return f"tcp://{host}:{bound.rpartition(':')[2]}"


@dataclass(frozen=True, slots=True)
class SpecsOfRun:
    """What the processes of a run are started with, before each gets its own name and index."""

    trainer: TrainerSpec
    generator: GeneratorSpec
    relay: RelaySpec


CONFIG_VARIABLE = "ASYNCRL_RUN_CONFIG"
"""Environment variable with `ProcessSpec.config_json`. A configuration may name secrets, for
example in `launcher.ray.runtime_env`, and everybody can read a command line."""


def read_spec(argument: str, environment: MutableMapping[str, str]) -> ChildSpec:
    """The spec on a command line, with the configuration from the environment, if it is there.

    It is removed from the environment, so that what the process starts does not have it.
    """
    spec: ChildSpec = msgspec.json.decode(argument, type=ChildSpec)
    config = environment.pop(CONFIG_VARIABLE, "")
    return msgspec.structs.replace(spec, config_json=config) if config else spec


class GeneratorKeys(msgspec.Struct, frozen=True, tag=True):
    """The keys of a generator."""

    control: LineKeys
    """To the controller."""
    data: LineKeys
    """To the trainer."""


class TrainerKeys(msgspec.Struct, frozen=True, tag=True):
    """The keys of the trainer."""

    control: LineKeys
    """To the controller."""
    data: HubKeys
    """For the generators."""


class RelayKeys(msgspec.Struct, frozen=True, tag=True):
    """The keys of a relay."""

    control: LineKeys
    """To the controller."""
    weights: HubKeys
    """For the nodes that ask this one for weights."""
    children: HubKeys
    """For the processes of its node. It has no key of passes: the controller checks these."""
    files: HubKeys
    """For the relays that ask this one for files."""


ChildKeys = GeneratorKeys | TrainerKeys | RelayKeys
"""The keys of a child process, as MessagePack on its standard input. A command line and an
environment can be read by others, and a file could outlive the run."""


_RELAYS = "relays"
"""Name, for `RunKey`, of the sockets at which the processes of a node meet their relay."""


def keys_of(run_key: RunKey, name: str, role: Role, *, relayed: bool = False) -> ChildKeys:
    """The keys of the process of this name; `relayed` as in `ModelSpec`."""
    control = run_key.line("control", name)
    if relayed and role != "relay":
        control = run_key.relayed_line("control", _RELAYS, name)
    if role == "trainer":
        return TrainerKeys(control, run_key.hub("data"))
    if role == "relay":
        children = HubKeys(run_key.hub(_RELAYS).secret, b"")
        return RelayKeys(
            control, run_key.hub(weights_hub(name)), children, run_key.hub(files_hub(name))
        )
    return GeneratorKeys(control, run_key.line("data", name))


def is_relay(name: str) -> bool:
    """Whether this is the name of a relay."""
    return name.startswith("relay-")


def weights_hub(relay: str) -> str:
    """The name, for `RunKey`, of the socket at which a relay is asked for weights."""
    return f"weights {relay}"


def files_hub(relay: str) -> str:
    """The name, for `RunKey`, of the socket at which a relay is asked for files."""
    return f"files {relay}"
