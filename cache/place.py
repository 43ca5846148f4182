"""Where a generator's cache comes from, whom it shares with, and where it is kept.

    place = CachePlace(name="generator-0", exchange=None, snapshot=Path("g0.snapshot"), ...)
    cache = open_at(config, place)     # drafts from what an earlier process had saved
    save_at(cache, place)

Whatever goes wrong here costs drafts, never exactness: it is said, and the run goes on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cache.config import CacheConfig
from cache.errors import CacheError
from cache.exchange import SharedCache, open_cache
from cache.snapshot import restore, save
from cache.tree import RolloutCache
from rollout.arrays import INT32_MAX

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachePlace:
    """Plain data: it travels into vLLM's process as JSON."""

    name: str = "generator"
    """Of the generator; no two living ones of an exchange share it."""
    exchange: str | None = None
    """Directory through which the generators of one machine share rollouts; None: alone."""
    snapshot: str | None = None
    """File that is read at the start if it is there, and written by `save_at`; None: neither."""
    fingerprint: str = ""
    """What the tokens belong to; a snapshot of another one is refused."""
    vocabulary: int = INT32_MAX + 1
    """Tokens from elsewhere that are not below it are refused."""


def open_at(config: CacheConfig, place: CachePlace) -> RolloutCache | SharedCache:
    """The cache of a generator, with what its snapshot holds.

    A snapshot or an exchange that cannot be used is a warning: the cache begins empty, or alone.
    """
    cache: RolloutCache | SharedCache
    try:
        cache = open_cache(
            config, exchange=_path(place.exchange), name=place.name, vocabulary=place.vocabulary
        )
    except CacheError as error:
        _log.warning("this generator shares no rollouts with others: %s", error)
        cache = RolloutCache(config)
    path = _path(place.snapshot)
    if path is not None and path.exists() and config.enabled:
        try:
            tokens = restore(path, _inner(cache), place.fingerprint, vocabulary=place.vocabulary)
        except (CacheError, ValueError, OSError) as error:
            _log.warning("the cache begins empty: %s", error)
        else:
            _log.info("%d tokens of an earlier process are drafted from", tokens)
    return cache


def save_at(cache: RolloutCache | SharedCache, place: CachePlace) -> int:
    """Write the snapshot, if the cache has a place for one; returns its bytes."""
    path = _path(place.snapshot)
    if path is None or not cache.config.enabled:
        return 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return save(_inner(cache), path, place.fingerprint)
    except (CacheError, OSError) as error:
        _log.warning("the cache was not saved: %s", error)
        return 0


def to_json(place: CachePlace) -> str:
    """For another process."""
    return msgspec.json.encode(place).decode()


def from_json(text: str) -> CachePlace:
    """What `to_json` wrote."""
    return msgspec.json.decode(text, type=CachePlace)


def _inner(cache: RolloutCache | SharedCache) -> RolloutCache:
    return cache.cache if isinstance(cache, SharedCache) else cache


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
