"""vLLM's batch as arrays: rows that come, go and move, against the requests themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncrl.engine.remote.extras import RequestExtra
from asyncrl.engine.vllm.remote import from_extra_args, to_extra_args
from asyncrl.engine.vllm.worker.sampling import RunnerBatch


def request(rng: np.random.Generator) -> Any:
    extra = RequestExtra(
        seed=int(rng.integers(1 << 63)),
        generated=int(rng.integers(3)),
        top_k=int(rng.integers(3)),
        top_k_logprobs=int(rng.integers(9)),
    )
    params = SimpleNamespace(
        extra_args=to_extra_args(extra),
        max_tokens=9,
        stop_token_ids=[],
        temperature=float(rng.uniform(0.5, 2)),
        top_p=float(rng.choice([1.0, 0.9])),
    )
    return SimpleNamespace(prompt_token_ids=[1] * int(rng.integers(3, 9)), sampling_params=params)


def test_columns_follow_the_rows() -> None:
    """More requests than there are columns at first; a column is used again."""
    rng = np.random.default_rng(0)
    requests: dict[str, Any] = {}
    table = SimpleNamespace(req_ids=[], num_tokens_no_spec=np.zeros(64, np.int32))
    batch = RunnerBatch(SimpleNamespace(requests=requests, input_batch=table))
    for step in range(100):
        for name in [name for name in requests if rng.random() < 0.1]:
            del requests[name]
        requests |= {f"r{step}.{i}": request(rng) for i in range(rng.integers(6))}
        present = rng.permutation([name for name in requests if rng.random() < 0.8]).tolist()
        table.req_ids = present
        changes = batch.changes
        batch.refresh()
        batch.refresh()
        assert batch.changes <= changes + 1
        extras = [from_extra_args(requests[name].sampling_params.extra_args) for name in present]
        params = [requests[name].sampling_params for name in present]
        assert batch.ids == present
        assert batch.seed.tolist() == [extra.seed for extra in extras]
        assert batch.start.tolist() == [
            len(requests[name].prompt_token_ids) - extra.generated
            for name, extra in zip(present, extras, strict=True)
        ]
        wanted = [extra.top_k_logprobs for extra in extras]
        assert batch.top_k_logprobs == max(wanted, default=0)
        columns = batch.sampling
        truncated = [p.top_p < 1 or e.top_k > 0 for p, e in zip(params, extras, strict=True)]
        assert columns.truncated.tolist() == truncated
        np.testing.assert_allclose(columns.temperature, [p.temperature for p in params], rtol=1e-6)
        if any(truncated):
            np.testing.assert_allclose(columns.top_p, [p.top_p for p in params], rtol=1e-6)
            assert columns.top_k.tolist() == [extra.top_k for extra in extras]
