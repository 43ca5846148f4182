"""Our additions to vLLM's configuration and requests.

vLLM carries these values between its two processes without reading them. Both sides read and write
them only here. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.engine.remote.extras import DrafterSettings, RequestExtra

SECTION = "asyncrl"
"""Key of our part in vLLM's `additional_config` and in a request's `extra_args`."""
_MESSAGES = "asyncrl_messages"
"""Key of `MessageSettings` in `additional_config`."""


def to_extra_args(extra: RequestExtra) -> dict[str, Any]:
    """Return the `extra_args` of a request's `SamplingParams`."""
    return {SECTION: extra.to_plain()}


def from_extra_args(extra_args: dict[str, Any] | None) -> RequestExtra:
    """Read what `to_extra_args` made. Raises KeyError if this engine did not send it."""
    return RequestExtra.from_plain((extra_args or {})[SECTION])


def drafter_to_config(settings: DrafterSettings) -> dict[str, Any]:
    """Return our part of vLLM's `additional_config`."""
    return {SECTION: msgspec.to_builtins(settings)}


def drafter_from_config(additional_config: dict[str, Any]) -> DrafterSettings:
    """Read what `drafter_to_config` made."""
    return msgspec.convert(additional_config[SECTION], DrafterSettings)


class MessageSettings(msgspec.Struct, frozen=True):
    """Settings of the scheduler's messages, in `additional_config`."""

    steps_per_message: int

    def to_config(self) -> dict[str, Any]:
        """Return the entry of `additional_config`."""
        return {_MESSAGES: msgspec.to_builtins(self)}

    @classmethod
    def from_config(cls, additional_config: dict[str, Any]) -> MessageSettings:
        """Read what `to_config` made."""
        return msgspec.convert(additional_config[_MESSAGES], cls)
