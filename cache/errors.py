"""What can go wrong in the cache.

CacheError
└── CacheCorrupt    the flat arrays contradict themselves: a bug, or memory overwritten by somebody

Misuse (a closed row, a negative token) is a plain `ValueError` or `TypeError`: fix the caller.
"""

from __future__ import annotations


class CacheError(Exception):
    """Root of what the cache raises by itself."""


class CacheCorrupt(CacheError):  # noqa: N818 - named for what was found
    """An integrity check failed; the message says which invariant. Throw the cache away."""
