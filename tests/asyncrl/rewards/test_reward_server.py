"""A reward model behind HTTP: its scores, its limits, and a server process that hangs or dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from reward_models import own_score, save_classifier
from reward_pools import running
from typer.testing import CliRunner

from asyncrl.cli.entry import app as command_line
from asyncrl.errors import RewardFailed, UserError
from asyncrl.reward_server import keeping
from asyncrl.reward_server.batching import Batcher, BatchSettings
from asyncrl.reward_server.classifier import Classifier, ClassifierSettings, TooLongError
from asyncrl.reward_server.keeping import RewardServers, listen, served, url_of
from asyncrl.reward_server.serving import App
from asyncrl.rewards.addresses import starts_servers
from asyncrl.rewards.config import RewardConfig
from asyncrl.startup.preflight import check_rewards


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("classifier")
    return (folder, *save_classifier(folder))


TEXTS = [
    ("2+3=?", "5"),
    ("a", ""),
    ("Why?", "Because it is so."),
    ("x" * 20, "y" * 25),
    ("é", "😀"),
]


def test_scores_are_those_of_transformers_in_any_batch(saved: tuple[Path, Any, Any]) -> None:
    folder, model, tokenizer = saved
    classifier = Classifier.load(ClassifierSettings(str(folder), device="cpu"))
    tokens = [classifier.encode(*text) for text in TEXTS]
    own = [own_score(model, tokenizer, *text) for text in TEXTS]
    assert max(own) - min(own) > 0.1
    assert classifier.score(tokens) == pytest.approx(own, abs=1e-5)
    assert [classifier.score([one])[0] for one in tokens] == pytest.approx(own, abs=1e-5)
    with pytest.raises(TooLongError, match="tokens, and the reward model takes 64"):
        classifier.encode("x" * 70, "")
    left = ClassifierSettings(str(folder), truncate="left", device="cpu")
    assert len(Classifier.load(left).encode("x" * 70, "y")) == 64


def test_a_model_that_was_not_trained_to_score_is_refused(
    saved: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved[0]
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"no weights for score.weight, so its scores would be"):
        Classifier.load(ClassifierSettings(str(tmp_path), device="cpu"))
    with pytest.raises(UserError, match="has 1 outputs, from 0"):
        Classifier.load(ClassifierSettings(str(folder), label=1, device="cpu"))


def test_texts_that_wait_share_a_batch() -> None:
    async def check() -> None:
        batches: list[list[int]] = []

        def score(batch: Sequence[Sequence[int]]) -> list[float]:
            batches.append([len(one) for one in batch])
            if any(len(one) == 13 for one in batch):
                raise ValueError("unlucky")
            return [float(one[0]) for one in batch]

        batcher = Batcher(score, BatchSettings(batch_tokens=20, window_seconds=0, max_waiting=9))
        waiting = [asyncio.ensure_future(batcher.submit([i] * n)) for i, n in enumerate(
            [5, 5, 10, 30, 1, 1, 13, 2, 2]
        )]  # fmt: skip
        await asyncio.sleep(0)
        assert batcher.waiting == 9
        with pytest.raises(Exception, match="as many texts wait as may"):
            await batcher.submit([1])
        waiting[4].cancel()
        batcher.start()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [len(one) for one in batches] == [2, 1, 1, 1, 1, 2]
        assert batches == [[5, 5], [10], [30], [1], [13], [2, 2]]
        assert [one for one in results if isinstance(one, float)] == [0, 1, 2, 3, 5, 7, 8]
        assert isinstance(results[6], ValueError)
        await batcher.close()

    asyncio.run(check())


class _Words:
    """A classifier whose score is the number of characters."""

    settings = ClassifierSettings("words")

    def encode(self, prompt: str, response: str) -> list[int]:
        if response == "long":
            raise TooLongError("too long")
        return [len(prompt), len(response)]


@asynccontextmanager
async def _app(token: str | None, *, blocked: asyncio.Event | None = None) -> AsyncIterator[str]:
    """The address of a server with a fake model."""
    go = threading.Event()
    loop = asyncio.get_running_loop()

    def score(batch: Sequence[Sequence[int]]) -> list[float]:
        if blocked is not None:
            loop.call_soon_threadsafe(blocked.set)
            go.wait(60)
        return [float(sum(one)) for one in batch]

    batcher = Batcher(score, BatchSettings(max_waiting=1))
    batcher.start()
    fake: Any = _Words()
    application: Any = App(fake, batcher, token, max_body_bytes=200)
    server = uvicorn.Server(
        uvicorn.Config(application, log_config=None, lifespan="off", ws="none", loop="asyncio")
    )
    server.capture_signals = _no_signals  # type: ignore[method-assign]
    with listen("127.0.0.1", 0, has_token=False) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        try:
            yield url_of(listening)
        finally:
            go.set()
            server.should_exit = True
            await serving
            await batcher.close()


def _no_signals() -> Any:
    return contextlib.nullcontext()


def test_what_the_server_refuses() -> None:
    async def check() -> None:
        good = {"prompt": "a", "response": "bc"}
        head = {"Authorization": "Bearer t0ken"}
        async with _app("t0ken") as url, aiohttp.ClientSession() as session:

            async def post(body: Any = None, headers: Any = head, **more: Any) -> tuple[int, Any]:
                given = {"json": good if body is None else body} | more
                async with session.post(f"{url}/score", headers=headers, **given) as answer:
                    return answer.status, await answer.json()

            assert await post() == (200, {"score": 3.0})
            async with session.get(f"{url}/health") as answer:
                assert (await answer.json())["texts"] == 1
            assert (await post(headers={}))[0] == 401
            assert (await post(headers={"Authorization": "Bearer other"}))[0] == 401
            assert (await post({"prompt": "a" * 300, "response": ""}))[0] == 413
            assert (await post({"prompt": "a", "response": "long"})) == (
                422,
                {"detail": "too long"},
            )
            for wrong in ({}, {"prompt": 1, "response": "b"}, {**good, "more": 1}, [good]):
                assert (await post(wrong))[0] == 400, wrong
            async with session.get(f"{url}/score") as answer:
                assert answer.status == 405
            async with session.get(f"{url}/else") as answer:
                assert answer.status == 404

    asyncio.run(check())


def test_a_missing_or_wrong_token_is_found_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with _app("t0ken") as url:

            def checked(**args: str) -> None:
                function = {"name": "reward_model", "args": {"url": url, **args}}
                check_rewards(RewardConfig.model_validate({"functions": [function]}))

            for given in ({}, {"token_env": "WRONG"}):
                with pytest.raises(UserError, match=r"trial text has no score.* 401"):
                    await asyncio.to_thread(checked, **given)
            await asyncio.to_thread(checked, token_env="RIGHT")

    monkeypatch.setenv("WRONG", "other")
    monkeypatch.setenv("RIGHT", "t0ken")
    asyncio.run(check())


def test_a_server_that_cannot_be_started_again_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    for name in ("_CHECK_SECONDS", "_PAUSE_SECONDS"):
        monkeypatch.setattr(keeping, name, 0.001)

    async def check() -> None:
        servers = RewardServers(tmp_path, lines.append)
        again = asyncio.Event()
        starts = 0

        def spawn(*_: Any) -> tuple[subprocess.Popen[bytes], int]:
            nonlocal starts
            starts += 1
            if starts == 2:
                raise OSError("too many open files")
            if starts == 3:
                again.set()
            code = "" if starts < 3 else "import time; time.sleep(600)"
            reading, writing = os.pipe()
            os.close(writing)
            return subprocess.Popen([sys.executable, "-S", "-c", code]), reading

        monkeypatch.setattr(RewardServers, "_spawn", lambda _, *args: spawn(*args))
        servers._add(0, ClassifierSettings("words"))
        watching = asyncio.create_task(servers._watch())
        async with asyncio.timeout(60):
            await again.wait()
        watching.cancel()
        await servers.close()

    asyncio.run(check())
    assert any("could not be started: too many open files" in line for line in lines)


def test_a_full_queue_asks_to_come_back() -> None:
    async def check() -> None:
        good = {"prompt": "a", "response": "bc"}
        blocked = asyncio.Event()
        async with _app(None, blocked=blocked) as url, aiohttp.ClientSession() as session:

            async def post() -> tuple[int, str | None]:
                async with session.post(f"{url}/score", json=good) as answer:
                    return answer.status, answer.headers.get("Retry-After")

            computing = asyncio.create_task(post())
            await asyncio.wait_for(blocked.wait(), 60)
            # One of two finds the only place taken.
            others = [asyncio.create_task(post()) for _ in range(2)]
            done, queued = await asyncio.wait(
                others, timeout=60, return_when=asyncio.FIRST_COMPLETED
            )
            assert [task.result() for task in done] == [(429, "1")]
            assert len(queued) == 1
            queued.pop().cancel()
            computing.cancel()

    asyncio.run(check())


def test_a_server_of_a_run_hangs_dies_and_is_started_again(
    saved: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    """The whole way: worker processes, HTTP, the server's process; two rewards with weights."""
    folder, model, tokenizer = saved
    config = RewardConfig.model_validate(
        {
            "functions": [
                {"name": "reward_model", "weight": 2.0, "args": {"model": str(folder)}},
                {"name": "exact_match"},
            ],
            "startup_seconds": 300,
        }
    )
    assert starts_servers(config)
    lines: list[str] = []

    async def check() -> None:
        servers = RewardServers(tmp_path, lines.append)
        async with _served(servers, config) as functions:
            own = [own_score(model, tokenizer, *text) for text in TEXTS]
            async with running(*functions, timeout_seconds=120, workers=2) as pool:
                rewards = await asyncio.gather(
                    *(pool.score(prompt, said, {"answer": "5"}) for prompt, said in TEXTS)
                )
                assert [one.terms[0] for one in rewards] == pytest.approx(own, abs=1e-5)
                assert [one.terms[1] for one in rewards] == [1.0, 0.0, 0.0, 0.0, 0.0]
                expected = [
                    2 * score + one.terms[1] for score, one in zip(own, rewards, strict=True)
                ]
                assert [one.value for one in rewards] == pytest.approx(expected, abs=1e-4)
                with pytest.raises(RewardFailed, match="422") as failed:
                    await pool.score("x" * 99, "", {"answer": "5"})
                assert failed.value.reason == "refused"
            pid = _pid(servers)
            os.kill(pid, signal.SIGSTOP)
            async with running(*functions, timeout_seconds=2) as pool:
                with pytest.raises(RewardFailed, match="did not answer at attempt 1") as failed:
                    await pool.score("2+3=?", "5", {"answer": "5"})
                assert failed.value.reason == "timeout"
            os.kill(pid, signal.SIGKILL)
            async with running(*functions, timeout_seconds=300) as pool:
                again = await pool.score("2+3=?", "5", {"answer": "5"})
                assert again.terms[0] == pytest.approx(own[0], abs=1e-5)
            assert _pid(servers) != pid
            assert "ended with exit code -9" in lines[0]
            assert "it is started again in 1 s" in lines[0]

    asyncio.run(check())


@asynccontextmanager
async def _served(servers: RewardServers, config: RewardConfig) -> AsyncIterator[list[Any]]:
    from asyncrl.rewards.addresses import with_urls

    try:
        await servers.start(config)
        found = with_urls(config, servers.urls)
        yield [one.model_dump() for one in found.functions]
    finally:
        await servers.close()


def _pid(servers: RewardServers) -> int:
    return servers._servers[0].process.pid


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    config = RewardConfig.model_validate(
        {"functions": [{"name": "reward_model", "args": {"model": str(tmp_path)}}]}
    )

    async def check() -> None:
        with pytest.raises(UserError, match=r"ended as it was started: --model: .* is a Llama"):
            async with served(config, tmp_path, print):
                pass

    asyncio.run(check())


def test_the_command_refuses_before_it_loads_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: str) -> BaseException | None:
        return CliRunner().invoke(command_line, ["reward-server", *args]).exception

    model = ("--model", str(tmp_path))
    assert "others could reach the server" in str(run(*model, "--host", "192.0.2.1"))
    assert "NO_SUCH (--token-env) is not set" in str(run(*model, "--token-env", "NO_SUCH"))
    with listen("127.0.0.1", 0, has_token=False) as taken:
        port = str(taken.getsockname()[1])
        assert "cannot listen there (Address already in use)" in str(run(*model, "--port", port))
    assert "config.json cannot be read" in str(run(*model, "--port", "0"))
