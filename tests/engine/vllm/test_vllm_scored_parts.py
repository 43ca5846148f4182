"""Positions to score go through the output layer in bounded batches, whatever their requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.engine.remote.extras import RequestExtra
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.remote.worker.scoring import ScoredRequest
from asyncrl.engine.sampling.logits import BYTES_PER_LOGIT
from asyncrl.engine.vllm.remote import to_extra_args
from asyncrl.engine.vllm.worker.sampling import CoreScorer, RunnerBatch

VOCAB, WIDTH = 11, 5


class Runner:
    """What `CoreScorer` needs of vLLM's model runner: requests whose prompts take several steps."""

    def __init__(self, lengths: list[int]) -> None:
        rng = np.random.default_rng(0)
        self.head = torch.from_numpy(rng.normal(size=(WIDTH, VOCAB)).astype(np.float32))
        self.asked: list[int] = []
        self.model = SimpleNamespace(compute_logits=self.compute_logits)
        self.model_config = SimpleNamespace(get_vocab_size=lambda: VOCAB)
        names = [f"r{i}" for i in range(len(lengths))]
        self.num_prompt_logprobs = dict.fromkeys(names, 3)
        self.requests = {
            name: SimpleNamespace(
                num_computed_tokens=0,
                prompt_token_ids=rng.integers(0, VOCAB, n + 2).tolist(),
                sampling_params=SimpleNamespace(
                    extra_args=to_extra_args(RequestExtra(seed=0, generated=n, scored=n)),
                    max_tokens=1,
                    stop_token_ids=[],
                    temperature=1.0,
                    top_p=1.0,
                ),
            )
            for name, n in zip(names, lengths, strict=True)
        }
        self.input_batch = SimpleNamespace(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}
        )
        starts = np.cumsum([0, *(n + 1 for n in lengths)])
        self.query_start_loc = SimpleNamespace(np=starts)
        self.hidden = torch.from_numpy(rng.normal(size=(starts[-1], WIDTH)).astype(np.float32))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.asked.append(len(hidden))
        return hidden @ self.head

    def step(self, scorer: CoreScorer) -> dict[str, ScoredRequest]:
        """All but the last token of each prompt."""
        fed = {name: len(one.prompt_token_ids) - 1 for name, one in self.requests.items()}
        assert scorer.compute(self.hidden, fed) == {}
        return scorer._scorer.requests


def scored(lengths: list[int], max_bytes: int = 1 << 20) -> tuple[Runner, list[Any]]:
    runner = Runner(lengths)
    requests = runner.step(CoreScorer(runner, RunnerBatch(runner), Ranks(), max_bytes))
    return runner, [(*one.reading, one.ids, one.values) for one in requests.values()]


@pytest.mark.parametrize("limit", [1, 4, 7, 30])
def test_no_request_is_too_long(limit: int) -> None:
    lengths = [3, 20, 1, 9]
    _, whole = scored(lengths)
    runner, parts = scored(lengths, limit * VOCAB * BYTES_PER_LOGIT + 3)
    assert max(runner.asked) == limit
    assert sum(runner.asked) == sum(lengths)
    for one, other in zip(parts, whole, strict=True):
        assert not np.isnan(one[0]).any()
        for mine, theirs in zip(one, other, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_requests_that_were_aborted_are_forgotten() -> None:
    """They may hold hidden states."""
    runner = Runner([4, 5])
    scorer = CoreScorer(runner, RunnerBatch(runner), Ranks(), 1 << 20)
    assert len(runner.step(scorer)) == 2
    runner.num_prompt_logprobs.clear()
    scorer.compute(runner.hidden, {})
    assert not scorer._scorer.requests
