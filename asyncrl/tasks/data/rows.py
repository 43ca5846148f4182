"""Rows of a dataset, and which of them can be used.

A row must survive the messages that carry it to the rewards: text is valid Unicode, integers fit
64 bits, nesting and size are limited. It is checked where it is read, so that an error names the
file and the line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.suggestions import shortened

MAX_ROW_BYTES = 16 << 20
"""Largest size of a row: of a line of JSONL, and of the row as a message."""
MAX_LEVELS = 64
"""Most levels of nesting."""

_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Row:
    """One example of a dataset."""

    where: str
    """File and line, for errors."""
    values: dict[str, Any]
    """By column."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used."""

    where: str
    """File and line."""
    reason: str
    """What is wrong with it, in one sentence."""


def checked(where: str, values: Any) -> Row | BadRow:
    """The row as JSON-able values, or why it cannot be used."""
    if not isinstance(values, dict):
        return BadRow(
            where, f"each row must be one JSON object, this one is a {type(values).__name__}"
        )
    if not _is_shallow(values, MAX_LEVELS):
        return BadRow(where, f"it is nested more than {MAX_LEVELS} levels deep")
    try:
        plain = msgspec.to_builtins(values)
        size = len(_ENCODER.encode(plain))
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        return BadRow(where, f"it has a lone surrogate (\\u{code:04x}), which is not valid Unicode")
    except (TypeError, ValueError, OverflowError) as error:
        return BadRow(
            where,
            f"it has a value that cannot be handed to a reward ({shortened(str(error))}); numbers "
            "must fit 64 bits, and everything else must be representable in JSON",
        )
    if size > MAX_ROW_BYTES:
        return BadRow(where, f"it has {size >> 20} MiB, more than {MAX_ROW_BYTES >> 20} MiB")
    return Row(where, plain)


def _is_shallow(value: Any, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return True
    return levels > 0 and all(_is_shallow(entry, levels - 1) for entry in value)
