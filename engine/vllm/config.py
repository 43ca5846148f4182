"""Settings of the vLLM engine."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class VllmConfig(BaseModel):
    """How vLLM is started."""

    model_config = ConfigDict(extra="forbid", frozen=True)
