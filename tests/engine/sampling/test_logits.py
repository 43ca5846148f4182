"""Slabs: they change no result and hold the memory at a real vocabulary under the limit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from measured_memory import VOCABULARY, measured

from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.sampling.drawing import Streams, draw, noise_seeds
from asyncrl.engine.sampling.logits import (
    BYTES_PER_LOGIT,
    BYTES_PER_TRUNCATED_LOGIT,
    draw_from_logits,
    process_all,
    rows_at_once,
)
from asyncrl.engine.sampling.truncation import SamplingColumns, processed_logprobs

VOCAB, ROWS, K = 40, 23, 3
MIB = 1 << 20

PEAKS = (("draw", 384, 256, 1.0), ("score", 256, 64, 1.0), ("draw", 64, 64, 0.9))
"""What is measured, with so many rows, a limit in MiB, and top-p."""


def columns(**how: float) -> SamplingColumns:
    ways = [SamplingParams(1, temperature=0.5 + row / ROWS, **how) for row in range(ROWS)]  # type: ignore[arg-type]
    return SamplingColumns.of(ways)


def streams_of(rows: int) -> Streams:
    seeds = np.arange(rows, dtype=np.uint64)
    return Streams(seeds, np.arange(rows), noise_seeds(seeds, 2))


@pytest.mark.parametrize("how", [{}, {"top_p": 0.8}])
@pytest.mark.parametrize("at_once", [1, 4, 7, ROWS, 100])
def test_slabs_change_no_draw(at_once: int, how: dict[str, float]) -> None:
    """Tokens, lists and log-probabilities are those of all rows together."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    sampling, streams = columns(**how), streams_of(ROWS)
    logprobs = processed_logprobs(logits.clone(), sampling)
    whole = draw(logprobs, K, streams)
    each = BYTES_PER_TRUNCATED_LOGIT if how else BYTES_PER_LOGIT
    places = np.random.default_rng(0).permutation(2 * ROWS)[:ROWS]
    drawn = draw_from_logits(
        logits.clone(), sampling, K, streams,
        max_bytes=at_once * each * VOCAB, places=places, table_rows=2 * ROWS,
    )  # fmt: skip
    assert torch.equal(drawn.tokens, whole.tokens)
    assert torch.equal(drawn.ids[places, 0].long(), whole.tokens)
    assert torch.equal(drawn.ids[places, 1:], whole.listed.ids)
    torch.testing.assert_close(drawn.logprobs[places, 1:], whole.listed.logprobs)
    own = logprobs.gather(1, whole.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs[places, 0], own)
    unused = np.setdiff1d(np.arange(2 * ROWS), places)
    assert not drawn.ids[unused].any()
    again = process_all(logits.clone(), sampling, at_once * each * VOCAB)
    torch.testing.assert_close(again, logprobs)


def test_rows_that_are_not_finite_have_no_token() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 3] = torch.nan
    drawn = draw_from_logits(logits, SamplingColumns.unset(2), K, streams_of(2), max_bytes=1)
    assert drawn.tokens[0] == -1
    assert drawn.tokens[1] >= 0
    assert not drawn.logprobs[0, :2].isfinite().any()


def test_how_many_rows_fit() -> None:
    plain, cut = SamplingColumns.unset(2), columns(top_p=0.9)
    assert rows_at_once(VOCABULARY, plain, 512 * MIB) == 294
    assert rows_at_once(VOCABULARY, cut, 512 * MIB) == 55
    assert rows_at_once(VOCABULARY, cut, 1) == 1  # the least that can be


@pytest.fixture(scope="module")
def grown() -> list[float]:
    """MiB by which the peak of a process grows in each case of `PEAKS`."""
    return measured(*(" ".join(map(str, case)) for case in PEAKS))


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(PEAKS)), ids=[f"{one[0]}, {one[1]}" for one in PEAKS])
def test_peak_memory_at_a_real_vocabulary(case: int, grown: list[float]) -> None:
    """A process's peak grows by at most the limit, and 24 MiB for tables and the allocator.

    In one piece the first holds 450 MiB, the second 150, the third 300.
    """
    what, rows, limit, _ = PEAKS[case]
    print(f"{what}, {rows} rows: {grown[case]:.0f} MiB of {limit}")
    assert limit / 4 < grown[case] <= limit + 24, "less: nothing was measured"
