"""`reward_model` against vLLM's own server: the scores are those of transformers."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from reward_models import own_score, save_classifier

from asyncrl.engine.vllm.client.fork_server import ForkContext, start_server
from asyncrl.rewards.reward_model import reward_model, try_once
from asyncrl.rewards.services.client import close_clients
from asyncrl.rewards.values import NoRewardError

TEXTS = [("2+3=?", "5"), ("a", ""), ("Why?", "Because."), ("x" * 20, "y" * 25), ("é", "😀")]
START_SECONDS = 400.0
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def _serve(arguments: list[str], log: Path) -> None:
    """Be `python -m vllm.entrypoints.openai.api_server`, in a process that has imported vLLM.

    Its core is forked from it, and so of its session. It looks at the model's class itself.
    """
    os.setsid()
    with log.open("wb") as written:
        for number in (1, 2):
            os.dup2(written.fileno(), number)
    os.environ.update(SETTINGS)
    engine: Any = import_module("vllm.v1.engine.utils")
    engine.get_mp_context = lambda: multiprocessing.get_context("fork")
    models: Any = import_module("vllm.model_executor.models.registry")
    models._run_in_subprocess = lambda look: look()
    sys.argv = ["api_server", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


@contextmanager
def _serving(folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / "server.log"
    arguments = [
        *("--model", str(folder), "--runner", "pooling", "--host", "127.0.0.1", "--port"),
        *(str(port), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"),
    ]
    start_server()
    process = ForkContext().Process(target=_serve, args=(arguments, log))
    process.start()
    try:
        ends = time.monotonic() + START_SECONDS
        while not _answers(url):
            assert process.is_alive(), log.read_text()[-2000:]
            assert time.monotonic() < ends
            time.sleep(0.5)
        yield url
    finally:
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0):  # noqa: S310 - http
            return True
    except (OSError, urllib.error.URLError):
        return False


@pytest.mark.slow
@pytest.mark.vllm
def test_vllms_scores_are_those_of_transformers(tmp_path: Path) -> None:
    model, tokenizer = save_classifier(tmp_path)
    own = [own_score(model, tokenizer, *text) for text in TEXTS]

    async def check(url: str) -> None:
        def asked(*text: str, **args: Any) -> Any:
            return reward_model(*text, {}, url=url, **args)

        assert await asyncio.gather(*(asked(*text) for text in TEXTS)) == pytest.approx(
            own, abs=1e-5
        )
        template = "<s>u:{prompt}<s>a:{response}"  # as the model's own chat template writes it
        assert await asked(*TEXTS[0], template=template) == pytest.approx(own[0], abs=1e-5)
        with pytest.raises(NoRewardError) as failed:
            await asked("x" * 70, "y")
        assert failed.value.reason == "refused"
        assert isinstance(await asked("x" * 70, "y", truncate="left"), float)
        await close_clients()
        assert await try_once({"url": url}, 60.0) is None
        assert "2 is not among the outputs" in str(await try_once({"url": url, "label": 2}, 60.0))

    with _serving(tmp_path) as url:
        asyncio.run(check(url))
