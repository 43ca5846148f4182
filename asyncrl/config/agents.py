"""Settings of the launcher of agents."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from asyncrl.wire.transport.paths import WEEK_SECONDS, AbsolutePath


class ClusterConfig(BaseModel):
    """What a run on several machines needs, whoever starts its processes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    weights_directory: str = "/dev/shm"  # noqa: S108 - memory, and files there have mode 0600
    """Folder in memory that every node has for weights."""
    relays: Literal["auto", "always"] = "auto"
    """Whether a relay on each node carries weights between nodes: `auto` if the run's processes are
    on several machines, `always` also between nodes of one machine, as if they shared no memory."""
    max_relay_restarts: int = Field(default=10, ge=0, le=10_000)
    """Most relays that are replaced after they were lost; the other processes go on meanwhile."""
    place_seconds: float = Field(default=120.0, gt=0, le=WEEK_SECONDS)
    """Longest wait for room on the nodes, and for an answer of each."""


MAX_PORT = 65_535
_LISTEN = re.compile(r"(?P<host>[^\s:/\[\]]+):(?P<port>\d{1,5})")


class AgentsConfig(ClusterConfig):
    """How a run uses agents (docs/agents.md). Only read with `launcher.kind: agents`."""

    listen: str = Field(default="127.0.0.1:5900", max_length=300)
    """`HOST:PORT` at which the controller waits for agents (`asyncrl agent --controller`). HOST is
    an address of this machine; 0.0.0.0 is every one."""
    control_port: int | None = Field(default=None, ge=1, le=MAX_PORT)
    """Port of the same host at which the run's processes speak to the controller; null: the one
    after that of `listen`."""
    key_file: AbsolutePath | None = Field(default=None, max_length=4096)
    """File of the secret that the controller and all agents have: `asyncrl agent-key FILE` writes
    one. Needed with `launcher.kind: agents`."""
    max_generators: int | None = Field(default=None, ge=1, le=10_000)
    """Most generators; further agents wait as spares. null: as many as there are agents for
    them. `launcher.generators` is the number that the run begins with."""
    place_seconds: float = Field(default=600.0, gt=0, le=WEEK_SECONDS)
    """Longest wait for agents: at the start for a trainer's and those of `launcher.generators`,
    later for one in place of the trainer's or of the last generator's that was lost."""
    silence_seconds: float = Field(default=20.0, gt=0, le=WEEK_SECONDS)
    """An agent that says nothing for this long counts as lost, and its processes with it."""

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        host_and_port(value)
        return value

    @property
    def control(self) -> str:
        """`HOST:PORT` at which the run's processes speak to the controller."""
        host, port = host_and_port(self.listen)
        return f"{host}:{port + 1 if self.control_port is None else self.control_port}"


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `HOST:PORT`. Raises ValueError."""
    found = _LISTEN.fullmatch(address)
    if found is None or not 1 <= int(found["port"]) < MAX_PORT:
        raise ValueError(
            f"{address!r} is not HOST:PORT with a port from 1 to {MAX_PORT - 1} and an IPv4 "
            "address or a name that has one; for example 0.0.0.0:5900. Agents do not speak IPv6"
        )
    return found["host"], int(found["port"])
