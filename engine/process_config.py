"""Settings that vLLM and SGLang share, which run in separate processes."""

from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr

from asyncrl.wire.transport.paths import START_SECONDS

_SHARE_OF_START = 0.9
"""The library's part of the limit of its generator's start; the rest is imports and attaching."""


class ProcessConfig(BaseModel):
    """Settings and fixed limits of a library in a separate process."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    steps_per_message: ClassVar[int] = 4
    """Generated tokens are sent after this many steps or 0.1 s: a message costs the generator's
    process more than its content. Responses end up to this many steps later."""
    call_seconds: ClassVar[float] = 120.0
    """Longest wait for it to pause or resume; a slower step of SGLang ends it, too. Staging and
    installing weights may take longer (`asyncrl.engine.weights`)."""

    _start_limit: float = PrivateAttr(_SHARE_OF_START * START_SECONDS)

    @property
    def start_limit(self) -> float:
        """Longest wait in seconds for it to become ready; less than its generator's limit."""
        return self._start_limit

    def started_within(self, seconds: float) -> Self:
        """Return a copy whose process is killed if it is not ready after `seconds`."""
        changed = self.model_copy()
        changed._start_limit = max(1.0, _SHARE_OF_START * seconds)  # noqa: SLF001 - a copy of its own
        return changed
