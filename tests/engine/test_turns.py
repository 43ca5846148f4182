"""Two turns of one token with a random answer between them, judged by the rule that engines share.

The policies are tables, and hardly differ but after one of the two answers. All V * 2 * V responses
are compared with their probabilities by chi-square (`false_alarms`). Seeds are fixed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from false_alarms import Claims, is_caught
from numpy.typing import NDArray
from scipy.stats import chi2

from asyncrl.engine.protocol import turn_end, turn_start
from asyncrl.engine.sampling.drawing import Streams, draw, noise_seeds
from asyncrl.engine.sampling.logits import ProcessedRows
from asyncrl.engine.sampling.verification import KeptBatch, Reading, judge
from asyncrl.rollout.trajectory import IntArray, KeptTokens

CLAIMS = Claims(__file__)
V, K, N = 6, 2, 20_000
START = V
"""Row of a table that the first turn is drawn from; the second one is from that of the answer."""
FIRST_ANSWER = np.linspace(0.2, 0.8, V)
"""`[V]` chance of answer 0, rather than 1, to each first turn."""


def policy(seed: int) -> torch.Tensor:
    """`[V + 1, V]` log-probabilities."""
    logits = np.random.default_rng(0).normal(size=(V + 1, V))
    rng = np.random.default_rng(seed)
    logits += 0.2 * rng.normal(size=logits.shape)
    logits[1] = 3 * rng.normal(size=V)
    return torch.from_numpy(logits).log_softmax(1).float()


class Turn(NamedTuple):
    """A token of N responses, with what is known of its draw."""

    tokens: IntArray
    ids: IntArray
    values: NDArray[np.float32]
    noise: NDArray[np.uint64]


def turn_of(table: torch.Tensor, rows: NDArray[np.integer], place: int, stream: int) -> Turn:
    seeds = (np.arange(len(rows)) + (stream << 32)).astype(np.uint64)
    noise = noise_seeds(seeds, 0)
    places = np.full(len(rows), place)
    drawn = draw(table, K, Streams(seeds, places, noise), rows.astype(np.int64))
    ids, values = (one.numpy() for one in drawn.listed)
    return Turn(drawn.tokens.numpy().astype(np.int32), ids, values, noise)


def answers(turns: IntArray, rng: np.random.Generator) -> IntArray:
    return (rng.random(len(turns)) >= FIRST_ANSWER[turns]).astype(np.int32)


def verified(old: torch.Tensor, new: torch.Tensor, mutant: str = "") -> IntArray:
    """`[N, 3]` responses of an old policy, judged by a new one and completed."""
    rng = np.random.default_rng(1)
    first = turn_of(old, np.full(N, START), 0, 1)
    said = answers(first.tokens, rng)
    second = turn_of(old, said, 2, 2)
    tokens = np.stack([first.tokens, said, second.tokens], axis=1)
    point = np.array([0.0, -np.inf], np.float32)
    kept = [
        KeptTokens(
            tokens[i],
            np.zeros(3, np.float32),
            np.array([first.ids[i], [said[i], -1], second.ids[i]], np.int32),
            np.array([first.values[i], point, second.values[i]], np.float32),
            np.array([first.noise[i], 0, second.noise[i]], np.uint64),
            np.array([False, True, False]),
        )
        for i in range(N)
    ]
    seeds = (np.arange(N) + (3 << 32)).astype(np.uint64)
    batch = KeptBatch.of(kept, seeds, np.zeros(N, np.int64), K)
    rows = np.stack([np.full(N, START), first.tokens, said], axis=1).reshape(-1).astype(np.int64)
    verdict = judge(batch, ProcessedRows(new).read(rows, batch.columns), 1)
    unnamed = np.flatnonzero(verdict.unnamed)
    ProcessedRows(new).name_tokens(batch, verdict, unnamed, rows[verdict.place(batch, unnamed)])
    out, accepted = tokens.copy(), verdict.accepted
    if not mutant:
        assert not (accepted == 1).any(), "a turn ends with its answer"
    drawn = np.flatnonzero(accepted < 3)
    out[drawn, accepted[drawn]] = verdict.token[drawn]
    again = accepted < 2  # the answer, and what follows it
    if mutant == "asked again":
        again |= accepted == 2
    if mutant == "restarted":
        again = accepted < 3
        out[again, 0] = turn_of(new, np.full(N, START), 0, 4).tokens[again]
    if mutant != "answer kept":
        out[again, 1] = answers(out[:, 0], rng)[again]
    out[again, 2] = turn_of(new, out[:, 1], 2, 5).tokens[again]
    return out


def p_value(responses: IntArray, table: torch.Tensor) -> float:
    p = table.double().exp().numpy()
    said = np.stack([FIRST_ANSWER, 1 - FIRST_ANSWER], axis=1)
    want = N * p[START][:, None, None] * said[:, :, None] * p[None, :2]
    have = np.zeros_like(want)
    np.add.at(have, tuple(responses.T), 1)
    cells, counts = want[want >= 8], have[want >= 8]
    cells, counts = (np.append(a, b[want < 8].sum()) for a, b in ((cells, want), (counts, have)))
    return float(chi2.sf(((counts - cells) ** 2 / cells).sum(), len(cells) - 1))


@pytest.mark.parametrize("seed", [1, 2])
def test_verified_turns_follow_the_policy_that_judged_them(seed: int) -> None:
    assert CLAIMS.fit(p_value(verified(policy(seed), policy(9)), policy(9)))


@pytest.mark.parametrize("mutant", ["asked again", "restarted", "answer kept"])
def test_wrong_generators_are_detected(mutant: str) -> None:
    """They ask again for an accepted turn, or start over, only after a rejection; or never ask."""
    p = p_value(verified(policy(1), policy(9), mutant), policy(9))
    print(f"{mutant}: p = {p:.3g}")
    assert is_caught(p)


def test_a_rule_that_judges_observations_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reading, "given", lambda reading, _: reading)
    assert is_caught(p_value(verified(policy(1), policy(9), "judged"), policy(9)))


def test_turns_begin_after_the_last_observed_token_and_end_before_the_next() -> None:
    observed = np.array([0, 0, 1, 1, 0, 1, 0], np.bool_)
    assert [turn_start(observed, count) for count in range(8)] == [0, 0, 0, 3, 4, 4, 6, 6]
    assert [turn_end(observed, begin) for begin in (0, 2, 4, 5, 6)] == [2, 2, 5, 5, 7]
