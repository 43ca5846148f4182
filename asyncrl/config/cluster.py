"""Settings that the launchers of several machines share."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from asyncrl.wire.transport.limits import WEEK_SECONDS


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
