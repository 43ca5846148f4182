"""A reward model that a run serves: its scores, and a server process that hangs or dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from reward_models import answering, own_score, save_classifier
from reward_pools import running
from starlette.requests import Request

from asyncrl.errors import RewardFailed, UserError
from asyncrl.reward_server import keeping, server
from asyncrl.reward_server.keeping import served, starts_servers
from asyncrl.reward_server.server import App, Classifier, Question, TooLongError
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


def asked(prompt: str, response: str, **more: Any) -> Question:
    """As the reward asks."""
    messages = [("user", prompt), ("assistant", response)]
    return Question([{"role": role, "content": content} for role, content in messages], **more)


def test_scores_are_those_of_transformers_in_any_batch(saved: tuple[Path, Any, Any]) -> None:
    folder, model, tokenizer = saved
    classifier = Classifier(str(folder))
    tokens = [classifier.encode(asked(*text)) for text in TEXTS]
    own = [[own_score(model, tokenizer, *text)] for text in TEXTS]
    assert max(own)[0] - min(own)[0] > 0.1
    assert classifier.score(tokens) == [pytest.approx(one, abs=1e-5) for one in own]
    assert [classifier.score([one])[0] for one in tokens] == [
        pytest.approx(one, abs=1e-5) for one in own
    ]
    with pytest.raises(TooLongError, match="tokens, and the reward model takes 64"):
        classifier.encode(asked("x" * 70, ""))
    left = classifier.encode(asked("x" * 70, "yz", truncate_prompt_tokens=-1))
    assert len(left) == 64
    assert left[-2:] == classifier.encode(Question(input="yz"))
    assert len(Classifier(str(folder), 8).encode(Question(input="12345678"))) == 8


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
        Classifier(str(tmp_path))


class _Words:
    """A classifier whose output is the first of as many tokens as the text says."""

    pads = True

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def encode(self, question: Question) -> list[int]:
        first, count = question.input.split()
        return [int(first)] * int(count)

    def score(self, batch: Sequence[Sequence[int]]) -> list[list[float]]:
        self.batches.append([len(one) for one in batch])
        if any(len(one) == 13 for one in batch):
            raise ValueError("unlucky")
        return [[float("nan") if len(one) == 2 else float(one[0])] for one in batch]


def _request(body: str, gone: asyncio.Event) -> Request:
    """A request with this body, whose caller goes away with the event."""
    messages = [{"type": "http.request", "body": body.encode(), "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await gone.wait()
            return {"type": "http.disconnect"}
        return messages.pop()

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def test_texts_that_wait_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BATCH_TOKENS", 20)

    async def check() -> None:
        words: Any = _Words()
        app, here, gone = App(words), asyncio.Event(), asyncio.Event()
        gone.set()
        bodies = [f'{{"input": "{i} {n}"}}' for i, n in enumerate([5, 5, 10, 30, 3, 1, 13, 2])]
        waiting = []
        for place, body in enumerate(bodies):
            request = _request(body, gone if place == 4 else here)
            waiting.append(asyncio.create_task(app.classify(request)))
            while len(app._waiting) <= place:  # noqa: ASYNC110 - a thread encodes
                await asyncio.sleep(0.001)
        running = asyncio.create_task(app.run())
        answers = await asyncio.gather(*waiting)
        running.cancel()
        assert words.batches == [[5, 5], [10], [30], [1], [13], [2]]
        assert [one.status_code for one in answers] == [200] * 6 + [500, 422]
        assert answers[2].body == b'{"data":[{"index":0,"probs":[2.0]}]}'
        assert (await app.classify(_request("{}}", here))).status_code == 422

    asyncio.run(check())


def test_a_missing_or_wrong_token_is_found_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer t0ken":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"probs": [1.0]}]})

    async def check() -> None:
        async with answering(serve) as url:

            def checked(**args: str) -> None:
                function = {"name": "reward_model", "args": {"url": url, **args}}
                check_rewards(RewardConfig.model_validate({"functions": [function]}))

            for given in ({}, {"token_env": "WRONG"}):
                with pytest.raises(UserError, match=r"trial text was not scored.* 401"):
                    await asyncio.to_thread(checked, **given)
            await asyncio.to_thread(checked, token_env="RIGHT")

    monkeypatch.setenv("WRONG", "other")
    monkeypatch.setenv("RIGHT", "t0ken")
    monkeypatch.setenv("OPENAI_API_KEY", "t0ken")  # is for OpenAI, not for this server
    asyncio.run(check())


def test_a_server_that_cannot_be_started_again_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    for name in ("_CHECK_SECONDS", "_PAUSE_SECONDS"):
        monkeypatch.setattr(keeping, name, 0.001)

    async def check() -> None:
        again = asyncio.Event()
        starts = 0

        def spawn(*_: Any) -> subprocess.Popen[bytes]:
            nonlocal starts
            starts += 1
            if starts == 2:
                raise OSError("too many open files")
            if starts == 3:
                again.set()
            code = "" if starts < 3 else "import time; time.sleep(600)"
            return subprocess.Popen([sys.executable, "-S", "-c", code])

        monkeypatch.setattr(keeping, "_spawn", spawn)
        one = keeping._Server({"model": "words"}, tmp_path / "log", lines.append)
        watching = asyncio.create_task(one.keep())
        async with asyncio.timeout(60):
            await again.wait()
        watching.cancel()
        one.process.terminate()
        await one.close()

    asyncio.run(check())
    assert any("could not be started: too many open files" in line for line in lines)


@pytest.mark.usefixtures("_forked_runs")
def test_a_server_of_a_run_hangs_dies_and_is_started_again(
    saved: tuple[Path, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    started: list[subprocess.Popen[bytes]] = []
    spawn = keeping._spawn

    def counted(*given: Any) -> subprocess.Popen[bytes]:
        started.append(spawn(*given))
        return started[-1]

    monkeypatch.setattr(keeping, "_spawn", counted)

    async def check() -> None:
        async with served(config, tmp_path, lines.append) as found:
            functions = [one.model_dump() for one in found.functions]
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
            (first,) = started
            os.kill(first.pid, signal.SIGSTOP)
            async with running(*functions, timeout_seconds=2) as pool:
                with pytest.raises(RewardFailed, match="did not answer at attempt 1") as failed:
                    await pool.score("2+3=?", "5", {"answer": "5"})
                assert failed.value.reason == "timeout"
            os.kill(first.pid, signal.SIGKILL)
            async with running(*functions, timeout_seconds=300) as pool:
                again = await pool.score("2+3=?", "5", {"answer": "5"})
                assert again.terms[0] == pytest.approx(own[0], abs=1e-5)
            assert len(started) == 2
            assert "ended with exit code -9" in lines[0]
            assert "it restarts in 1 s" in lines[0]

    asyncio.run(check())


@pytest.mark.usefixtures("_forked_runs")
def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    config = RewardConfig.model_validate(
        {
            "functions": [{"name": "reward_model", "args": {"model": str(tmp_path)}}],
            "startup_seconds": 300,
        }
    )

    async def check() -> None:
        with pytest.raises(UserError, match=r"ended while it started: .* cannot be loaded"):
            async with served(config, tmp_path, print):
                pass

    asyncio.run(check())
