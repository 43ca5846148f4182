"""What the settings of vLLM and SGLang share, which run in processes of their own."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr

from asyncrl.wire.transport.paths import START_SECONDS

_SHARE_OF_START = 0.9
"""The library's part of the limit of its generator's start; the rest is imports and attaching."""


class ProcessConfig(BaseModel):
    """Settings of a library in a process of its own, and limits that are not settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    steps_per_message: ClassVar[int] = 4
    """What was generated is sent after so many steps, or after 0.1 s: a message costs the
    generator's process more than what is in it. Responses end up to so many steps later."""
    call_seconds: ClassVar[float] = 120.0
    """Longest wait for it to pause or to resume; a step of SGLang that takes longer ends it, too.
    Staging and installing weights may take longer (`asyncrl.engine.weights`)."""

    _start_limit: float = PrivateAttr(_SHARE_OF_START * START_SECONDS)

    @property
    def start_limit(self) -> float:
        """Longest wait for it to become ready, in seconds: its own error comes before its end."""
        return self._start_limit

    def started_within(self, seconds: float) -> Self:
        """These settings in a process that is killed if it is not ready after so many seconds."""
        changed = self.model_copy()
        changed._start_limit = max(1.0, _SHARE_OF_START * seconds)  # noqa: SLF001 - a copy of its own
        return changed
