"""The torch engine shares the KV of equal contexts, but never across versions of the weights.

Rows of several versions run at the same time. At each update, new requests arrive, resumed ones
whose context an old row begins with, and requests with kept tokens. Every log-probability must
equal that of a plain forward pass of the current weights (1e-4). The test named
`test_forgetting_the_version_is_detected` shows that these checks can fail.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from enumerated_policies import slots_with
from new_weights import swap_weights
from tiny_models import VOCAB, make_qwen3
from torch_cores import kept_of

from asyncrl.engine.protocol import GenerateRequest, SamplingParams, ScoreRequest, TokenChunk
from asyncrl.engine.torch.admission import Admission
from asyncrl.engine.torch.core import CoreSettings, DecodeCore

PROMPT = np.array([4, 0, 7, 3], np.int32)
LENGTH = 10
SETTINGS = CoreSettings(64, 4, 256, 1, VOCAB)


def reference(model: Any, tokens: np.ndarray) -> np.ndarray:
    """`[n]` log-probability of each token after the prompt."""
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT.tolist(), *tokens.tolist()]])).logits[0]
    at = np.arange(len(PROMPT) - 1, len(PROMPT) + len(tokens) - 1)
    return logits.double().log_softmax(-1).numpy()[at, tokens]


class Bench:
    """A core whose weights alternate, and the chunks of each request."""

    def __init__(self, path: str) -> None:
        torch.set_num_threads(1)
        self.models = [make_qwen3(seed=seed) for seed in (0, 1)]
        self.core = DecodeCore(slots_with(path, self.models[0]), SETTINGS, None, seed=0)
        self.chunks: dict[str, list[TokenChunk]] = {}

    @property
    def model(self) -> Any:
        return self.models[self.core.policy_version % 2]

    def swap(self) -> None:
        version = self.core.policy_version + 1
        self._take(swap_weights(self.core, self.models[version % 2].state_dict().items(), version))

    def add(self, name: str, **fields: Any) -> None:
        sampling = SamplingParams(LENGTH, top_k_logprobs=VOCAB, seed=len(self.chunks))
        self.core.add(GenerateRequest(name, "", PROMPT, sampling, **fields))
        self.chunks[name] = []

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self._take(self.core.step())

    def drain(self) -> None:
        while self.core.has_work:
            self.step()

    def _take(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            self.chunks[chunk.request_id].append(chunk)

    def tokens(self, name: str) -> np.ndarray:
        return np.concatenate([chunk.tokens for chunk in self.chunks[name]])

    def error(self, name: str, prefix: np.ndarray | None = None) -> float:
        """Largest error in log-probability; all tokens must be of one version."""
        chunks = self.chunks[name]
        (version,) = {chunk.policy_version for chunk in chunks}
        start = 0 if prefix is None else len(prefix)
        text = self.tokens(name) if prefix is None else np.r_[prefix, self.tokens(name)]
        want = reference(self.models[version % 2], text)[start:]
        return float(np.abs(np.concatenate([c.logprobs for c in chunks]) - want).max())


def test_requests_after_an_update_share_no_kv_with_older_rows(tiny_qwen3: str) -> None:
    bench = Bench(tiny_qwen3)
    for round_ in range(4):
        bench.add(f"runs{round_}")
        bench.step(3)  # older rows end on the way: others move into their places
        bench.swap()
        old = bench.tokens(f"runs{round_}").astype(np.int32)
        assert bench.core.stats().running > 0
        bench.add(f"new{round_}")
        bench.add(f"sibling{round_}")
        bench.add(f"resumed{round_}", prefix_tokens=old)
        bench.add(f"kept{round_}", kept=kept_of(bench.chunks[f"runs{round_}"]))
        (score,) = bench.core.score(
            [ScoreRequest("s", PROMPT, old, SamplingParams(1, top_k_logprobs=VOCAB))]
        )
        np.testing.assert_allclose(score.logprobs, reference(bench.model, old), atol=1e-4)
        bench.step()
        bench.add(f"late{round_}")  # copies from a row of this version
        bench.step(LENGTH)
        for kind in ("new", "sibling", "kept", "late"):
            assert bench.error(f"{kind}{round_}") < 1e-4, kind
        assert bench.error(f"resumed{round_}", old) < 1e-4
        bench.add(f"runs{round_}b")
        bench.step()
    bench.drain()


def test_forgetting_the_version_is_detected(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sibling = Admission._sibling_row

    def forgetful(self: Admission, context: np.ndarray, installation: int) -> int | None:
        self._rows.kv_installation[: self._rows.n] = installation
        return sibling(self, context, installation)

    monkeypatch.setattr(Admission, "_sibling_row", forgetful)
    bench = Bench(tiny_qwen3)
    bench.add("runs")
    bench.step(3)
    bench.swap()
    bench.add("new")
    bench.add("resumed", prefix_tokens=bench.tokens("runs").astype(np.int32))
    bench.drain()
    assert bench.error("new") > 0.01
    assert bench.error("resumed", bench.tokens("runs")[:3]) > 0.01
