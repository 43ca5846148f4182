"""Stop strings over token ids: the automaton against looking for the strings in the text."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from stop_strings import end_by_looking

from asyncrl.engine.sampling.stopping import StopRule
from asyncrl.wire.transport.paths import MAX_STOP_BYTES

PIECES = ["a", "b", "ab", "ba", "aab", "", "é", "bé", "aabbaab", "x"]
VOCABULARY = [piece.encode() for piece in PIECES] + [b"\xc3", b"\xa9", b"\xa9b"]
"""The last three are halves of é."""


@given(
    st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=30),
    st.integers(0, 2**32),
)
@example(["bab", "a"], [1, 0, 9], 0)  # "a" ends while "bab" is followed
@example(["abb", "b"], [2, 9], 0)  # within one token
@example(["aab", "ab"], [0, 0, 0, 1], 0)  # "aab" begins again one later
def test_a_response_ends_with_the_first_token_that_completes_a_string(
    strings: list[str], tokens: list[int], seed: int
) -> None:
    rule = StopRule.of(strings, VOCABULARY)
    want = end_by_looking(tokens, VOCABULARY, strings)
    assert rule.follow(rule.start, np.array(tokens, np.int64))[0] == want
    # The same in any division into parts, as an engine reports it.
    state, done, rng = rule.start, 0, random.Random(seed)
    while done < len(tokens):
        part = tokens[done : done + rng.randint(1, 4)]
        count, state = rule.follow(state, np.array(part, np.int64))
        if count is not None:
            assert done + count == want
            return
        done += len(part)
    assert want is None


def test_tokens_of_a_large_vocabulary_share_few_classes() -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 8))).encode() for _ in range(20_000)]
    rule = StopRule.of(["</answer>", "\n\n"], [*words, b"\n", b"</", b"answer", b">"])
    assert rule.table.shape[1] < 20
    closing = [len(words) + 1, len(words) + 2, len(words) + 3]
    assert rule.follow(rule.start, np.array([5, *closing, 7]))[0] == 4
    assert rule.follow(rule.start, np.array([*closing[:2], 10**6, closing[2]]))[0] == 4, (
        "a token beyond the vocabulary has no text"
    )


@pytest.mark.parametrize("strings", [[], [""], ["a", ""], ["a" * (MAX_STOP_BYTES + 1)]])
def test_impossible_strings_are_refused(strings: list[str]) -> None:
    with pytest.raises(ValueError, match="stop strings"):
        StopRule.of(strings, VOCABULARY)
