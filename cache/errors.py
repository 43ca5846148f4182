"""Errors of the cache.

CacheError
├── SnapshotRefused   a file is not a snapshot that this process may use
└── ExchangeRefused   the directory through which generators share rollouts cannot be used

Misuse (a closed row, a negative token) raises `ValueError` or `TypeError`: fix the caller.
"""

from __future__ import annotations


class CacheError(Exception):
    """Base class of the cache's own errors."""


class SnapshotRefused(CacheError):  # noqa: N818 - named for what was decided
    """A snapshot was not loaded; the message says which file is wrong, how, and what to do."""


class ExchangeRefused(CacheError):  # noqa: N818 - named for what was decided
    """The exchange's directory cannot be made, or others could write to it."""
