"""The generator's side of SGLang against a worker process of ours that does what it is told."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import fake_sglang
import numpy as np
import pytest

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError, EngineStartError
from asyncrl.engine.protocol import GenerateRequest, SamplingParams, ScoreRequest, TokenChunk
from asyncrl.engine.remote.client.core import CoreRequest
from asyncrl.engine.remote.client.responses import Inbox
from asyncrl.engine.remote.extras import RequestExtra
from asyncrl.engine.sglang.client import engine, process
from asyncrl.engine.sglang.client.engine import SglangEngine
from asyncrl.engine.sglang.config import SglangConfig
from asyncrl.rollout.trajectory import Provenance

T = TypeVar("T")
PROMPT = np.array([1, 2, 3], np.int32)
K = 2
SECONDS = 30.0


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MODULE", "fake_sglang")
    # The engine of a session that this worker may have puts `forked_sglang` there.
    monkeypatch.setattr(process, "subprocess", subprocess)
    paths = [str(Path(fake_sglang.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


class _Impatient(SglangConfig):
    call_seconds: ClassVar[float] = 5.0


def engine_of(path: str, start_limit: float | None = None) -> SglangEngine:
    ours = _Impatient(python=sys.executable)
    config = EngineConfig(kind="sglang", max_model_len=200, top_k_logprobs=K, sglang=ours)
    config = config if start_limit is None else config.started_within(start_limit)
    return SglangEngine(config, path, cache_config=CacheConfig(), seed=3)


@pytest.fixture
def served(tiny_qwen3: str, runner: asyncio.Runner) -> Iterator[SglangEngine]:
    engine = engine_of(tiny_qwen3)
    runner.run(engine.start())
    yield engine
    runner.run(engine.close())


def ask(stop: int = 0, max_tokens: int = 5, name: str = "r") -> GenerateRequest:
    sampling = SamplingParams(
        max_tokens, top_k_logprobs=K, seed=1, stop_tokens=(stop,) if stop else ()
    )
    return GenerateRequest(name, "", PROMPT, sampling)


def test_no_id_that_sglang_is_told_begins_with_another() -> None:
    """It aborts every request whose id begins with the given one."""
    told = [engine._sent(f"r{i}") for i in range(200)]
    assert not any(a != b and b.startswith(a) for a in told for b in told)
    with pytest.raises(EngineError, match="more than 16 characters"):
        engine._sent("r" * 17)


def test_a_request_is_on_its_way_before_any_other_task_runs(
    served: SglangEngine, runner: asyncio.Runner
) -> None:
    """Its end, sent by another task, would come before it, and it would run for nobody."""
    assert served._parts is not None
    client, inbox = served._parts.core, Inbox[Any]()
    extra = RequestExtra(seed=1, top_k_logprobs=K)

    async def sent_at_once() -> None:
        request = CoreRequest(
            tokens=[1], max_tokens=3, temperature=1.0, top_p=1.0, stop_tokens=(9,), extra=extra,
            priority=0,
        )  # fmt: skip
        for call in (client.submit("r0", inbox, request), client.abort(["r0"])):
            with pytest.raises(StopIteration):
                call.send(None)
        assert not client.unfinished

    runner.run(sent_at_once())


async def collect(engine: SglangEngine, request: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request)]


def gone(pid: int) -> bool:
    """Whether a process has ended, which its parent may not have been told yet."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def rank_of(engine: SglangEngine) -> int:
    assert engine._process._folder is not None
    words = engine._process._folder.log.read_text().split()
    return int(words[words.index("rank") + 1])


def test_tokens_scores_and_counters_arrive(served: SglangEngine, runner: asyncio.Runner) -> None:
    chunks = runner.run(collect(served, ask()))
    assert sum(len(chunk.tokens) for chunk in chunks) == 5
    assert chunks[-1].finish_reason == "length"
    assert (chunks[0].topk_ids == [1, 2]).all()
    assert (chunks[0].logprobs == -1).all()
    marks = np.concatenate([chunk.provenance for chunk in chunks])
    assert marks.tolist() == [Provenance.DRAFTED] * 4 + [Provenance.SAMPLED]
    request = ScoreRequest("s", PROMPT, PROMPT, SamplingParams(1, top_k_logprobs=K))
    (score,) = runner.run(served.score([request]))
    assert score.logprobs.tolist() == [-1, -1, -1]
    assert score.topk_ids.tolist() == [[2, 3]] * 3
    stats = served.stats()
    assert (stats.steps, stats.tokens.drafted, stats.tokens.accepted) == (2, 7, 5)
    assert (stats.tokens.generated, stats.running, stats.waiting, stats.kv_used) == (5, 0, 0, 0)


def test_an_interrupted_request_keeps_what_was_drawn(
    served: SglangEngine, runner: asyncio.Runner
) -> None:
    async def interrupted() -> list[TokenChunk]:
        chunks = []
        async for chunk in served.generate(ask(stop=9)):
            chunks.append(chunk)
            served.interrupt("r")
        return chunks

    chunks = runner.run(interrupted())
    assert sum(len(chunk.tokens) for chunk in chunks) == 5
    assert chunks[-1].finish_reason == "abort"
    assert served.stats().running == 0


def test_a_dead_worker_is_reported_with_its_last_lines(
    served: SglangEngine, runner: asyncio.Runner
) -> None:
    rank = rank_of(served)

    async def both() -> list[Any]:
        asked = [collect(served, ask(stop=9)), collect(served, ask(fake_sglang.DIE, name="s"))]
        return await asyncio.gather(*asked, return_exceptions=True)

    for error in runner.run(both()):
        assert isinstance(error, EngineError)
        assert "SGLang was killed by signal 11 (Segmentation fault)" in str(error)
        assert str(error).endswith("the last words of a worker")
    with pytest.raises(EngineError, match="killed by signal 11"):
        runner.run(served.pause())
    runner.run(served.close())
    until(lambda: gone(rank))


def test_a_hanging_worker_is_waited_for_within_limits(
    served: SglangEngine, runner: asyncio.Runner
) -> None:
    async def hang() -> None:
        task = asyncio.create_task(collect(served, ask(stop=fake_sglang.HANG)))
        while not served.stats().running:
            await asyncio.wait([task], timeout=0.001)
        try:
            await served.pause()
        finally:
            task.cancel()

    with pytest.raises(EngineError, match="SGLang did not pause within 5 s"):
        runner.run(hang())
    runner.run(asyncio.wait_for(served.close(), SECONDS))


def test_an_installation_has_a_limit_of_its_own(
    served: SglangEngine, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served._process, "send", lambda _: None)
    with pytest.raises(EngineError, match=r"SGLang did not install new weights within 0\.01 s"):
        runner.run(served._running().core.install(1, 0.01))


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (fake_sglang.GARBAGE, r"(?s)sent a message that cannot be read .*same version"),
        (fake_sglang.SHORT, r"tables of 4 rows of 3 have"),
    ],
)
def test_a_message_that_cannot_be_read_ends_the_engine(
    served: SglangEngine, runner: asyncio.Runner, stop: int, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        runner.run(collect(served, ask(stop=stop)))
    with pytest.raises(EngineError, match=message):
        served.stats()


def test_a_request_that_sglang_refuses_fails_alone(
    served: SglangEngine, runner: asyncio.Runner
) -> None:
    with pytest.raises(EngineError, match="SGLang ended a request: too long"):
        runner.run(collect(served, ask(stop=fake_sglang.ERROR)))
    assert len(runner.run(collect(served, ask()))[-1].tokens) > 0


def test_an_error_inside_a_call_is_reported(served: SglangEngine, runner: asyncio.Runner) -> None:
    runner.run(served.pause())
    with pytest.raises(EngineError, match="SGLang could not resume: it does not want to"):
        runner.run(served.resume())


def test_closing_ends_requests_processes_and_the_folder(
    served: SglangEngine, runner: asyncio.Runner
) -> None:
    rank, folder = rank_of(served), served._process._folder
    assert folder is not None
    assert folder.path.stat().st_mode & 0o777 == 0o700

    async def close() -> list[TokenChunk]:
        task = asyncio.create_task(collect(served, ask(stop=9)))
        while not served.stats().running:
            await asyncio.wait([task], timeout=0.001)
        await served.close()
        return await task

    assert runner.run(close())[-1].finish_reason == "abort"
    until(lambda: gone(rank))
    assert not folder.path.exists()
    with pytest.raises(EngineError, match="the engine is closed"):
        runner.run(collect(served, ask()))


def test_what_a_worker_says_when_it_does_not_start(
    tiny_qwen3: str, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "refuses")
    with pytest.raises(
        EngineStartError,
        match=r"(?s)could not be started with model .*ended with exit code 2.*not like this model",
    ):
        runner.run(engine_of(tiny_qwen3).start())


def test_a_start_that_takes_too_long(
    tiny_qwen3: str, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "loads for ever")
    engine = engine_of(tiny_qwen3, start_limit=1.0)
    with pytest.raises(EngineStartError, match=r"not ready after 1 s.*launcher.startup_seconds"):
        runner.run(engine.start())


def _generate(model: str, told: Connection) -> None:
    """Be a generator until it is killed; tell its worker's rank and its folder."""

    async def serve() -> None:
        engine = engine_of(model)
        await engine.start()
        assert engine._process._folder is not None
        told.send((rank_of(engine), engine._process._folder.path))
        await asyncio.sleep(1000)

    asyncio.run(serve())


def test_nothing_outlives_a_killed_generator(tiny_qwen3: str) -> None:
    forking = multiprocessing.get_context("fork")
    told, tells = forking.Pipe(duplex=False)
    generator = forking.Process(target=_generate, args=(tiny_qwen3, tells))
    generator.start()
    try:
        assert told.poll(SECONDS)
        rank, folder = told.recv()
    finally:
        generator.kill()
        generator.join()
    until(lambda: gone(rank))
    until(lambda: not folder.exists())
