"""Settings of the Ray launcher."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from asyncrl.config.cluster import ClusterConfig
from asyncrl.wire.transport.limits import WEEK_SECONDS

Strategy = Literal["pack", "spread", "strict_spread"]


class Bundle(BaseModel):
    """What one process takes of its node."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    cpus: float = Field(default=1.0, gt=0, le=4096)
    """Cores. A process has as many threads, rounded down, unless `launcher.threads` is set."""
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
    """How a run uses a Ray cluster. Only read with `launcher.kind: ray`."""

    address: str | None = Field(default=None, max_length=300)
    """`HOST:PORT` of the head; `auto`: the cluster that this machine belongs to; null: a cluster
    of this machine alone, which begins and ends with the run."""
    strategy: Strategy = "pack"
    """How processes are placed: `pack` on few nodes, `spread` over many, `strict_spread` each on
    a node of its own. All GPUs of one generator are always on one node."""
    trainer: Bundle = Bundle()
    """What the trainer takes."""
    generator: Bundle = Bundle()
    """What each generator takes. Its GPUs are `tensor_parallel_size` of its engine."""
    runtime_env: dict[str, Any] = Field(default={})
    """Ray's runtime environment of the processes, e.g. {"env_vars": {...}}. Nothing is shipped
    unless it is named here: the nodes have asyncrl installed."""
    image: str | None = Field(default=None, max_length=500)
    """Container image that the processes run in (Ray's `image_uri`). It has the same asyncrl."""
    bind_address: str | None = Field(default=None, max_length=300)
    """Address of this machine at which the controller listens for the processes; null: the one by
    which Ray knows this machine."""
    connect_seconds: float = Field(default=30.0, gt=0, le=WEEK_SECONDS)
    """Longest wait for an answer of the cluster. A head that is dead does not refuse a connection,
    it is silent."""
