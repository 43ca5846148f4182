"""The inputs of child processes at their start: a spec, keys, and a meeting.

spec       on the command line, a type for each role (`ChildSpec`)
keys       on standard input, a type for each role (`ChildKeys`)
meeting    the file through which the ranks of a trainer find each other (`TrainerSpec.meeting`)
"""

import shutil
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
from prometheus_client import CollectorRegistry

from asyncrl.config.run_config import RunConfig, load_config, parse_config
from asyncrl.monitoring.config import MonitoringConfig, host_port
from asyncrl.monitoring.metrics.exporter import Exporter, exporter_for
from asyncrl.wire.records.wrong_policy import TokenizerDigest
from asyncrl.wire.transport.keys import HubKeys, LineKeys, RunKey
from asyncrl.wire.weights.layout import SHARED_MEMORY

MEETINGS = ".ranks"
"""The folder, in the run's, in which the ranks of a trainer on several machines meet.

It has a file for each trainer. The controller removes it before and after the processes of the run.
"""


def make_place(meeting: Path) -> Path:
    """Make the private folder of a meeting, and return the meeting."""
    meeting.parent.mkdir(mode=0o700, exist_ok=True)
    return meeting


def remove_meetings(run: Path) -> None:
    """Remove the meetings of dead trainers from a run's folder."""
    shutil.rmtree(run / MEETINGS, ignore_errors=True)


Role = Literal["generator", "trainer", "relay"]


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="role"):
    """Arguments of all child processes, as JSON on their command lines."""

    role: ClassVar[Role]
    name: str
    """Unique in the run, e.g. "generator-0"; a replacement is "generator-0.1"."""
    run_directory: str
    control_address: str
    parent: int
    threads: int
    process_index: int = 1
    """Index of the process in the run; the controller is 0. Determines its metrics port."""
    metrics_port: int | None = None
    """Port of its metrics, if its node has fixed it; None: from `monitoring.port`."""
    shares_run_directory: bool = True
    """True if `run_directory` is the folder that the controller sees."""
    run_id: str = ""
    """Part of the names of the run's files in memory, so that runs do not share any
    (`asyncrl.launch.shared_memory`)."""
    weights_directory: str = str(SHARED_MEMORY)
    """Folder in memory, on the process's node, for weights and exchanged rollouts."""
    relay_address: str = ""
    """Address of its node's relay; the launcher knows it on the process's node only."""
    config_json: str = ""
    """The run's resolved configuration; empty: the process reads it from the run directory."""

    def exporter(self, config: MonitoringConfig, registry: CollectorRegistry) -> Exporter | None:
        """Make the server of its metrics; None where they are off. Raises ExporterError."""
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
    """Arguments of processes with a model: trainers and generators."""

    model_path: str
    data_address: str
    """The trainer's address for trajectories; for a rank, its own."""
    ranks: int = 1
    tokenizer: TokenizerDigest | None = None
    """The tokenizer of the run's prompts, which the process's must equal; None: not compared."""
    gpus: int = 0
    relayed: bool = False
    """True if its control messages go through the relay of its node."""
    trace_key: str = ""

    def data_address_of(self, rank: int) -> str:
        """Return a local rank's address for trajectories; empty if its node chooses it."""
        return f"{self.data_address}-{rank}" if rank and self.data_address else self.data_address


class TrainerSpec(ModelSpec, frozen=True, kw_only=True, tag="trainer"):
    """The arguments of a rank of the trainer."""

    role: ClassVar[Literal["trainer"]] = "trainer"
    rank: int = 0
    lineage: int = 0
    resume_from: int | None = None
    """The number of steps of the checkpoint to continue from; None: from the model."""
    engine_device: Literal["cpu", "cuda"] | None = None
    """Device of the generators, which a trainer on other GPUs cannot see; None: torch decides."""
    fence: str = ""
    """The token of this trainer (`asyncrl.trainer.checkpoint.trainer_lease`)."""
    ports: tuple[int, ...] = ()
    """Ports for trajectories, if the user has fixed one."""
    advertised: str = ""
    """Host under which other machines reach its sockets; empty: the one that it binds."""

    @property
    def meeting(self) -> Path:
        """The file through which the ranks meet, in the run's private folder or in `MEETINGS`."""
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
        """Number of the generator, shared with its replacements."""
        return int(self.name.removeprefix("generator-").split(".")[0])

    def here(self, path: str) -> Path:
        """Return this node's path of a file, given as the path on the controller's node."""
        home = self.home_directory
        if home and path.startswith(f"{home}/"):
            return Path(self.run_directory) / path.removeprefix(f"{home}/")
        return Path(path)


class RelaySpec(ProcessSpec, frozen=True, kw_only=True, tag="relay"):
    """The arguments of a relay."""

    role: ClassVar[Literal["relay"]] = "relay"
    data_address: str = ""
    """Its node's address for other nodes, with `*` as port, filled in by its node."""
    ports: tuple[int, ...] = ()
    """Fixed ports, if any: for its trainer's weights, its node's weights and files."""
    advertised: str = ""


ChildSpec = TrainerSpec | GeneratorSpec | RelaySpec
"""The arguments of a child process, as JSON on its command line, distinguished by `role`."""


def bind_to(spec: TrainerSpec | RelaySpec, index: int = 0) -> str:
    """Return the address to listen at: `data_address`, with the fixed port of this index if any."""
    if index < len(spec.ports) and spec.data_address.endswith(":*"):
        return f"{spec.data_address[:-1]}{spec.ports[index]}"
    return spec.data_address


def reached_at(spec: TrainerSpec | RelaySpec, bound: str) -> str:
    """Return the address under which other machines reach a bound address."""
    if not spec.advertised or not bound.startswith("tcp://"):
        return bound
    return f"tcp://{host_port(spec.advertised, int(bound.rpartition(':')[2]))}"


@dataclass(frozen=True, slots=True)
class SpecsOfRun:
    """The start arguments common to a run's processes, without name and index."""

    trainer: TrainerSpec
    generator: GeneratorSpec
    relay: RelaySpec


CONFIG_VARIABLE = "ASYNCRL_RUN_CONFIG"
"""Environment variable with `ProcessSpec.config_json`. A configuration may contain secrets, for
example in `launcher.ray.runtime_env`, and command lines are public."""


def read_spec(argument: str, environment: MutableMapping[str, str]) -> ChildSpec:
    """Read the spec on a command line; take its configuration out of the environment."""
    spec: ChildSpec = msgspec.json.decode(argument, type=ChildSpec)
    config = environment.pop(CONFIG_VARIABLE, "")
    return msgspec.structs.replace(spec, config_json=config) if config else spec


class GeneratorKeys(msgspec.Struct, frozen=True, tag=True):
    """The keys of a generator."""

    control: LineKeys
    data: LineKeys


class TrainerKeys(msgspec.Struct, frozen=True, tag=True):
    """The keys of the trainer."""

    control: LineKeys
    data: HubKeys


class RelayKeys(msgspec.Struct, frozen=True, tag=True):
    """The keys of a relay."""

    control: LineKeys
    weights: HubKeys
    """Keys for the nodes that request weights from this one."""
    children: HubKeys
    """Keys for the processes of its node. The controller checks their passes."""
    files: HubKeys
    """Keys for the relays that request files from this one."""


ChildKeys = GeneratorKeys | TrainerKeys | RelayKeys
"""The keys of a child process, as MessagePack on its standard input. Other users can read a command
line and an environment, and a file could outlive the run."""

_RELAYS = "relays"
"""Name, for `RunKey`, of the sockets at which the processes of a node meet their relay."""


def keys_of(run_key: RunKey, name: str, role: Role, *, relayed: bool = False) -> ChildKeys:
    """Return the keys of the process of this name; `relayed` as in `ModelSpec`."""
    control = run_key.line("control", name)
    if relayed and role != "relay":
        control = run_key.relayed_line("control", _RELAYS, name)
    if role == "trainer":
        return TrainerKeys(control, run_key.hub("data"))
    if role == "relay":
        children = HubKeys(run_key.hub(_RELAYS).secret, b"")
        weights, files = run_key.hub(weights_hub(name)), run_key.hub(files_hub(name))
        return RelayKeys(control, weights, children, files)
    return GeneratorKeys(control, run_key.line("data", name))


def is_relay(name: str) -> bool:
    """Return True if this is the name of a relay."""
    return name.startswith("relay-")


def weights_hub(relay: str) -> str:
    """Return the name, for `RunKey`, of a relay's socket for weights."""
    return f"weights {relay}"


def files_hub(relay: str) -> str:
    """Return the name, for `RunKey`, of a relay's socket for files."""
    return f"files {relay}"
