"""What can go wrong in the cache.

CacheError
├── CacheCorrupt      the flat arrays contradict themselves: a bug, or memory overwritten
├── SnapshotRefused   a file is no snapshot that this process may use
└── ExchangeRefused   the directory through which generators share rollouts cannot be used

Misuse (a closed row, a negative token) is a plain `ValueError` or `TypeError`: fix the caller.
"""

from __future__ import annotations


class CacheError(Exception):
    """Root of what the cache raises by itself."""


class CacheCorrupt(CacheError):  # noqa: N818 - named for what was found
    """An integrity check failed; the message says which invariant. Throw the cache away."""


class SnapshotRefused(CacheError):  # noqa: N818 - named for what was decided
    """A snapshot was not loaded; the message says what is wrong in which file, and what is right.

    Going on with an empty cache is always correct, only slower.
    """


class ExchangeRefused(CacheError):  # noqa: N818 - named for what was decided
    """The exchange's directory cannot be made, or others could write to it; the message says why.

    Going on without an exchange is always correct, only slower.
    """
