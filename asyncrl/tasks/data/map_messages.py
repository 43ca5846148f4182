"""Messages between the controller and the process that runs `task.map`.

Each is a frame (`asyncrl.user_code.streams`). The process reads a `Load` and then one example per
frame, until its input ends. It answers `Loaded` or `Refused`, and each example with `Mapped` or
`Failed`, in order. Import-light: that process loads this file.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.errors import DataError
from asyncrl.user_code.loading import FunctionKind

MAP = FunctionKind(noun="task.map", signature="function(example)", arguments=({},), error=DataError)


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load this function."""

    name: str
    search_path: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The function can be called."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The function cannot be loaded; `message` says why."""

    message: str


class Mapped(msgspec.Struct, frozen=True, tag=True):
    """The function's result for one example; None leaves the example out."""

    values: dict[str, Any] | None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The function raised or returned an invalid value; `message` describes it."""

    message: str


Answer = Loaded | Refused | Mapped | Failed
