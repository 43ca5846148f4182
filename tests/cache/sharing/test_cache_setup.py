from pathlib import Path

import numpy as np
import pytest
from cache_check import check

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace, from_json, open_at, save_at, to_json
from asyncrl.cache.sharing.exchange import RING_BYTES, SharedCache
from asyncrl.cache.tree.rollout_tree import RolloutCache

CONFIG = CacheConfig(max_bytes=1 << 20)
CONTEXT = np.arange(8, dtype=np.int32)
TOKENS = np.arange(20, 40, dtype=np.int32)


def place(folder: Path, **changes: object) -> CachePlace:
    fields = {"name": "g", "snapshot": str(folder / "kept" / "g.snapshot"), "fingerprint": "one"}
    return CachePlace(**fields | changes)  # type: ignore[arg-type]


def drafts(cache: RolloutCache) -> list[int]:
    row = cache.open("p", CONTEXT)
    found = cache.draft(np.array([row], np.int32), np.array([4], np.int32)).tokens.tolist()
    cache.close(row)
    return found


def test_the_next_process_drafts_from_what_was_saved(tmp_path: Path) -> None:
    first = open_at(CONFIG, place(tmp_path))
    assert drafts(first) == []
    first.insert("p", CONTEXT, TOKENS)
    assert save_at(first, place(tmp_path)) > 4 * len(TOKENS)
    assert drafts(open_at(CONFIG, place(tmp_path))) == TOKENS[:4].tolist()


@pytest.mark.parametrize(
    ("changes", "content"),
    [({"fingerprint": "another"}, None), ({}, b"rubbish"), ({"vocabulary": 25}, None)],
)
def test_an_unusable_snapshot_is_logged_and_the_cache_starts_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict, content: bytes | None
) -> None:
    first = open_at(CONFIG, place(tmp_path))
    first.insert("p", CONTEXT, TOKENS)
    save_at(first, place(tmp_path))
    if content is not None:
        Path(str(place(tmp_path).snapshot)).write_bytes(content)
    cache = open_at(CONFIG, place(tmp_path, **changes))
    assert "the cache starts empty" in caplog.text
    assert drafts(cache) == []
    check(cache)


def test_generators_of_an_exchange_share_and_an_unsafe_exchange_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = str(tmp_path / "exchange")
    one = open_at(CONFIG, place(tmp_path, exchange=shared, name="one", snapshot=None))
    two = open_at(CONFIG, place(tmp_path, exchange=shared, name="two", snapshot=None))
    row = one.open("p", CONTEXT)
    one.extend(np.array([row]), TOKENS, np.array([0, len(TOKENS)]))
    one.close(row)
    assert drafts(two) == TOKENS[:4].tolist()
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    alone = open_at(CONFIG, place(tmp_path, exchange=str(tmp_path / "open"), snapshot=None))
    assert type(alone) is RolloutCache
    assert "shares no rollouts" in caplog.text


def test_a_disabled_cache_shares_nothing_and_another_one_has_its_settings(tmp_path: Path) -> None:
    there = place(tmp_path, exchange=str(tmp_path / "exchange"), vocabulary=64)
    assert type(open_at(CacheConfig(enabled=False), there)) is RolloutCache
    assert not (tmp_path / "exchange").exists()
    cache = open_at(CONFIG, there)
    assert isinstance(cache, SharedCache)
    assert cache.config is CONFIG
    assert (tmp_path / "exchange" / "g.ring").stat().st_size == RING_BYTES + 64


def test_a_place_is_sent_as_json_and_a_cache_without_one_is_not_saved(tmp_path: Path) -> None:
    assert from_json(to_json(place(tmp_path))) == place(tmp_path)
    assert save_at(RolloutCache(CONFIG), CachePlace()) == 0
