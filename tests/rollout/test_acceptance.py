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


def enumerated(seed: int) -> tuple[dict[tuple[int, ...], np.ndarray], np.ndarray]:
    """A random model: p(next | context) for every context, and the sequence probabilities."""
    rng = np.random.default_rng(seed)
    shapes = [tuple(c) for n in range(LENGTH) for c in np.ndindex(*[VOCABULARY] * n)]
    model = {context: rng.dirichlet(np.full(VOCABULARY, 0.7)) for context in shapes}
    probabilities = np.ones([VOCABULARY] * LENGTH)
    for sequence in np.ndindex(*probabilities.shape):
        for at in range(LENGTH):
            probabilities[sequence] *= model[sequence[:at]][sequence[at]]
    return model, probabilities


def test_samples_with_drafts_follow_the_model() -> None:
    """Chi-square over all 81 sequences, 40,000 draws (`false_alarms`). The seed is fixed.

    The draft is adversarial: it depends on all that was emitted so far (the most or the least
    likely token, any length).
    """
    model, probabilities = enumerated(seed=3)
    rng = np.random.default_rng(11)
    counts = np.zeros_like(probabilities)
    kept = 0
    for _ in range(40_000):
        done: tuple[int, ...] = ()
        while len(done) < LENGTH:
            room = LENGTH - len(done) - 1
            length = int(rng.integers(0, room + 1))
            draft: tuple[int, ...] = ()
            for _ in range(length):
                p = model[done + draft]
                draft += (int(p.argmax() if sum(done) % 2 else p.argmin()),)
            samples = [
                rng.choice(VOCABULARY, p=model[done + draft[:at]]) for at in range(length + 1)
            ]
            width = 3
            padded = np.full((1, width), 1, np.int32)
            padded[0, :length] = draft
            drawn = np.full((1, width + 1), 1, np.int32)  # after the length: must be ignored
            drawn[0, : length + 1] = samples
            accepted = int(accept_chain(drawn, padded, np.array([length], np.int32))[0])
            kept += accepted
            done += tuple(map(int, samples[: accepted + 1]))
        counts[done] += 1
    assert kept > 1000
    likely = probabilities.ravel() * counts.sum() >= 5
    observed = np.append(counts.ravel()[likely], counts.ravel()[~likely].sum())
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
