"""Engines on a tiny real model whose responses are enumerated, drafting from another policy.

A random Qwen3 of six tokens, one of which stops; responses of at most four tokens; temperature and
top-p are not 1, so that what is sampled is not what the model says at first. The law comes from a
plain Hugging Face forward pass in double precision over all contexts. Weights are swapped to those
of a second model between what is written (for the cache, or to be kept) and what is counted.

A mode that drafted or kept next to nothing would certify nothing; it is `UnavailableError` too.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import util
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.exactness.model import Codes, Policy, cells, nucleus
from cache.config import CacheConfig
from cache.tree import RolloutCache
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.protocol import Engine, GenerateRequest, SamplingParams, TokenChunk
from rollout.trajectory import FloatArray, IntArray, KeptTokens, Provenance
from wire.records import EngineStats

KINDS = ("torch", "vllm")
MODES = ("torch-chain", "torch-tree", "torch-verify", "vllm-chain", "vllm-verify")

VOCABULARY, LENGTH, STOP, TOP_K = 6, 4, 5, 3
TEMPERATURE, TOP_P = 0.8, 0.95
PROMPT = np.array([1, 2, 3], np.int32)
WAVE = 20_000
"""Requests at a time; each wave drafts from a tree of its own."""
_OLD = 200
"""Rollouts of the old policy in each tree."""
_LEAST = 0.05
"""Least tokens drafted (or kept) per sample."""
_DEADLINE = 1800.0
"""Seconds for a wave."""
_VLLM_SLOTS = 32
"""Its drafts are planned by cost inside vLLM's process: with many rows there would be none."""

Wave = tuple[Codes, dict[str, float]]


class UnavailableError(Exception):
    """A mode cannot run here; the message says why."""


class Bench(ABC):
    """One engine and two sets of weights."""

    def __init__(self, path: str, old: Any, new: Any) -> None:
        self.path, self.old, self.new = path, old, new
        self.law = enumerated(new).law()

    @abstractmethod
    def prepare(self, mode: str) -> None:
        """Make the engine ready for a mode."""

    @abstractmethod
    def install(self, model: Any) -> None:
        """Swap the weights."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[TokenChunk]]:
        """All chunks of each request."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Of the engine."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""

    def waves(self, mode: str, samples: int) -> Iterator[Wave]:
        """`samples` cells in waves, with sums of what was drafted and accepted."""
        self.prepare(mode)
        wave = self._verified if mode.endswith("verify") else self._drafted
        drafted = 0.0
        for start in range(0, samples, WAVE):
            found, notes = wave(f"{mode}.{start}", min(WAVE, samples - start))
            drafted += notes["drafted"]
            yield found, notes
        if drafted < _LEAST * samples:
            raise UnavailableError(
                f"{mode}: only {drafted:.0f} tokens drafted or kept for {samples} samples: "
                f"nothing is certified"
            )

    def _drafted(self, name: str, count: int) -> Wave:
        self.install(self.old)
        self.generate([ask(f"{name}.old{i}", name) for i in range(_OLD)])
        self.install(self.new)
        before = self.stats().tokens
        chunks = self.generate([ask(f"{name}.{i}", name) for i in range(count)])
        tokens = self.stats().tokens - before
        notes = {"drafted": float(tokens.drafted), "accepted": float(tokens.accepted)}
        return cells_of(chunks), notes

    def _verified(self, name: str, count: int) -> Wave:
        rng = np.random.default_rng(sum(map(ord, name)))
        self.install(self.old)
        texts = self.generate([ask(f"{name}.old{i}", "") for i in range(count)])
        cuts = rng.integers(0, LENGTH + 1, count)
        kept = [kept_of(chunks, int(cut)) for chunks, cut in zip(texts, cuts, strict=True)]
        self.install(self.new)
        requests = [ask(f"{name}.{i}", "", kept=tokens) for i, tokens in enumerate(kept)]
        chunks = self.generate(requests)
        verified = sum(
            int((chunk.provenance == Provenance.VERIFIED).sum()) for row in chunks for chunk in row
        )
        return cells_of(chunks), {"drafted": float(sum(map(len, kept))), "accepted": verified}


class TorchBench(Bench):
    """The torch engine's core, without asyncio: it takes and gives what the protocol says."""

    def __init__(self, path: str, old: Any, new: Any, seed: int) -> None:
        super().__init__(path, old, new)
        self._seed = seed

    def prepare(self, mode: str) -> None:
        """A core of its own for each mode."""
        from engine.drafting.planner import DraftPlanner
        from engine.torch.core import CoreSettings, DecodeCore
        from engine.torch.model import load_model

        class Eager(DraftPlanner):
            """Drafts whatever the cache proposes: exactness is asked for here, not speed."""

            def ask(self, left: IntArray, **_: int) -> tuple[IntArray, float]:
                return np.clip(left - 1, 0, 4).astype(np.int32), 0.0

            def choose(self, _: FloatArray, offsets: IntArray, **__: int) -> IntArray:
                return np.diff(offsets).astype(np.int32)

        torch.set_num_threads(1)
        device = torch.device("cpu")
        model = load_model(self.path, slots=512, max_len=16, device=device, dtype=torch.float32)
        settings = CoreSettings(
            max_step_tokens=8192,
            max_draft_tokens=4,
            max_prefill_tokens=8192,
            chunk_tokens=16,
            top_k=TOP_K,
            draft_trees=mode.endswith("tree"),
        )
        planner = Eager(max_step_tokens=8192, max_draft_tokens=4)
        # Texts follow from seeds whatever is drafted: each mode needs its own to add evidence.
        seed = len(MODES) * self._seed + MODES.index(mode)
        self._core = DecodeCore(
            model, settings, RolloutCache(_drafts()), seed=seed, planner=planner
        )
        self._version = 0

    def install(self, model: Any) -> None:
        """As an engine gets weights: by name, with a version."""
        self._version += 1
        self._core.update_weights(model.state_dict().items(), self._version)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[TokenChunk]]:
        """Steps until nothing is left."""
        found: dict[str, list[TokenChunk]] = {request.request_id: [] for request in requests}
        for request in requests:
            self._core.add(request)
        while self._core.has_work:
            for chunk in self._core.step():
                found[chunk.request_id].append(chunk)
        return list(found.values())

    def stats(self) -> EngineStats:
        """Of the core."""
        return self._core.stats()

    def close(self) -> None:
        """Nothing runs between waves."""


class EngineBench(Bench):
    """Any engine behind the protocol; its event loop is run between waves only."""

    def __init__(self, path: str, old: Any, new: Any, engine: Engine) -> None:
        super().__init__(path, old, new)
        self._engine, self._runner, self._version = engine, asyncio.Runner(), 0
        self._run(engine.start())

    def prepare(self, mode: str) -> None:
        """One engine serves all modes."""

    def install(self, model: Any) -> None:
        """As the conductor does."""
        self._version += 1
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        self._run(self._engine.update_weights(weights.items(), self._version))

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[TokenChunk]]:
        """All at once; the engine queues what does not fit."""

        async def one(request: GenerateRequest) -> list[TokenChunk]:
            return [chunk async for chunk in self._engine.generate(request)]

        async def everything() -> list[list[TokenChunk]]:
            return list(await asyncio.gather(*map(one, requests)))

        found: list[list[TokenChunk]] = self._run(everything())
        return found

    def stats(self) -> EngineStats:
        """Of the engine."""
        return self._engine.stats()

    def close(self) -> None:
        """End the engine and its loop."""
        self._run(self._engine.close())
        self._runner.close()

    def _run(self, awaitable: Any) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(awaitable, _DEADLINE)

        return self._runner.run(bounded())


@contextmanager
def open_bench(kind: str, seed: int) -> Iterator[Bench]:
    """An engine with its models on disk. Raises UnavailableError where it cannot be started."""
    if kind == "vllm" and util.find_spec("vllm") is None:
        raise UnavailableError("vLLM is not installed")
    with tempfile.TemporaryDirectory() as path:
        old, new = tiny_model(1), tiny_model(1)
        with torch.no_grad():
            for mine, theirs in zip(new.parameters(), tiny_model(2).parameters(), strict=True):
                mine.lerp_(theirs, 0.4)
        old.save_pretrained(path)
        try:
            make = TorchBench if kind == "torch" else _vllm
            bench = make(path, old, new, seed)
        except (EngineError, ImportError) as error:
            raise UnavailableError(f"{kind} cannot be started: {error}") from error
        try:
            yield bench
        finally:
            bench.close()


def _vllm(path: str, old: Any, new: Any, seed: int) -> Bench:
    from engine.vllm.client.engine import VllmEngine
    from engine.vllm.config import VllmConfig

    config = EngineConfig(
        kind="vllm",
        slots=_VLLM_SLOTS,
        max_model_len=64,
        threads=1,
        top_k_logprobs=TOP_K,
        vllm=VllmConfig(kv_cache_gib=0.25),
    )
    return EngineBench(path, old, new, VllmEngine(config, path, cache_config=_drafts(), seed=seed))


def _drafts() -> CacheConfig:
    return CacheConfig(max_draft_tokens=4, min_match=1, min_probability=0.0, max_bytes=1 << 24)


def tiny_model(seed: int, vocabulary: int = VOCABULARY) -> Any:
    """A random Qwen3 whose next-token distributions are neither flat nor certain."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                scale = 0.3 if "embed" in name else 0.4
                parameter.copy_(torch.randn_like(parameter) * scale)
    return model.float().eval()


@torch.no_grad()
def enumerated(model: Any) -> Policy:
    """What the model says after every context; after a stop STOP follows, up to length L."""
    model = model.double()
    tables = []
    for at in range(LENGTH):
        texts = np.array(list(itertools.product(range(VOCABULARY), repeat=at)), np.int64)
        texts = texts.reshape(VOCABULARY**at, at)
        prompts = np.broadcast_to(PROMPT, (len(texts), len(PROMPT)))
        logits = model(torch.from_numpy(np.concatenate([prompts, texts], axis=1))).logits[:, -1]
        table = nucleus(torch.softmax(logits / TEMPERATURE, -1).numpy(), TOP_P)
        table[(texts == STOP).any(axis=1)] = np.eye(VOCABULARY)[STOP]
        tables.append(table)
    model.float()
    return Policy(tuple(tables))


def ask(name: str, cache_key: str, kept: KeptTokens | None = None) -> GenerateRequest:
    """A request with a seed of the engine's choice: what was kept had another one."""
    sampling = SamplingParams(
        max_tokens=LENGTH,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        stop_tokens=(STOP,),
        top_k_logprobs=TOP_K,
    )
    return GenerateRequest(name, cache_key, PROMPT, sampling, kept=kept)


def kept_of(chunks: Sequence[TokenChunk], cut: int) -> KeptTokens:
    """The first `cut` tokens of what an engine wrote.

    The cut must not depend on the text: a random share of its *length* would, and the length tells
    where it stopped. (This benchmark did that at first, and failed.)
    """
    fields = ("tokens", "logprobs", "topk_ids", "topk_logprobs")
    parts = [np.concatenate([getattr(chunk, field) for chunk in chunks]) for field in fields]
    return KeptTokens(*(part[:cut].copy() for part in parts))


def cells_of(responses: Sequence[Sequence[TokenChunk]]) -> Codes:
    """`[n]` cell of each response, filled up with STOP.

    Raises:
        AssertionError: a response is too long, ends early, or goes on after its stop.
    """
    texts: NDArray[np.int64] = np.full((len(responses), LENGTH), STOP, np.int64)
    for row, chunks in enumerate(responses):
        tokens = np.concatenate([chunk.tokens for chunk in chunks])
        ended = len(tokens) == LENGTH or (len(tokens) > 0 and tokens[-1] == STOP)
        assert ended, f"{chunks[0].request_id} wrote {tokens}"
        assert not (tokens[:-1] == STOP).any(), f"{chunks[0].request_id} wrote {tokens}"
        texts[row, : len(tokens)] = tokens
    return cells(texts, VOCABULARY)
