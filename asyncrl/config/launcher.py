"""Settings of the launchers."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from asyncrl.wire.transport.paths import MAX_THREADS, START_SECONDS, WEEK_SECONDS, AbsolutePath


class ClusterConfig(BaseModel):
    """Settings of a run on several machines, with any launcher."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    weights_directory: str = "/dev/shm"  # noqa: S108 - memory, and files there have mode 0600
    """Folder in memory for weights, the same on every node."""
    relays: Literal["auto", "always"] = "auto"
    """Use of a relay on each node for weights between nodes: `auto` if the run's processes are on
    several machines, `always` also between nodes of one machine, as if their memory were apart."""
    max_relay_restarts: int = Field(default=10, ge=0, le=10_000)
    """Maximum number of replacements of lost relays; the other processes continue."""
    place_seconds: float = Field(default=120.0, gt=0, le=WEEK_SECONDS)
    """Longest wait for room on the nodes, and for an answer of each."""


MAX_PORT = 65_535
_LISTEN = re.compile(r"(?P<host>[^\s:/\[\]]+):(?P<port>\d{1,5})")


class AgentsConfig(ClusterConfig):
    """A run's use of agents (docs/deploy.md)."""

    listen: str = Field(default="127.0.0.1:5900", max_length=300)
    """`HOST:PORT` at which the controller waits for agents (`asyncrl agent --controller`). HOST is
    an address of this machine; 0.0.0.0 is every one."""
    control_port: int | None = Field(default=None, ge=1, le=MAX_PORT)
    """Port of the same host for the run's processes; null: the one after that of `listen`."""
    key_file: AbsolutePath | None = Field(default=None, max_length=4096)
    """File with the secret that the controller and all agents share: `asyncrl agent-key FILE`
    writes one. Needed with `launcher.kind: agents`."""
    max_generators: int | None = Field(default=None, ge=1, le=10_000)
    """Maximum number of generators; further agents wait as spares. null: as many as there are
    agents for them. `launcher.generators` is the number that the run begins with."""
    place_seconds: float = Field(default=600.0, gt=0, le=WEEK_SECONDS)
    """Longest wait for agents: at the start for the trainer's and those of `launcher.generators`,
    later for a replacement of the trainer's or of the last generator's."""
    silence_seconds: float = Field(default=20.0, gt=0, le=WEEK_SECONDS)
    """An agent that is silent for this long counts as lost, together with its processes."""

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        host_and_port(value)
        return value

    @property
    def control(self) -> str:
        """`HOST:PORT` at which the controller accepts the run's processes."""
        host, port = host_and_port(self.listen)
        return f"{host}:{port + 1 if self.control_port is None else self.control_port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Split `HOST:PORT`. Raises ValueError."""
    found = _LISTEN.fullmatch(address)
    if found is None or not 1 <= int(found["port"]) < MAX_PORT:
        raise ValueError(
            f"{address!r} is not HOST:PORT with a port from 1 to {MAX_PORT - 1} and an IPv4 "
            "address or a name that has one; for example 0.0.0.0:5900. Agents do not speak IPv6"
        )
    return found["host"], int(found["port"])


Strategy = Literal["pack", "spread", "strict_spread"]


class Bundle(BaseModel):
    """The resources of one process on its node."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    cpus: float = Field(default=1.0, gt=0, le=4096)
    """Cores. A process uses this many threads, rounded down, unless `launcher.threads` is set."""
    resources: dict[str, float] = {}
    """Custom resources of Ray that a node must have, e.g. {"fast_disk": 1}."""

    @field_validator("resources")
    @classmethod
    def _are_custom(cls, resources: dict[str, float]) -> dict[str, float]:
        for name in ("CPU", "GPU", "memory", "object_store_memory"):
            if name in resources:
                raise ValueError(
                    f"{name} is none of Ray's custom resources: cores are `cpus`, GPUs follow from "
                    "the engine's tensor_parallel_size, memory is not reserved"
                )
        return resources


class RayConfig(ClusterConfig):
    """Settings of a run on a Ray cluster."""

    address: str | None = Field(default=None, max_length=300)
    """`HOST:PORT` of the head; `auto`: the cluster that this machine belongs to; null: a cluster of
    this machine alone, which begins and ends with the run."""
    strategy: Strategy = "pack"
    """Placement of processes: `pack` on few nodes, `spread` over many, `strict_spread` each on a
    separate node. All GPUs of one generator are always on one node."""
    trainer: Bundle = Bundle()
    """Resources of the trainer."""
    generator: Bundle = Bundle()
    """Resources of each generator. Its GPUs are `tensor_parallel_size` of its engine."""
    runtime_env: dict[str, Any] = Field(default={})
    """Ray's runtime environment of the processes, e.g. {"env_vars": {...}}. Files are shipped only
    if they are named here: the nodes have asyncrl installed."""
    image: str | None = Field(default=None, max_length=500)
    """Container image of the processes (Ray's `image_uri`), with the same asyncrl."""
    bind_address: str | None = Field(default=None, max_length=300)
    """Address of this machine for the processes; null: the one by which Ray knows this machine."""
    connect_seconds: float = Field(default=30.0, gt=0, le=WEEK_SECONDS)
    """Longest wait for an answer of the cluster: a dead head is silent instead of refusing."""


GpuName = Annotated[str, Field(pattern=r"^(GPU|MIG)-[0-9A-Za-z/-]+$")]
GpuNumber = Annotated[int, Field(ge=0, le=1024)]


class LauncherConfig(BaseModel):
    """Start and supervision of a run's processes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Literal["local", "ray", "agents"] = "local"
    """`local`: child processes on this machine. `ray`: on the nodes of a Ray cluster
    (docs/deploy.md). `agents`: on machines or in containers that you have started, with `asyncrl
    agent` in each (docs/deploy.md)."""
    generators: int = Field(default=1, ge=1, le=10_000)
    """Number of generator processes."""
    threads: int | None = Field(default=None, ge=1, le=MAX_THREADS)
    """Threads of each process for tensor operations; null: the cores that this machine's affinity
    and a container's quota leave are divided."""
    gpus: tuple[GpuNumber | GpuName, ...] | None = None
    """GPUs that this run may use: numbers as `nvidia-smi` and CUDA_VISIBLE_DEVICES have them, or
    names that begin with GPU- or MIG-. null: all that CUDA_VISIBLE_DEVICES leaves visible. []:
    none, everything runs on the CPU. Each generator gets `tensor_parallel_size` of its engine of
    them, the trainer the next one (docs/trainer.md)."""
    weights: Literal["files", "broadcast"] = "files"
    """Transport of new weights to the generators. `files`: each reads them from the memory of its
    node. `broadcast`: the trainer sends them to all at once, by NCCL between GPUs and by gloo
    otherwise; one that misses it reads the file. The sockets lack keys: needs `trusted_network`."""
    trusted_network: bool = False
    """Confirms that only people you trust can log in to the run's nodes, or connect to or listen to
    the network between them. Only `weights: broadcast` and `trainer.rank_network` need it
    (SECURITY.md)."""
    colocate: bool | None = None
    """Let the trainer share the first GPU of the last generator instead of having a separate one.
    Its memory is divided by what a training step needs (docs/trainer.md). null: yes where the run
    may use one GPU, and one generator and the trainer would each take one; otherwise no."""
    pin_cores: bool = False
    """Pin each generator and the trainer to `threads` separate cores. The controller and the reward
    workers use a remaining core or else the trainer's, never a generator's."""
    startup_seconds: float = Field(default=START_SECONDS, gt=0, le=WEEK_SECONDS)
    """Longest wait for a process to become ready: imports, loading the model, compilation, CUDA
    graphs. vLLM and SGLang get 90% of it, so that their own error is seen first."""
    silence_seconds: float = Field(default=120.0, gt=0, le=WEEK_SECONDS)
    """A process that is silent for this long is killed and counts as dead; a relay after a quarter
    of it, so that the processes behind it can be heard again in time."""
    leave_seconds: float = Field(default=600.0, gt=0, le=WEEK_SECONDS)
    """Longest time for a generator to leave after `asyncrl scale`, counted while the run is not
    paused and has a trainer. Then it is killed, and its samples are generated again. Without
    verification it finishes the groups that it has begun."""
    checkpoint_seconds: float = Field(default=600.0, gt=0, le=WEEK_SECONDS)
    """Longest time for a checkpoint: a slower one is abandoned, and training continues. The trainer
    has this much additional time to end, because it saves one."""
    max_restarts: int = Field(default=3, ge=0, le=10_000)
    """Maximum number of restarts of processes that died: generators and trainers, counted together.
    Those that were lost with their machine (Ray's node, an agent) do not count. A restarted trainer
    continues from the newest checkpoint (trainer.checkpoint_every)."""
    ray: RayConfig = RayConfig()
    agents: AgentsConfig = AgentsConfig()

    @property
    def cluster(self) -> ClusterConfig:
        """The settings for several machines, of the launcher's kind."""
        return self.agents if self.kind == "agents" else self.ray

    @property
    def cluster_key(self) -> str:
        """The key of `cluster` in the configuration."""
        return "launcher.agents" if self.kind == "agents" else "launcher.ray"

    @model_validator(mode="after")
    def _sockets_without_keys_are_asked_for(self) -> Self:
        if self.weights == "broadcast" and not self.trusted_network:
            raise ValueError(
                "launcher.weights: broadcast opens sockets that have neither keys nor encryption, "
                "because torch.distributed and NCCL have none: anyone who reaches them can read "
                "the weights and disturb the run. If you trust all users of this machine and of "
                "the network between the nodes, set launcher.trusted_network: true; otherwise use "
                "launcher.weights: files"
            )
        return self

    @model_validator(mode="after")
    def _others_divide_the_machines(self) -> Self:
        local = {
            "gpus": self.gpus is not None,
            "colocate": bool(self.colocate),
            "pin_cores": self.pin_cores,
        }
        wrong = [f"launcher.{name}" for name, is_set in local.items() if is_set]
        if self.kind != "local" and wrong:
            who = {
                "ray": "Ray gives each process its cores and GPUs (launcher.ray.generator and "
                ".trainer)",
                "agents": "an agent's process has the cores and GPUs that its agent has",
            }
            raise ValueError(
                f"{', '.join(wrong)} is for launcher.kind: local; with launcher.kind: {self.kind}, "
                f"{who[self.kind]}"
            )
        return self

    @model_validator(mode="after")
    def _agents_have_a_secret(self) -> Self:
        if self.kind != "agents":
            return self
        if self.agents.key_file is None:
            raise ValueError(
                "launcher.kind: agents needs launcher.agents.key_file, the file of a secret that "
                "agents have too: `asyncrl agent-key FILE` writes one"
            )
        if self.weights == "broadcast":
            raise ValueError(
                "launcher.weights: broadcast does not work with launcher.kind: agents, whose ports "
                "are fixed; use launcher.weights: files"
            )
        most = self.agents.max_generators
        if most is not None and most < self.generators:
            raise ValueError(
                f"launcher.agents.max_generators: {most} is less than launcher.generators "
                f"({self.generators}), with which the run begins"
            )
        return self
