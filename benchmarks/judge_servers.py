"""The reward `judge` against a real server: what it answers, and what becomes of it.

    python -m benchmarks.judge_servers [--quick] [--json FILE]

A tiny random chat model is served by vLLM's own OpenAI-compatible server, behind a key. A
random model never judges, so scores come from constrained decoding. Then the server is asked with
a wrong key, name and address, and for too much, is suspended, and is killed while it answers. Each
line names what was done, what should come of it and what did. Exit code 1 if they differ.

--quick and --smoke change nothing: it takes a minute or two, most of it the start of the server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.errors import RewardFailed
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.pool import RewardPool
from benchmarks.harness import environment, parser_of, report, table
from benchmarks.tiny_models import qwen3

_KEY, _WRONG = "ASYNCRL_JUDGE_KEY", "ASYNCRL_JUDGE_WRONG_KEY"
_POSITIONS = 512
_START_SECONDS = 400.0
SCORE = {"structured_outputs": {"regex": "Score: [0-9]"}}
"""vLLM then writes nothing else. (SGLang: `regex`; others: `response_format`.)"""
JSON_SCORE = {"structured_outputs": {"regex": r"\{\"score\": [0-9]\}"}}
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("a random answer", "no_score", {}),
    ("a constrained answer", "scored", {"body": SCORE}),
    ("constrained JSON", "scored", {"body": JSON_SCORE, "score_field": "score"}),
    ("a score out of range", "no_score", {"body": SCORE, "minimum": 50}),
    ("a wrong key", "denied", {"api_key_env": _WRONG}),
    ("no key", "denied", {"api_key_env": None}),
    ("another model", "denied", {"model": "nobody"}),
    ("another address", "denied", {"path": ""}),
    ("a response that is too long", "refused", {"response": "x" * 2 * _POSITIONS}),
    ("too many tokens asked for", "refused", {"max_tokens": 2 * _POSITIONS}),
    ("a body that it does not know", "refused", {"body": {"response_format": {"type": "x"}}}),
)


def save_model(folder: Path) -> None:
    """A random Qwen3 with a token for each byte, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(names[:3])
    special = dict(zip(("pad_token", "bos_token", "eos_token"), names, strict=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    model = qwen3(
        len(names), 64, 2, seed=3, intermediate_size=128, num_attention_heads=2, head_dim=32,
        max_position_embeddings=_POSITIONS, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[int, str]]:
    """A server of this model: its process group and its address. Raises RuntimeError."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / "server.log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folder), "--served-model-name", "judge", "--api-key", os.environ[_KEY]),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(_POSITIONS)),
        *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"),
    ]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    settings |= {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as written:
        process = subprocess.Popen(
            command,
            stdout=written,
            stderr=written,
            env=os.environ | settings,
            start_new_session=True,
        )
    try:
        ends = time.monotonic() + _START_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > ends:
                end = log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise RuntimeError(f"the server did not start:\n{end}")
            time.sleep(0.5)
        yield process.pid, f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5.0):
            return True
    except (OSError, urllib.error.URLError):
        return False


def pool_of(address: str, *, seconds: float = 120.0, path: str = "/v1", **args: Any) -> RewardPool:
    """A judge of this server in one worker."""
    given: dict[str, Any] = {
        "base_url": f"{address}{path}",
        "model": "judge",
        "template": "Q: {prompt} A: {response}.",
        "score_pattern": None if "score_field" in args else r"Score: (\d)",
        "api_key_env": _KEY,
        "max_tokens": 32,
        **args,
    }
    known = {key: value for key, value in given.items() if value is not None}
    config = {"functions": [{"name": "judge", "args": known}], "timeout_seconds": seconds}
    return RewardPool(RewardConfig.model_validate({**config, "workers": 1}))


async def _asked(pool: RewardPool, response: str = "5") -> tuple[str, str]:
    """The reason of the failure, or `scored`; and what was said."""
    try:
        reward = await pool.score("2+3", response, {"answer": "5"})
    except RewardFailed as error:
        return error.reason, str(error).splitlines()[-1]
    return "scored", f"{reward.value:g}"


async def _case(address: str, args: dict[str, Any]) -> tuple[str, str]:
    given = dict(args)
    response = given.pop("response", "5")
    pool = pool_of(address, **given)
    await pool.start()
    try:
        return await _asked(pool, response)
    finally:
        await pool.close()


async def examine(group: int, address: str) -> list[dict[str, str]]:
    """All cases; the last ones suspend the server and kill it."""
    found = []

    def note(case: str, wanted: str, got: str, said: str) -> None:
        found.append({"case": case, "wanted": wanted, "got": got, "said": said})

    for case, wanted, args in CASES:
        note(case, wanted, *await _case(address, args))
    patient = pool_of(address, body=SCORE)
    hasty = pool_of(address, body=SCORE, seconds=2.0, breaker_failures=2, breaker_seconds=0.5)
    await patient.start()
    await hasty.start()
    try:
        many = await asyncio.gather(*(_asked(patient) for _ in range(64)))
        note("64 at once", "scored", _in_words(many), "")
        os.killpg(group, signal.SIGSTOP)
        stopped = [await _asked(hasty) for _ in range(3)]
        os.killpg(group, signal.SIGCONT)
        note("suspended", "timeout, timeout, breaker_open", _in_order(stopped), stopped[0][1])
        await asyncio.sleep(1.0)
        note("it continues", "scored", *await _asked(hasty))
        asking = [asyncio.create_task(_asked(patient)) for _ in range(64)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        os.killpg(group, signal.SIGKILL)
        killed = await asyncio.gather(*asking)
        kinds = {reason for reason, _ in killed} - {"scored", "breaker_open"}
        note("killed while it answers", "unavailable", ", ".join(kinds), killed[-1][1])
    finally:
        await patient.close()
        await hasty.close()
    return found


def _in_order(answers: Sequence[tuple[str, str]]) -> str:
    return ", ".join(reason for reason, _ in answers)


def _in_words(answers: Sequence[tuple[str, str]]) -> str:
    return ", ".join(sorted({reason for reason, _ in answers}))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_of(__doc__, "changes nothing").parse_args(arguments)
    keys = environment(**{_KEY: "sk-right", _WRONG: "sk-wrong"})
    with tempfile.TemporaryDirectory(prefix="judge-") as folder, keys:
        save_model(Path(folder))
        with serving(Path(folder)) as (group, address):
            found = asyncio.run(examine(group, address))
    wrong = [one["case"] for one in found if one["wanted"] != one["got"]]
    rows = ((one["case"], one["wanted"], one["got"], one["said"][:160]) for one in found)
    shown = table(f"wrong: {wrong or 'none'}", "what was done,should be,was,said", rows)
    share = {"wrong_share": len(wrong) / len(found)}
    report(options, "judge_servers", {"cases": found}, share, shown)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
