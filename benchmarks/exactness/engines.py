"""Modes that run an engine on a tiny real model whose responses are enumerated.

The engine drafts from, or verifies, tokens of another policy: its weights are swapped to those of a
second model after the cache was filled (or tokens were kept) and before samples are counted. A mode
in which hardly any tokens were drafted or kept certifies nothing, so it is `UnavailableError` too.
"""

import asyncio
import itertools
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import util
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import Engine, GenerateRequest, SamplingParams, TokenChunk
from asyncrl.rollout.trajectory import KeptTokens, Provenance
from asyncrl.wire.records.step import EngineStats
from asyncrl.wire.weights.writer import published
from benchmarks.exactness.model import Codes, TabularPolicy, cells, nucleus
from benchmarks.tiny_models import random_qwen3

VOCABULARY, LENGTH, STOP, TOP_K = 6, 4, 5, 3
TEMPERATURE, TOP_P = 0.8, 0.95
PROMPT = np.array([1, 2, 3], np.int32)


@torch.no_grad()
def enumerate_policy(model: Any) -> TabularPolicy:
    """The policy of a model after every context; a response that stopped continues with STOP."""
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
    return TabularPolicy(tuple(tables))


def make_request(name: str, cache_key: str, kept: KeptTokens | None = None) -> GenerateRequest:
    """A request whose seed the engine chooses, so kept tokens were drawn with another one."""
    sampling = SamplingParams(
        max_tokens=LENGTH,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        stop_tokens=(STOP,),
        top_k_logprobs=TOP_K,
    )
    return GenerateRequest(name, cache_key, PROMPT, sampling, kept=kept)


def kept_of(chunks: Sequence[TokenChunk], cut: int) -> KeptTokens:
    """The first `cut` tokens of a response.

    The cut must not depend on the response. A random share of its *length* does, because the length
    tells where it stopped. (This benchmark did that at first, and its own test failed.)
    """
    fields = ("tokens", "logprobs", "topk_ids", "topk_logprobs", "noise_seeds")
    parts = [np.concatenate([getattr(chunk, field) for chunk in chunks]) for field in fields]
    return KeptTokens(*(part[:cut].copy() for part in parts))


def cells_of(responses: Sequence[Sequence[TokenChunk]]) -> Codes:
    """`[n]` cell of each response, padded with STOP."""
    texts: NDArray[np.int64] = np.full((len(responses), LENGTH), STOP, np.int64)
    for row, chunks in enumerate(responses):
        tokens = np.concatenate([chunk.tokens for chunk in chunks])
        ended = len(tokens) == LENGTH or (len(tokens) > 0 and tokens[-1] == STOP)
        assert ended, f"{chunks[0].request_id} generated {tokens}"
        assert not (tokens[:-1] == STOP).any(), f"{chunks[0].request_id} generated {tokens}"
        texts[row, : len(tokens)] = tokens
    return cells(texts, VOCABULARY)


KINDS = ("torch", "vllm", "sglang")
MODES = (
    "torch-chain",
    "torch-tree",
    "torch-verify",
    "vllm-chain",
    "vllm-verify",
    "sglang-tree",
    "sglang-verify",
)

WAVE = 20_000
"""Requests at a time; each wave drafts from a tree of its own."""
_OLD_ROLLOUTS = 200
"""Rollouts of the old policy in each tree."""
_MIN_DRAFTED = 0.05
"""Tokens that must be drafted (or kept) per sample, and some of them accepted."""
_DEADLINE = 1800.0
"""Seconds allowed for a wave."""
_VLLM_SLOTS = 32
"""Few, because vLLM's process plans drafts by cost: with many rows it would draft nothing."""
_SGLANG_SLOTS, _SGLANG_STEP_TOKENS = 64, 320
"""Every row may have 4 drafts in each step, whatever that costs."""
_SEEDS_A_RUN = 5
"""Seeds of the torch engine that one `--seed` takes; at least the number of its modes."""

Wave = tuple[Codes, dict[str, float]]


class UnavailableError(Exception):
    """A mode cannot run here; the message says why."""


class Bench(ABC):
    """One engine and the weights of two policies."""

    def __init__(self, path: str, old: Any, new: Any) -> None:
        self.path, self.old, self.new = path, old, new
        self.probabilities = enumerate_policy(new).sequence_distribution()
        """`[C]` of the cells, under the new policy."""

    @abstractmethod
    def prepare(self, mode: str) -> None:
        """Prepare the engine for a mode."""

    @abstractmethod
    def install(self, model: Any) -> None:
        """Swap the weights."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[TokenChunk]]:
        """All chunks of each request."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """The engine's counters."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""

    def waves(self, mode: str, samples: int) -> Iterator[Wave]:
        """`samples` cells in waves, with the numbers of tokens drafted and accepted."""
        self.prepare(mode)
        wave = self._verified if mode.endswith("verify") else self._drafted
        drafted = accepted = 0.0
        for start in range(0, samples, WAVE):
            found, notes = wave(f"{mode}.{start}", min(WAVE, samples - start))
            drafted, accepted = drafted + notes["drafted"], accepted + notes["accepted"]
            yield found, notes
        if drafted < _MIN_DRAFTED * samples or not accepted:
            raise UnavailableError(
                f"{mode}: only {drafted:.0f} tokens were drafted or kept for {samples} "
                f"samples, and {accepted:.0f} accepted, so nothing is certified"
            )

    def _drafted(self, name: str, count: int) -> Wave:
        self.install(self.old)
        self.generate([make_request(f"{name}.old{i}", name) for i in range(_OLD_ROLLOUTS)])
        self.install(self.new)
        before = self.stats().tokens
        chunks = self.generate([make_request(f"{name}.{i}", name) for i in range(count)])
        tokens = self.stats().tokens - before
        notes = {"drafted": float(tokens.drafted), "accepted": float(tokens.accepted)}
        return cells_of(chunks), notes

    def _verified(self, name: str, count: int) -> Wave:
        rng = np.random.default_rng(sum(map(ord, name)))
        self.install(self.old)
        texts = self.generate([make_request(f"{name}.old{i}", "") for i in range(count)])
        cuts = rng.integers(0, LENGTH + 1, count)
        kept = [kept_of(chunks, int(cut)) for chunks, cut in zip(texts, cuts, strict=True)]
        self.install(self.new)
        requests = [make_request(f"{name}.{i}", "", kept=tokens) for i, tokens in enumerate(kept)]
        chunks = self.generate(requests)
        verified = sum(
            int((chunk.provenance == Provenance.VERIFIED).sum()) for row in chunks for chunk in row
        )
        return cells_of(chunks), {"drafted": float(sum(map(len, kept))), "accepted": verified}


class TorchBench(Bench):
    """The core of the torch engine, without asyncio."""

    def __init__(self, path: str, old: Any, new: Any, seed: int) -> None:
        super().__init__(path, old, new)
        self._seed = seed

    def prepare(self, mode: str) -> None:
        """Make a new core for each mode."""
        from asyncrl.engine.remote.worker.drafting import FixedBudget
        from asyncrl.engine.torch.core import CoreSettings, DecodeCore
        from asyncrl.engine.torch.model import load_model

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
        planner = FixedBudget(max_step_tokens=8192, max_draft_tokens=4)
        # A seed gives the same response whatever is drafted, so each mode needs seeds of its own.
        seed = _SEEDS_A_RUN * self._seed + MODES.index(mode)
        self._core = DecodeCore(
            model, settings, RolloutCache(_drafts()), seed=seed, planner=planner
        )
        self._version = 0

    def install(self, model: Any) -> None:
        """Update the weights by name, with the next version."""
        self._version += 1
        with published(model.state_dict().items(), self._version) as manifest:
            self._core.stage_weights(manifest)
        self._core.install_weights(self._version)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[TokenChunk]]:
        """Run decode steps until every request has finished."""
        found: dict[str, list[TokenChunk]] = {request.request_id: [] for request in requests}
        for request in requests:
            self._core.add(request)
        while self._core.has_work:
            for chunk in self._core.step():
                found[chunk.request_id].append(chunk)
        return list(found.values())

    def stats(self) -> EngineStats:
        return self._core.stats()

    def close(self) -> None:
        """Nothing to release: nothing runs between waves."""


class EngineBench(Bench):
    """Any engine behind the protocol; its event loop runs only while this is called."""

    def __init__(self, path: str, old: Any, new: Any, engine: Engine) -> None:
        super().__init__(path, old, new)
        self._engine, self._runner, self._version = engine, asyncio.Runner(), 0
        self._run(engine.start())

    def prepare(self, mode: str) -> None:
        """One engine serves all modes."""

    def install(self, model: Any) -> None:
        """Update the weights as the controller does."""
        self._version += 1
        with published(model.state_dict().items(), self._version) as manifest:
            self._run(self._engine.stage_weights(manifest))
        self._run(self._engine.install_weights(self._version))

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[TokenChunk]]:
        """Send all requests at once; the engine queues those that do not fit."""

        async def one(request: GenerateRequest) -> list[TokenChunk]:
            return [chunk async for chunk in self._engine.generate(request)]

        async def everything() -> list[list[TokenChunk]]:
            return list(await asyncio.gather(*map(one, requests)))

        found: list[list[TokenChunk]] = self._run(everything())
        return found

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        """Close the engine and its event loop."""
        self._run(self._engine.close())
        self._runner.close()

    def _run(self, awaitable: Any) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(awaitable, _DEADLINE)

        return self._runner.run(bounded())


@contextmanager
def open_bench(kind: str, seed: int) -> Iterator[Bench]:
    """An engine with its model on disk. Raises UnavailableError where it cannot be started."""
    if kind == "vllm" and util.find_spec("vllm") is None:
        raise UnavailableError("vLLM is not installed")
    with tempfile.TemporaryDirectory() as path:
        old, new = random_qwen3(1, VOCABULARY), random_qwen3(1, VOCABULARY)
        other = random_qwen3(2, VOCABULARY)
        with torch.no_grad():
            for mine, theirs in zip(new.parameters(), other.parameters(), strict=True):
                mine.lerp_(theirs, 0.4)
        old.save_pretrained(path)
        try:
            bench = _BENCHES[kind](path, old, new, seed)
        except (EngineError, ImportError) as error:
            raise UnavailableError(f"{kind} cannot be started: {error}") from error
        try:
            yield bench
        finally:
            bench.close()


def _vllm(path: str, old: Any, new: Any, seed: int) -> Bench:
    from asyncrl.engine.vllm.client.engine import VllmEngine
    from asyncrl.engine.vllm.config import VllmConfig

    config = EngineConfig(
        kind="vllm",
        slots=_VLLM_SLOTS,
        max_model_len=64,
        threads=1,
        top_k_logprobs=TOP_K,
        vllm=VllmConfig(kv_cache_gib=0.25),
    )
    return EngineBench(path, old, new, VllmEngine(config, path, cache_config=_drafts(), seed=seed))


def _sglang(path: str, old: Any, new: Any, seed: int) -> Bench:
    from asyncrl.engine.sglang.client.engine import SglangEngine
    from asyncrl.engine.sglang.config import SglangConfig
    from benchmarks.harness import sglang_python

    config = EngineConfig(
        kind="sglang",
        slots=_SGLANG_SLOTS,
        max_model_len=64,
        threads=1,
        top_k_logprobs=TOP_K,
        sglang=SglangConfig(
            python=sglang_python(), kv_cache_gib=0.05, max_step_tokens=_SGLANG_STEP_TOKENS
        ),
    )
    return EngineBench(
        path, old, new, SglangEngine(config, path, cache_config=_drafts(), seed=seed)
    )


_BENCHES: dict[str, Callable[[str, Any, Any, int], Bench]] = {
    "torch": TorchBench,
    "vllm": _vllm,
    "sglang": _sglang,
}


def _drafts() -> CacheConfig:
    return CacheConfig(max_draft_tokens=4, min_match=1, min_probability=0.0, max_bytes=1 << 24)
