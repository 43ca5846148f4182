"""A generator's cache: opened from a snapshot, shared, and saved again.

A failure here costs drafts, never exactness: it is logged, and the run continues.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.exchange import SharedCache
from asyncrl.cache.sharing.ring import ExchangeRefused
from asyncrl.cache.sharing.snapshot import SnapshotRefused, restore, save
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.rollout.jit import INT32_MAX

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachePlace:
    """The shared and saved places of a generator's cache. Sent to vLLM's process as JSON."""

    name: str = "generator"
    """Name of the generator; unique among the running ones of an exchange."""
    exchange: str | None = None
    """Directory through which the generators of one machine share rollouts; None: not shared."""
    snapshot: str | None = None
    """File that `open_at` reads if it exists and `save_at` writes; None: neither."""
    fingerprint: str = ""
    """Model and tokenizer of the tokens; a snapshot with another fingerprint is refused."""
    vocabulary: int = INT32_MAX + 1
    """Token ids from peers and snapshots from this one on are refused."""


def open_at(config: CacheConfig, place: CachePlace) -> RolloutCache:
    """Open the cache of a generator, with the rollouts of its snapshot; a disabled one shares none.

    If the snapshot or the exchange cannot be used, a warning is logged and the cache does without.
    """
    cache: RolloutCache | None = None
    if place.exchange is not None and config.enabled:
        exchange = Path(place.exchange)
        try:
            cache = SharedCache(config, exchange, place.name, vocabulary=place.vocabulary)
        except ExchangeRefused as error:
            _log.warning("this generator shares no rollouts with others: %s", error)
    cache = cache or RolloutCache(config)
    path = None if place.snapshot is None else Path(place.snapshot)
    if path is not None and path.exists() and config.enabled:
        try:
            tokens = restore(path, cache, place.fingerprint, vocabulary=place.vocabulary)
        except (SnapshotRefused, ValueError, OSError) as error:
            _log.warning("the cache starts empty: %s", error)
        else:
            _log.info("the cache starts with %d tokens of an earlier process", tokens)
    return cache


def save_at(cache: RolloutCache, place: CachePlace) -> int:
    """Write the snapshot, if the place names a file; return its bytes, 0 if none was written."""
    if place.snapshot is None or not cache.config.enabled:
        return 0
    path = Path(place.snapshot)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return save(cache, path, place.fingerprint)
    except OSError as error:
        _log.warning("the cache was not saved: %s", error)
        return 0


def to_json(place: CachePlace) -> str:
    """Encode the place as JSON, for another process."""
    return msgspec.json.encode(place).decode()


def from_json(text: str) -> CachePlace:
    """Decode the place from `to_json`."""
    return msgspec.json.decode(text, type=CachePlace)
