"""The behaviour of `RolloutCache` that engines rely on, one property at a time."""

import numpy as np
import pytest
from cache_check import CacheCorrupt, check
from rollout_caches import cache_of

from asyncrl.cache.tree import arena
from asyncrl.cache.tree.arena import hash_of
from asyncrl.cache.tree.draft import draft
from asyncrl.cache.tree.rollout_tree import RolloutCache, warm_up

PROMPT = np.array([101, 102, 103, 104], np.int32)
HUGE = 2**31 - 1


def make(**settings: object) -> RolloutCache:
    defaults = {"max_bytes": 1 << 20, "min_probability": 0.0, "calibrate": False}
    return cache_of(**(defaults | settings))


def extend(cache: RolloutCache, row: int, tokens: list[int]) -> None:
    cache.extend(np.array([row]), np.array(tokens, np.int64), np.array([0, len(tokens)]))


def draft_tokens(cache: RolloutCache, row: int, budget: int = 16) -> list[int]:
    return cache.draft(np.array([row]), np.array([budget])).tokens.tolist()


def test_a_sibling_drafts_the_tokens_of_a_running_one_from_its_first_token() -> None:
    cache = make()
    first, second = cache.open("p", PROMPT), cache.open("p", PROMPT)
    assert draft_tokens(cache, second) == []
    extend(cache, first, [5, 6, 7])
    assert draft_tokens(cache, second) == [5, 6, 7]
    extend(cache, second, [5])
    extend(cache, first, [8])
    assert draft_tokens(cache, second) == [6, 7, 8]
    check(cache)


def test_the_most_common_beginning_is_drafted_first() -> None:
    cache = make()
    for tokens in ([1, 2, 3], [1, 2, 4], [9, 9, 9], [1, 2, 3]):
        cache.insert("p", PROMPT, np.array(tokens))
    assert draft_tokens(cache, cache.open("p", PROMPT)) == [1, 2, 3]


def test_drafting_resumes_after_a_divergence() -> None:
    cache = make(min_match=3)
    cache.insert("p", PROMPT, np.arange(1, 40))
    row = cache.open("p", PROMPT)
    extend(cache, row, [1, 2, 3, 77])
    assert draft_tokens(cache, row) == []
    extend(cache, row, [10, 11, 12])
    assert draft_tokens(cache, row, 4) == [13, 14, 15, 16]


def test_rollouts_of_newer_policy_versions_outvote_older_ones_and_siblings_count_alike() -> None:
    cache = make(version_half_life=4.0, doubt=0.0)
    row = cache.open("p", PROMPT)
    for version, lasts in ((3, (1, 1, 1)), (11, (2, 3, 2))):
        cache.advance(version)
        for last in lasts:
            cache.insert("p", PROMPT, np.array([7, 8, 9, last]))
    extend(cache, row, [7, 8, 9])
    assert draft_tokens(cache, row) == [2]


def test_a_longer_match_outvotes_shorter_ones() -> None:
    cache = make(min_match=2)
    cache.insert("p", PROMPT, np.array([1, 2, 3, 4, 50]))
    cache.insert("p", PROMPT, np.array([9, 3, 4, 60]))
    cache.insert("p", PROMPT, np.array([8, 3, 4, 60]))
    row = cache.open("p", np.array([70, 71]))
    extend(cache, row, [1, 2, 3, 4])
    assert draft_tokens(cache, row, 1) == [50]


def test_when_a_running_sibling_is_only_just_ahead_others_take_over() -> None:
    cache = make(max_match=4)
    cache.insert("p", PROMPT, np.array([30, 1, 2, 3, 4, 5, 6, 7, 8]))
    ahead, row = cache.open("p", PROMPT), cache.open("p", PROMPT)
    extend(cache, ahead, [20, 1, 2, 3, 4, 5])
    extend(cache, row, [20])
    assert draft_tokens(cache, row) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_row_drafts_from_itself_only_in_a_long_repetition() -> None:
    cache = make(min_match=2, max_match=6)
    row = cache.open("p", PROMPT)
    extend(cache, row, [1, 2, 3, 1, 2])
    assert draft_tokens(cache, row) == []
    extend(cache, row, [3, 1, 2, 3, 1, 2])
    assert draft_tokens(cache, row, 1) == [3]


def test_a_resumed_request_drafts_its_old_continuation() -> None:
    cache = make()
    cache.insert("p", PROMPT, np.arange(1, 30))
    row = cache.open("p", np.concatenate([PROMPT, np.arange(1, 15)]))
    assert draft_tokens(cache, row, 3) == [15, 16, 17]


def test_a_draft_ends_where_its_estimated_probability_falls_below_the_threshold() -> None:
    cache = make(min_probability=0.5, doubt=0.25)
    cache.insert("p", PROMPT, np.arange(1, 30))
    drafts = cache.draft(np.array([cache.open("p", PROMPT)]), np.array([16]))
    np.testing.assert_allclose(drafts.path_probabilities, 0.8 ** np.arange(1, 4), rtol=1e-6)
    assert len(drafts.tokens) == 3  # 0.8 ** 3 = 0.51, 0.8 ** 4 = 0.41


def test_budgets_bound_each_row() -> None:
    cache = make(max_draft_tokens=6)
    cache.insert("p", PROMPT, np.arange(1, 30))
    rows = np.array([cache.open("p", PROMPT) for _ in range(4)])
    drafts = cache.draft(rows, np.array([0, 2, 1000, HUGE]))
    assert drafts.offsets.tolist() == [0, 0, 2, 8, 14]
    assert drafts.tokens.tolist() == [1, 2, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]
    assert cache.stats().drafted == 14


@pytest.mark.parametrize("version", [-1, 2**31, 2**63])
def test_impossible_policy_versions_are_refused(version: int) -> None:
    cache = make()
    with pytest.raises(ValueError, match="policy_version must lie"):
        cache.advance(version)


def test_old_text_is_still_drafted_where_there_is_nothing_newer() -> None:
    cache = make(version_half_life=1.0, min_probability=0.1)
    for _ in range(4):
        cache.insert("p", PROMPT, np.arange(1, 30))
    for version in (3, 1_000_000, HUGE, 0):  # a run may also return to a checkpoint
        cache.advance(version)
        assert draft_tokens(cache, cache.open("p", PROMPT), 1) == [1]
    check(cache)


def test_keys_do_not_mix() -> None:
    cache = make()
    cache.insert("p", PROMPT, np.arange(1, 30))
    for key in ("q", "p ", "P", "\0", "p" * 10_000):
        assert draft_tokens(cache, cache.open(key, PROMPT)) == []
    assert draft_tokens(cache, cache.open("p", PROMPT)) != []
    check(cache)


def test_the_empty_key_and_a_disabled_cache_store_and_draft_nothing() -> None:
    for cache, key in ((make(), ""), (make(enabled=False), "p")):
        row = cache.open(key, PROMPT)
        extend(cache, row, [1, 2, 3])
        assert draft_tokens(cache, cache.open(key, PROMPT)) == []
        cache.close(row)
        stats = cache.stats()
        assert (stats.bytes, stats.tokens, stats.trees, stats.inserted_tokens) == (0, 0, 0, 3)
        check(cache)


def test_warm_up_leaves_nothing_to_compile() -> None:
    warm_up()
    kernels = (arena.extend, draft, hash_of, arena.trim_tree)
    before = [len(f.signatures) for f in kernels]
    cache = make(max_bytes=1 << 14)
    for index in range(30):
        cache.insert(f"p{index % 3}", PROMPT.astype(np.int64), np.arange(200))
        cache.advance(index)
        row = np.array([cache.open("", PROMPT)])
        for branching in (False, True):
            cache.draft(row, np.array([4]), branching=branching, min_probability=index % 2)
    assert [len(f.signatures) for f in kernels] == before
    assert before == [1, 1, 1, 1]


def test_an_empty_batch_is_valid() -> None:
    cache = make()
    none = np.empty(0, np.int32)
    cache.extend(none, none, np.array([0]))
    assert cache.draft(none, none).offsets.tolist() == [0]
    row = cache.open("p", none)
    cache.extend(np.array([row]), none, np.array([0, 0]))
    assert draft_tokens(cache, row) == []
    assert cache.stats().tokens == 0
    cache.insert("p", none, np.array([1, 2]))
    assert draft_tokens(cache, row) == [1, 2]


def test_the_largest_token_and_its_neighbours_are_told_apart() -> None:
    cache = make(min_match=1)
    cache.insert("p", PROMPT, np.array([HUGE, 1, HUGE - 1, 2, 0, 3]))
    row = cache.open("p", PROMPT)
    for token, follower in ((HUGE, 1), (HUGE - 1, 2), (0, 3)):
        extend(cache, row, [token])
        assert draft_tokens(cache, row, 1) == [follower]
    check(cache)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (np.array([-1]), "between 0 and 2147483647, not -1"),
        (np.array([2**31]), "not 2147483648"),
        (np.array([2**63], np.uint64), "not 9223372036854775808"),
        (np.array([[1]]), "one-dimensional"),
    ],
)
def test_impossible_tokens_are_refused_and_nothing_is_changed(
    tokens: np.ndarray, error: str
) -> None:
    cache = make()
    row = cache.open("p", PROMPT)
    extend(cache, row, [1, 2, 3])
    before = cache.stats()
    with pytest.raises(ValueError, match=error):
        cache.extend(np.array([row]), tokens, np.array([0, 1]))
    with pytest.raises(ValueError, match=error):
        cache.open("p", tokens)
    assert cache.stats() == before


def test_wrong_types_are_refused() -> None:
    cache = make()
    row = cache.open("p", PROMPT)
    with pytest.raises(TypeError, match="must be a str, not int"):
        cache.open(5, PROMPT)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="integers, not float64"):
        cache.extend(np.array([row]), np.array([1.5]), np.array([0, 1]))


@pytest.mark.parametrize("offsets", [[0], [0, 1, 2], [1, 2], [0, 1], [0, 3], [], [-1, 2]])
def test_offsets_that_do_not_fit_are_refused(offsets: list[int]) -> None:
    cache = make()
    row = cache.open("p", PROMPT)
    with pytest.raises(ValueError, match="offsets"):
        cache.extend(np.array([row]), np.array([1, 2]), np.array(offsets, np.int64))
    rows = np.array([row, row])
    with pytest.raises(ValueError, match="must rise from 0 to 2"):
        cache.extend(rows, np.array([1, 2]), np.array([0, 3, 2]))


def test_rows_that_are_not_open_are_refused() -> None:
    cache = make()
    row = cache.open("p", PROMPT)
    cache.close(row)
    with pytest.raises(ValueError, match=f"row {row} is not open"):
        cache.close(row)
    for bad in (row, -1, 10_000, HUGE, 2**40):
        with pytest.raises(ValueError, match=r"not open|rows must lie"):
            cache.draft(np.array([bad]), np.array([1]))
        with pytest.raises(ValueError, match=r"not open|rows must lie"):
            cache.extend(np.array([bad]), np.array([1]), np.array([0, 1]))
        with pytest.raises(ValueError, match="is not open"):
            cache.close(bad)
    other = cache.open("p", PROMPT)
    with pytest.raises(ValueError, match="budgets must lie"):
        cache.draft(np.array([other]), np.array([-1]))
    with pytest.raises(ValueError, match="as many budgets"):
        cache.draft(np.array([other]), np.array([1, 2]))


@pytest.mark.parametrize(
    ("row", "tokens", "offsets", "message"),
    [
        (1, [1], [0, 1], "not open"),
        (-1, [1], [0, 1], "not open"),
        (10_000, [1], [0, 1], "not open"),
        (0, [1, -2], [0, 2], "tokens must lie"),
        (0, [1, 2], [0, 1], "must rise from 0 to 2"),
        (0, [1, 2], [1, 2], "must rise from 0 to 2"),
        (0, [1, 2], [0, 3, 2], "need 2 offsets, not 3"),
        (0, [1, 2], [], "need 2 offsets, not 0"),
    ],
)
def test_arrays_that_need_no_conversion_are_checked_as_well(
    row: int, tokens: list[int], offsets: list[int], message: str
) -> None:
    cache = make()
    assert cache.open("p", PROMPT) == 0
    with pytest.raises(ValueError, match=message):
        cache.extend(*(np.array(one, np.int32) for one in ([row], tokens, offsets)))
    assert cache.stats().inserted_tokens == 0
    falling = [np.array(one, np.int32) for one in ([0, 0], [1, 2], [0, 3, 2])]
    with pytest.raises(ValueError, match="must rise from 0 to 2"):
        cache.extend(*falling)


def test_arrays_of_any_layout_are_stored_alike() -> None:
    plain = [np.array([0], np.int32), np.arange(5, 11, dtype=np.int32), np.array([0, 6], np.int32)]
    read_only = [one.copy() for one in plain]
    for one in read_only:
        one.setflags(write=False)
    strided = [np.repeat(one, 2)[::2] for one in plain]
    for arrays in (plain, read_only, strided, [one.astype(np.int64) for one in plain]):
        cache = make()
        cache.open("p", PROMPT)
        cache.extend(*arrays)
        other = cache.open("p", PROMPT)
        assert cache.draft(np.array([other]), np.array([6])).tokens.tolist() == [*range(5, 11)]


def test_hundreds_of_rows_and_prompts() -> None:
    cache = make()
    rows = np.array([cache.open(f"p{i}", PROMPT) for i in range(300)])
    tokens = np.arange(1000, 1900)
    cache.extend(rows, tokens, np.arange(0, 903, 3))
    again = np.array([cache.open(f"p{i}", PROMPT) for i in range(300)])
    assert cache.draft(again, np.full(300, 9)).tokens.tolist() == tokens.tolist()
    check(cache)
    for row in (*rows, *again):
        cache.close(row)
    check(cache)
    assert cache.stats().rows == 0


def test_trees_without_tokens_are_dropped() -> None:
    cache = make()
    for index in range(100):
        cache.close(cache.open(f"p{index}", PROMPT))
    assert cache.stats().trees == cache.stats().bytes == 0


def test_the_least_recently_used_prompt_goes_first_and_open_ones_stay() -> None:
    cache = make(max_bytes=64 << 10)
    cache.insert("old", PROMPT, np.arange(500))
    cache.insert("used", PROMPT, np.arange(500))
    row = cache.open("busy", PROMPT)
    extend(cache, row, list(range(500)))
    for index in range(40):
        cache.close(cache.open("used", PROMPT))
        cache.insert(f"new{index}", PROMPT, np.arange(200))
        check(cache)
    assert draft_tokens(cache, cache.open("old", PROMPT)) == []
    assert len(draft_tokens(cache, cache.open("used", PROMPT))) == 16
    assert len(draft_tokens(cache, cache.open("busy", PROMPT))) == 16
    assert cache.stats().evicted_tokens > 0


def test_a_prompt_over_its_own_budget_loses_its_oldest_rollouts() -> None:
    cache = make(bytes_per_prompt=16 << 10)
    for first in range(60):
        cache.insert("p", PROMPT, np.concatenate([[first], np.arange(100)]))
        check(cache)
    row = cache.open("p", PROMPT)
    extend(cache, row, [59])
    assert len(draft_tokens(cache, row)) == 16
    stats = cache.stats()
    assert stats.bytes <= 17 << 10
    assert stats.tokens + stats.evicted_tokens == stats.inserted_tokens


def test_max_bytes_bounds_one_prompt_whose_own_budget_is_larger() -> None:
    cache = make(max_bytes=16 << 10, bytes_per_prompt=1 << 20)
    for first in range(60):
        cache.insert("p", PROMPT, np.concatenate([[first], np.arange(100)]))
        check(cache)
        assert cache.stats().bytes <= 16 << 10
    row = cache.open("p", PROMPT)
    extend(cache, row, [59])
    assert len(draft_tokens(cache, row)) == 16


def test_without_any_room_rows_still_draft() -> None:
    cache = make(max_bytes=16 << 10, bytes_per_prompt=8 << 10)
    rows = [cache.open("p", PROMPT) for _ in range(20)]
    for row in rows:
        extend(cache, row, list(range(90)))
        check(cache)
    late = cache.open("p", PROMPT)
    for token in range(85):
        assert draft_tokens(cache, late, 2) == [token, token + 1]
        extend(cache, late, [token])
    stats = cache.stats()
    assert stats.refused_tokens > 0
    assert stats.bytes <= 16 << 10


def test_corruption_is_detected() -> None:
    rng = np.random.default_rng(0)
    clean = make(max_bytes=1 << 16)
    for index in range(5):
        clean.insert(f"p{index % 2}", PROMPT, np.arange(60) % 7)
    check(clean)
    used = int(clean._forest.state[arena.BUMP])
    found = 0
    for _ in range(300):
        word = int(rng.integers(arena.BLOCK, used))
        kept = clean._forest.arena[word]
        clean._forest.arena[word] = rng.integers(-(2**31), 2**31)
        try:
            check(clean)
        except CacheCorrupt:
            found += 1
        clean._forest.arena[word] = kept
    check(clean)
    assert found > 100  # unused words may have any value
    clean._forest.state[arena.LIVE] -= 1
    with pytest.raises(CacheCorrupt, match="live"):
        check(clean)
