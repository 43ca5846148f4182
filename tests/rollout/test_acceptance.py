"""Sampling with drafted chains has the distribution of plain sampling, whatever is drafted."""

import numpy as np
import pytest
import torch
from false_alarms import Claims
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from asyncrl.rollout.acceptance import accept_chain

CLAIMS = Claims(__file__)
VOCABULARY, LENGTH = 3, 4


def enumerated(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A random model: p(next | context) by the context's place, and the sequence probabilities.

    The place of a context is that of its digits in base VOCABULARY, with a one before them.
    """
    rng = np.random.default_rng(seed)
    model = rng.dirichlet(np.full(VOCABULARY, 0.7), VOCABULARY**LENGTH)
    probabilities = np.ones([VOCABULARY] * LENGTH)
    for sequence in np.ndindex(*probabilities.shape):
        place = 1
        for token in sequence:
            probabilities[sequence] *= model[place, token]
            place = place * VOCABULARY + token
    return model, probabilities


def test_samples_with_drafts_follow_the_model() -> None:
    """Chi-square over all 81 sequences, 40,000 draws (`false_alarms`). The seed is fixed.

    The draft is adversarial: it depends on all that was emitted so far (the most or the least
    likely token, any length).
    """
    model, probabilities = enumerated(seed=3)
    rng = np.random.default_rng(11)
    done, sizes = np.ones(40_000, np.int64), np.zeros(40_000, np.int64)
    kept = 0
    while (rows := np.flatnonzero(sizes < LENGTH)).size:
        at, odd = done[rows], done[rows] % 2 == 0  # the sum of what was emitted
        lengths = rng.integers(0, LENGTH - sizes[rows]).astype(np.int32)
        drafts, drawn = np.ones((2, len(rows), LENGTH), np.int32)  # after the length: to be ignored
        for place in range(LENGTH):
            p = model[at]
            draws = (rng.random(len(rows))[:, None] > p.cumsum(1)[:, :-1]).sum(1)
            drawn[:, place] = np.where(place <= lengths, draws, 1)
            inside = np.flatnonzero(place < lengths)
            draft = np.where(odd, p.argmax(1), p.argmin(1))[inside]
            drafts[inside, place] = draft
            at[inside] = at[inside] * VOCABULARY + draft
        accepted = accept_chain(drawn, drafts[:, :-1], lengths)
        kept += int(accepted.sum())
        for place in range(LENGTH):
            some = accepted >= place
            done[rows[some]] = done[rows[some]] * VOCABULARY + drawn[some, place]
        sizes[rows] += accepted + 1
    counts = np.bincount(done - VOCABULARY**LENGTH, minlength=probabilities.size)
    assert kept > 1000
    likely = probabilities.ravel() * counts.sum() >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    expected = (
        np.append(probabilities.ravel()[likely], probabilities.ravel()[~likely].sum())
        * counts.sum()
    )
    assert CLAIMS.fit(stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue)


@given(st.data(), st.integers(0, 5), st.integers(0, 6))
def test_batches_equal_the_rule_row_by_row_in_numpy_and_torch(
    data: st.DataObject, rows: int, width: int
) -> None:
    tokens = st.integers(0, 2)
    samples = data.draw(arrays(np.int32, (rows, width + 1), elements=tokens))
    drafts = data.draw(arrays(np.int32, (rows, width), elements=tokens))
    lengths = data.draw(arrays(np.int32, rows, elements=st.integers(0, width)))
    expected = []
    for row in range(rows):
        count = 0
        while count < lengths[row] and samples[row, count] == drafts[row, count]:
            count += 1
        expected.append(count)
    assert accept_chain(samples, drafts, lengths).tolist() == expected
    in_torch = accept_chain(*map(torch.from_numpy, (samples, drafts, lengths)))
    assert in_torch.tolist() == expected


def test_shapes_that_do_not_fit_are_refused() -> None:
    two = np.zeros((2, 3), np.int32)
    with pytest.raises(ValueError, match=r"need samples \(2, 4\)"):
        accept_chain(two, two, np.zeros(2, np.int32))
    with pytest.raises(ValueError, match=r"lengths \(2,\)"):
        accept_chain(np.zeros((2, 4), np.int32), two, np.zeros(3, np.int32))
