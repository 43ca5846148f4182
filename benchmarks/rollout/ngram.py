"""SGLang's own NGRAM drafter as a contestant: SGLang's `Engine`, in its own interpreter.

Our scheduler cannot run it: NGRAM verifies drafts with SGLang's kernels, so neither our draws nor
our tables are in its steps. It needs a GPU: its kernels are in `sgl_kernel`, and on a CPU it
commits the argmax at any temperature. It pads trees with equal siblings, which biases what it
samples, so its texts are not those of the other contestants; only its speed is compared.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError, EngineStartError
from asyncrl.engine.protocol import GenerateRequest, TokenChunk
from asyncrl.engine.sglang.interpreter import path_of
from asyncrl.wire.records.step import EngineStats, TokenCounts
from asyncrl.wire.weights.layout import WeightManifest

_ASK = """
import torch
if not torch.cuda.is_available():
    raise SystemExit("it needs a GPU: on a CPU it commits the argmax at any temperature")
import sgl_kernel
"""
_ASK_SECONDS, _START_SECONDS, _CALL_SECONDS = 120.0, 900.0, 300.0


def refusal(config: EngineConfig) -> str | None:
    """Why SGLang's NGRAM cannot run here; None: it can."""
    try:
        asked = subprocess.run(
            [path_of(config.sglang), "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not asked.returncode:
        return None
    return (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]


def command_of(config: EngineConfig, model: str, draft_tokens: int) -> list[str]:
    """The command that serves a model with NGRAM."""
    arguments = {
        "model_path": model,
        "dtype": "bfloat16" if config.dtype == "auto" else config.dtype,
        "context_length": config.max_model_len + draft_tokens + 16,
        "max_running_requests": config.slots,
        "mem_fraction_static": config.sglang.share_of_gpu,
        "speculative_num_draft_tokens": draft_tokens + 1,
        "log_level": "error",
    }
    module = "benchmarks.rollout.ngram_server"
    return [path_of(config.sglang), "-m", module, json.dumps(arguments)]


class NgramEngine:
    """The part of `asyncrl.engine.protocol.Engine` that `benchmarks.rollout.passes` uses."""

    def __init__(self, command: Sequence[str], later: Path, draft_tokens: int) -> None:
        self._command = list(command)
        self._later = later
        self._draft_tokens = draft_tokens
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._names = (str(number) for number in itertools.count())
        self._stats = EngineStats()

    async def start(self) -> None:
        root = str(Path(__file__).parents[2])
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": root},
            limit=1 << 24,
        )
        ready = self._expect("ready")
        self._reader = asyncio.create_task(self._read())
        try:
            await asyncio.wait_for(ready, _START_SECONDS)
        except (EngineError, TimeoutError) as error:
            raise EngineStartError(f"SGLang with NGRAM did not start: {error}") from error

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """The whole response, whose tokens mean nothing: only their number is known."""
        name, sampling = next(self._names), request.sampling
        answer = await self._ask(
            name,
            {
                "id": name,
                "input_ids": request.prompt_tokens.tolist(),
                "sampling_params": {
                    "temperature": sampling.temperature,
                    "max_new_tokens": sampling.max_tokens,
                    "stop_token_ids": list(sampling.stop_tokens),
                },
            },
        )
        stats, verified = self._stats, int(answer["verified"])
        counts = TokenCounts(
            generated=stats.tokens.generated + answer["tokens"],
            drafted=stats.tokens.drafted + verified * self._draft_tokens,
            accepted=stats.tokens.accepted + int(answer["correct"]),
        )
        self._stats = EngineStats(tokens=counts, steps=stats.steps + verified)
        n = int(answer["tokens"])
        yield TokenChunk(
            request_id=request.request_id,
            tokens=np.zeros(n, np.int32),
            logprobs=np.zeros(n, np.float32),
            topk_ids=np.empty((n, 0), np.int32),
            topk_logprobs=np.empty((n, 0), np.float32),
            noise_seeds=np.zeros(n, np.uint64),
            provenance=np.zeros(n, np.uint8),
            policy_version=0,
            finish_reason="stop",
        )

    async def stage_weights(self, manifest: WeightManifest) -> None:
        """Nothing: SGLang loads files."""

    async def install_weights(self, policy_version: int) -> None:  # noqa: ARG002
        """Load the later weights; NGRAM keeps what it has seen. Raises EngineError."""
        answer = await self._ask("weights", {"weights": str(self._later)})
        if not answer["weights"]:
            raise EngineError(f"SGLang with NGRAM did not load {self._later}: {answer['error']}")

    def stats(self) -> EngineStats:
        """Counts of ended requests. A step of n rows counts as n."""
        return self._stats

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 30.0)
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._reader is not None:
            await self._reader

    def _expect(self, name: str) -> asyncio.Future[dict[str, Any]]:
        found: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[name] = found
        return found

    async def _ask(self, name: str, message: dict[str, Any]) -> dict[str, Any]:
        if self._process is None or self._process.stdin is None:
            raise EngineError("SGLang with NGRAM is not running")
        answer = self._expect(name)
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        return await asyncio.wait_for(answer, _CALL_SECONDS)

    async def _read(self) -> None:
        """Hand answers out until the process ends."""
        process = self._process
        if process is None or process.stdout is None:
            return
        while line := await process.stdout.readline():
            answer = json.loads(line)
            name = answer.get("id") or next(key for key in ("ready", "weights") if key in answer)
            waiting = self._answers.pop(name, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        ended = EngineError("SGLang with NGRAM has ended; its errors are on stderr")
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(ended)
        self._answers.clear()
