"""TorchEngine, the asyncio shell: streams, pauses, new weights, failures."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from new_weights import give_weights
from tiny_models import STOP, make_llama, make_qwen3, save

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError, EngineStartError, RequestError, WeightsError
from asyncrl.engine.factory import create_engine
from asyncrl.engine.protocol import (
    Engine,
    GenerateRequest,
    SamplingParams,
    ScoreRequest,
    TokenChunk,
)
from asyncrl.engine.torch import step_kernels
from asyncrl.engine.torch.engine import TorchEngine
from asyncrl.wire.weights.writer import published

PROMPT = np.array([1, 2, 3], np.int32)
DEADLINE = 60.0
"""Seconds; far more than any test needs, so that a hang becomes a failure."""


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, DEADLINE))


def engine_of(path: str, **changes: Any) -> Engine:
    settings = {"slots": 4, "max_model_len": 64, "threads": 1, "top_k_logprobs": 4, "device": "cpu"}
    config = EngineConfig(**(settings | {"torch": {"chunk_tokens": 2}} | changes))
    return create_engine(config, path, cache_config=CacheConfig(max_bytes=1 << 20), seed=5)


def request(name: str, **changes: Any) -> GenerateRequest:
    params = SamplingParams(**({"max_tokens": 12, "top_k_logprobs": 4} | changes))
    return GenerateRequest(name, "p", PROMPT, params)


async def collect(engine: Engine, what: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(what)]


def test_what_draws_is_compiled_in_the_start_for_the_logits_of_the_model(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[int, torch.dtype, int]] = []

    def warm_up(logits: torch.Tensor, k: int) -> None:
        compiled.append((logits.shape[1], logits.dtype, k))

    monkeypatch.setattr(step_kernels, "warm_up_drawing", warm_up)

    async def main() -> None:
        engine = engine_of(tiny_qwen3, dtype="bfloat16", top_k_logprobs=5)
        await engine.start()
        await engine.close()

    run(main())
    size = json.loads(Path(tiny_qwen3, "config.json").read_text())["vocab_size"]
    assert compiled == [(size, torch.float32, 5)], "logits are float32, whatever the weights are"


def test_many_requests_stream_and_end(tiny_qwen3: str) -> None:
    async def main() -> None:
        engine = engine_of(tiny_qwen3)
        await engine.start()
        requests = [request(f"r{i}", seed=i, stop_tokens=(STOP,)) for i in range(20)]
        answers = await asyncio.gather(*(collect(engine, r) for r in requests))
        for r, chunks in zip(requests, answers, strict=True):
            assert {c.request_id for c in chunks} == {r.request_id}
            assert [c.finish_reason is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
        stats = engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.tokens.generated == sum(len(c.tokens) for chunks in answers for c in chunks)
        await engine.close()
        await engine.close()

    run(main())


def test_an_unseeded_request_draws_from_the_engines_stream(tiny_qwen3: str) -> None:
    async def main() -> None:
        tokens = []
        for _ in range(2):
            engine = engine_of(tiny_qwen3)
            await engine.start()
            a, b = [await collect(engine, request(name, max_tokens=30)) for name in "ab"]
            tokens.append([np.concatenate([c.tokens for c in x]).tolist() for x in (a, b)])
            await engine.close()
        assert tokens[0] == tokens[1]
        assert tokens[0][0] != tokens[0][1]

    run(main())


def test_closing_the_stream_frees_the_slot(tiny_qwen3: str) -> None:
    async def main() -> None:
        engine = engine_of(tiny_qwen3, slots=1)
        await engine.start()
        stream = engine.generate(request("a", max_tokens=60))
        async for _ in stream:
            break
        assert engine.stats().running == 1
        await stream.aclose()  # type: ignore[attr-defined]
        await engine.pause()  # a step in hand is over, the one after it would not begin
        await engine.resume()
        assert engine.stats().running == 0
        assert (await collect(engine, request("a")))[-1].finish_reason == "length"
        await engine.close()

    run(main())


def test_pause_stops_drawing_and_resume_continues(tiny_qwen3: str) -> None:
    async def main() -> None:
        engine = engine_of(tiny_qwen3)
        await engine.start()
        stream = engine.generate(request("a", max_tokens=40, seed=1))
        tokens = (await anext(stream)).tokens.tolist()
        await engine.pause()
        await engine.pause()
        steps = engine.stats().steps
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.stats().steps == steps
        score = await engine.score(
            [ScoreRequest("s", PROMPT, PROMPT, SamplingParams(3, top_k_logprobs=2))]
        )
        assert score[0].policy_version == 0
        await engine.resume()
        async for chunk in stream:
            tokens += chunk.tokens.tolist()
        alone = await collect(engine, request("b", max_tokens=40, seed=1))
        assert tokens == np.concatenate([c.tokens for c in alone]).tolist()
        await engine.close()

    run(main())


class AllowedSteps:
    """Lets a core compute so many steps as are allowed, and no more."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        assert isinstance(engine, TorchEngine)
        assert engine._core is not None
        step, self._allowed = engine._core.step, threading.Semaphore(0)
        held = lambda: (self._allowed.acquire(timeout=DEADLINE), step())[1]  # noqa: E731
        monkeypatch.setattr(engine._core, "step", held)

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)


def test_new_weights_in_flight(tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = engine_of(tiny_qwen3)
        await engine.start()
        steps = AllowedSteps(engine, monkeypatch)
        with pytest.raises(WeightsError, match="missing"):
            await give_weights(engine, [], 9)
        # Staged before: the response would end while weights are copied.
        with published(make_qwen3(seed=1).state_dict().items(), 4) as manifest:
            await engine.stage_weights(manifest)
        stream = engine.generate(request("a", max_tokens=40, seed=1))
        steps.allow(20)
        versions = [(await anext(stream)).policy_version]
        installed = asyncio.create_task(engine.install_weights(4))
        await asyncio.sleep(0)
        steps.allow(100)
        await installed
        versions += [chunk.policy_version async for chunk in stream]
        assert versions == sorted(versions)
        assert set(versions) == {0, 4}
        assert engine.stats().policy_version == 4
        await engine.close()

    run(main())


def test_a_failing_loop_wakes_every_consumer(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = engine_of(tiny_qwen3, slots=1)
        assert isinstance(engine, TorchEngine)
        await engine.start()
        assert engine._core is not None

        def broken() -> list[TokenChunk]:
            raise ZeroDivisionError("injected")

        monkeypatch.setattr(engine._core, "step", broken)
        answers = await asyncio.gather(
            *(collect(engine, request(name)) for name in "abc"), return_exceptions=True
        )
        assert all(isinstance(a, EngineError) and "injected" in str(a) for a in answers)
        with pytest.raises(EngineError, match="injected"):
            await collect(engine, request("d"))
        await engine.close()

    run(main())


class HeldStep:
    """Holds a core's steps back in the middle until `release`; counts the rows of each."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        assert isinstance(engine, TorchEngine)
        assert engine._core is not None
        core, self.rows = engine._core, list[int]()
        self._begun, self._go_on = threading.Event(), threading.Event()
        step = core.step

        def held() -> list[TokenChunk]:
            self._begun.set()
            assert self._go_on.wait(DEADLINE)
            chunks = step()
            self.rows.append(core.stats().running)
            return chunks

        monkeypatch.setattr(core, "step", held)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, DEADLINE)

    def release(self) -> None:
        self._go_on.set()


def test_what_is_asked_for_during_a_step_is_done_before_the_next_one_and_nobody_waits(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = engine_of(tiny_qwen3)
        await engine.start()
        held = HeldStep(engine, monkeypatch)
        names = ["a", "b", "c"]
        first = asyncio.gather(*(collect(engine, request(n, max_tokens=60)) for n in names))
        await held.begun()
        for name in names:
            engine.interrupt(name)  # each would wait for a step of its own if it waited
        later = asyncio.create_task(collect(engine, request("d", max_tokens=60)))
        await asyncio.sleep(0)
        engine.interrupt("unknown")
        held.release()
        for chunks in await first:
            assert chunks[-1].finish_reason == "abort"
        await later
        assert held.rows[0] == 3, "the step that was being computed"
        assert set(held.rows[1:-1]) == {1}, "the interrupted requests ended before the next step"
        await engine.close()

    run(main())


def block_until(condition: Callable[[], bool]) -> None:
    """Keep the event loop from running, and a little longer than that."""
    until = time.monotonic() + DEADLINE / 2
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.05)


@pytest.mark.parametrize("what", ["install", "a cancelled pause"])
def test_no_token_is_lost_or_overtaken_however_busy_the_event_loop_is(
    what: str, tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = engine_of(tiny_qwen3, torch={"chunk_tokens": 16})
        await engine.start()
        steps = AllowedSteps(engine, monkeypatch)
        with published(make_qwen3(seed=1).state_dict().items(), 4) as manifest:
            await engine.stage_weights(manifest)
        reading = asyncio.create_task(collect(engine, request("a", max_tokens=12, seed=1)))
        await asyncio.sleep(0)
        steps.allow(3)
        block_until(lambda: engine.stats().steps == 3)
        work = engine.install_weights(4) if what == "install" else engine.pause()
        asked = asyncio.create_task(work)
        await asyncio.sleep(0)
        if what != "install":
            asked.cancel()
            await engine.resume()
        steps.allow(100)
        block_until(lambda: not engine.stats().running)
        chunks = await reading
        await asyncio.wait([asked])
        assert sum(len(chunk.tokens) for chunk in chunks) == 12
        last = 4 if what == "install" else 0
        assert [chunk.policy_version for chunk in chunks] == [0, 0, last]
        await engine.close()

    run(main())


def test_a_request_does_not_get_tokens_of_an_earlier_one_with_its_id(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = engine_of(tiny_qwen3)
        await engine.start()
        expected = np.concatenate([c.tokens for c in await collect(engine, request("x", seed=2))])
        held = HeldStep(engine, monkeypatch)
        left = asyncio.create_task(collect(engine, request("a", seed=1)))
        await held.begun()  # this step draws the first token of the request that is left
        left.cancel()
        again = asyncio.create_task(collect(engine, request("a", seed=2)))
        await asyncio.sleep(0)
        held.release()
        tokens = np.concatenate([chunk.tokens for chunk in await again])
        np.testing.assert_array_equal(tokens, expected)
        await engine.close()

    run(main())


def test_the_id_of_a_request_that_is_served_is_refused(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = engine_of(tiny_qwen3)
        await engine.start()
        steps = AllowedSteps(engine, monkeypatch)
        stream = engine.generate(request("a", max_tokens=40))
        steps.allow(20)
        tokens = len((await anext(stream)).tokens)
        left = asyncio.create_task(collect(engine, request("a")))
        await asyncio.sleep(0)
        left.cancel()  # it has not been refused yet
        again = asyncio.create_task(collect(engine, request("a")))
        await asyncio.sleep(0)
        steps.allow(1)  # after it, what came meanwhile is looked at
        with pytest.raises(RequestError, match="a request with this id is being served"):
            await again
        steps.allow(100)
        async for chunk in stream:
            tokens += len(chunk.tokens)
        assert tokens == 40, "the first request was disturbed"
        await engine.close()

    run(main())


def test_close_ends_running_streams_as_aborted(tiny_qwen3: str) -> None:
    async def main() -> None:
        engine = engine_of(tiny_qwen3, slots=1)
        await engine.start()
        tasks = [asyncio.create_task(collect(engine, request(n, max_tokens=60))) for n in "ab"]
        await asyncio.sleep(0)
        await engine.close()
        for chunks in await asyncio.gather(*tasks):
            assert chunks[-1].finish_reason == "abort"
        with pytest.raises(EngineError, match="closed"):
            engine.stats()

    run(main())


def test_misuse_raises_a_clear_error(tiny_qwen3: str) -> None:
    async def main() -> None:
        engine = engine_of(tiny_qwen3)
        with pytest.raises(EngineError, match="not started"):
            engine.stats()
        await engine.start()
        with pytest.raises(EngineStartError, match="started before"):
            await engine.start()
        with pytest.raises(RequestError, match="max_model_len=64"):
            await collect(engine, request("a", max_tokens=64))
        await engine.close()

    run(main())


def start_error(path: str, **changes: Any) -> str:
    """The error of `start` for an impossible model or configuration."""
    errors = []

    async def main() -> None:
        with pytest.raises(EngineStartError) as caught:
            await engine_of(path, **changes).start()
        errors.append(str(caught.value))

    run(main())
    return errors[0]


def test_a_missing_model_is_named(tmp_path: Any) -> None:
    assert "nowhere" in start_error(str(tmp_path / "nowhere"))


def test_more_positions_than_the_model_has_are_refused(tiny_qwen3: str) -> None:
    assert "256 positions" in start_error(tiny_qwen3, max_model_len=300)


def test_a_recurrent_model_is_refused(tmp_path: Any) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=10, hidden_size=16, state_size=4, num_hidden_layers=1)
    assert "recurrent" in start_error(save(MambaForCausalLM(config), tmp_path))


def test_another_attention_is_caught_by_the_self_check(tmp_path: Any) -> None:
    """A model whose attention is not plain causal is found, whatever its configuration says."""
    from asyncrl.engine.torch import model as module

    path = save(make_llama(), tmp_path)
    loaded: Any = module.load_causal_lm(path, torch.float32)
    loaded.model.layers[0].self_attn.register_forward_pre_hook(_reverse_positions, with_kwargs=True)
    slots = module.SlotModel(loaded, slots=2, max_len=16)
    with pytest.raises(EngineStartError, match="total variation"):
        module._check_against_plain_forward(slots, path)


def _reverse_positions(_module: Any, args: Any, kwargs: Any) -> Any:
    """Make the layer depend on the number of tokens fed, which packing changes."""
    cos, sin = kwargs["position_embeddings"]
    return args, kwargs | {"position_embeddings": (cos.flip(1), sin.flip(1))}
