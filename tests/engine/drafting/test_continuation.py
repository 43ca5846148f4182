"""Following earlier continuations: cursors, divergence, finding the place again, moving slots."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from asyncrl.engine.drafting.proposals import Continuations, path_probabilities
from asyncrl.rollout.trajectory import IntArray

TEXT = np.array([3, 4, 5, 6, 8, 9, 10, 11], np.int32)


def ids(*values: int) -> IntArray:
    return np.array(values, np.int32)


def follow(texts: Continuations, response: list[int], grown: int, slot: int = 0) -> list[int]:
    """Report the last `grown` tokens of a response that started at 0; gives what is proposed."""
    table = np.zeros((1, 40), np.int32)
    table[0, : len(response)] = response
    end = ids(len(response))
    texts.follow(ids(slot), ids(grown), table, ids(0), end, ids(0))
    left = int(texts.left(ids(slot))[0])
    return texts.propose(ids(slot), left)[0].tolist() if left else []


def test_a_text_is_followed_to_its_end() -> None:
    texts = Continuations()
    texts.begin(0, TEXT)
    assert follow(texts, [3], 1) == TEXT[1:].tolist()
    assert follow(texts, [3, 4, 5, 6], 3) == TEXT[4:].tolist()
    assert follow(texts, TEXT.tolist(), 4) == []
    assert follow(texts, [*TEXT.tolist(), 1], 1) == []


def test_a_token_that_differs_is_taken_for_a_substitution() -> None:
    texts = Continuations()
    texts.begin(0, TEXT)
    response = [3, 4, 5, 40]
    assert follow(texts, response, 4) == [8, 9, 10, 11]
    assert follow(texts, [*response, 8, 9], 2) == [10, 11]
    assert follow(texts, [*response, 8, 9, 41], 1) == [11]


@pytest.mark.parametrize("instead", [[30, 40], [30, 6, 40]])
def test_a_text_is_found_again_after_a_divergence(instead: list[int]) -> None:
    """Two or three tokens are generated in the place of the 6; then three tokens must agree."""
    texts = Continuations()
    texts.begin(0, TEXT)
    response = [3, 4, 5, instead[0]]
    follow(texts, response, 4)
    for token in [*instead[1:], 8, 9]:
        response.append(token)
        assert follow(texts, response, 1) == []
    assert follow(texts, [*response, 10], 1) == [11]


def test_a_rejected_token_is_not_proposed_again_at_its_place() -> None:
    """In a text that repeats itself, the last three tokens are also found before that place."""
    texts = Continuations()
    texts.begin(0, ids(7, 7, 7, 7, 5, 6, 7, 7, 7, 4))
    response = [7, 7, 7, 7]
    follow(texts, response, 4)
    proposed = []
    for _ in range(3):
        response.append(7)
        proposed.append(follow(texts, response, 1)[:1])
    assert proposed == [[6], [4], []], "one after the other was rejected"


def test_a_letter_that_repeats_is_drafted_through() -> None:
    """Two random texts of mostly one letter: tokens a step from the longest drafts of 16.

    Each token is accepted with 0.735, so drafts without any search would give 3.77.
    """
    rng = np.random.default_rng(0)
    old, new = (rng.choice(3, (60, 300), p=(0.85, 0.10, 0.05)).astype(np.int32) for _ in range(2))
    texts = Continuations()
    steps = generated = 0
    for slot in range(60):
        texts.begin(slot, old[slot])
        end = 0
        while end < 200:
            left = int(texts.left(ids(slot))[0])
            draft = texts.propose(ids(slot), min(left, 16))[0] if left else ids()
            agrees = draft == new[slot, end : end + len(draft)]
            grown = 1 + int(agrees.cumprod().sum())
            end += grown
            steps, generated = steps + 1, generated + grown
            texts.follow(ids(slot), ids(grown), new, ids(slot), ids(end), ids(0))
    assert generated / steps > 2.5


def test_fewer_than_three_tokens_of_the_response_find_nothing() -> None:
    """The tokens before the response are not compared, even where they agree."""
    texts = Continuations()
    texts.begin(0, ids(30, 3, 4, 5, 6))
    table = np.array([[3, 4, 5, 0]], np.int32)
    texts.follow(ids(0), ids(1), table, ids(0), ids(3), ids(1))
    assert texts.left(ids(0)).tolist() == [0]


def test_a_cursor_can_be_set() -> None:
    texts = Continuations()
    texts.begin(0, TEXT)
    follow(texts, [3, 4, 30], 3)
    texts.follow_from(ids(0), ids(3))
    assert texts.propose(ids(0), 2).tolist() == [[6, 8]]
    texts.follow_from(ids(0), ids(len(TEXT) + 1))
    assert texts.left(ids(0)).tolist() == [0]


def test_ever_longer_texts_take_no_more_slots() -> None:
    """Each text that was longer than all before it once doubled the rows of the table."""
    tracemalloc.start()
    texts = Continuations()
    for length in range(1, 18):
        texts.begin(length % 4, np.arange(length, dtype=np.int32))
        texts.end(length % 4)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 100_000  # of 2 ** 18 rows: 20 MB


def test_slots_make_room_for_each_other() -> None:
    texts = Continuations()
    for slot, length in ((2, 3), (0, 50), (40, 7)):
        texts.begin(slot, np.arange(length, dtype=np.int32))
    assert texts.left(ids(0, 1, 2, 40, 90, -1)).tolist() == [50, 0, 3, 7, 0, 0]
    assert texts.propose(ids(2, 40), 2).tolist() == [[0, 1], [0, 1]]
    texts.end(0)
    texts.end(0)
    assert len(texts) == 2
    assert texts.left(ids(0, 2)).tolist() == [0, 3]


def test_a_response_moves_with_its_text_and_cursor() -> None:
    texts = Continuations()
    texts.begin(5, TEXT)
    texts.begin(1, ids(1, 2))
    follow(texts, [3, 4], 2, slot=5)
    texts.move(5, 1)  # what was in slot 1 has ended
    assert len(texts) == 1
    assert texts.left(ids(1, 5)).tolist() == [6, 0]
    assert texts.propose(ids(1), 2).tolist() == [[5, 6]]
    texts.move(5, 1)  # nothing is there: nothing is left in slot 1 either
    assert len(texts) == 0
    texts.begin(5, TEXT)
    assert texts.left(ids(5)).tolist() == [len(TEXT)]


def test_estimates_fall_with_every_token() -> None:
    estimates = path_probabilities(5)
    assert estimates.dtype == np.float32
    np.testing.assert_allclose(estimates, 0.95 ** np.arange(1, 6), rtol=1e-6)


def test_responses_that_have_got_nothing_stay_where_they_are() -> None:
    """Rows of vLLM are recorded when one of them ends; the others may have got nothing since."""
    texts = Continuations()
    texts.begin(0, np.arange(6, dtype=np.int32))
    table = np.arange(6, dtype=np.int32)[None]
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    texts.follow(none, 2 * one, table, none, 2 * one, none)
    texts.follow(none, none, table, none, 2 * one, none)
    assert texts.left(none).tolist() == [4]
    assert texts.propose(none, 4).tolist() == [[2, 3, 4, 5]]
