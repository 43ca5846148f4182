"""KV computed by old weights is never reused by requests that come after an update.

Real engines with their prefix cache on. The prompt of 300 tokens fills more than two of vLLM's
blocks (128 tokens on a CPU), and the log-probabilities of the two policies differ by nats. Every
request after an update, generated, scored or verified, must agree with Hugging Face under the new
weights, also while requests of the old ones still hold and extend their blocks. Each check also
shows that the cache is in use, and `test_one_salt_for_all_versions_is_seen` shows that these checks
can fail.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from new_weights import give_weights
from served_engine import (
    TOP_K,
    VOCAB,
    Served,
    ask,
    collect,
    drawn,
    drawn_across,
    kept_of,
    logprobs_of,
    tokens_of,
)

from asyncrl.engine.protocol import SamplingParams, ScoreRequest, TokenChunk
from asyncrl.rollout.trajectory import KeptTokens, Provenance

CLOSE = 1e-3
PROMPT = np.random.default_rng(7).integers(0, VOCAB, 300).astype(np.int32)


def found(served: Served) -> int:
    """Prompt tokens whose KV was taken from the prefix cache, since start."""
    return served.meter.prefix_found


def reused(served: Served) -> int:
    """Tokens of the prompt that are found again; the state after its last one is not kept."""
    return served.whole_blocks(len(PROMPT) - 1)


def asked(name: str, **changes: Any) -> Any:
    return ask(name, **({"prompt_tokens": PROMPT, "max_tokens": 20} | changes))


def generate(served: Served, name: str, **changes: Any) -> list[TokenChunk]:
    return served.call(collect(served.engine, asked(name, **changes)))


def score_request(tokens: np.ndarray) -> ScoreRequest:
    return ScoreRequest("s", PROMPT, tokens, SamplingParams(1, top_k_logprobs=TOP_K))


def error(model: Any, tokens: np.ndarray, logprobs: np.ndarray) -> float:
    return float(np.abs(drawn(model, PROMPT, tokens) - logprobs).max())


def check(right: Any, wrong: Any, chunks: list[TokenChunk]) -> None:
    """They follow `right`, and differ clearly from `wrong`."""
    tokens, logprobs = tokens_of(chunks), logprobs_of(chunks)
    assert error(right, tokens, logprobs) < CLOSE
    assert error(wrong, tokens, logprobs) > 0.1


def test_requests_after_an_update_follow_the_new_weights(served: Served) -> None:
    served.install(served.old)
    before = found(served)
    first = generate(served, "a")
    assert found(served) == before, "nothing of this version was there"
    check(served.old, served.new, first)
    check(served.old, served.new, generate(served, "b"))
    assert found(served) == before + reused(served), "the prefix cache is not in use"

    served.install(served.new)
    before = found(served)
    (score,) = served.call(served.engine.score([score_request(tokens_of(first))]))
    assert found(served) == before
    assert error(served.new, tokens_of(first), score.logprobs) < CLOSE
    check(served.new, served.old, generate(served, "c"))
    assert found(served) == before + reused(served)
    check(served.new, served.old, generate(served, "d", kept=kept_of(first)))

    served.install(served.old)  # the same weights as at first, but another version
    before = found(served)
    check(served.old, served.new, generate(served, "e"))
    assert found(served) == before


def test_verification_comes_first_after_an_update(served: Served) -> None:
    """Its prefill is the first of the version, for prompt and kept tokens alike."""
    served.install(served.old)
    text = generate(served, "v", max_tokens=90, seed=1)
    again = generate(served, "w", max_tokens=90, seed=1)
    assert tokens_of(text).tolist() == tokens_of(again).tolist()
    served.install(served.new)
    before = found(served)
    done = generate(served, "x", max_tokens=90, seed=2, kept=kept_of(text))
    accepted = int((np.concatenate([c.provenance for c in done]) == Provenance.VERIFIED).sum())
    assert accepted < 90
    check(served.new, served.old, done)
    # What follows the verified prefix found the KV that verification made, and no other.
    assert found(served) - before >= reused(served)


async def _update_under(served: Served, version: int) -> dict[str, Any]:
    """Requests run across an update, and others come after it while the first still run."""
    engine = served.engine
    seen = asyncio.Event()

    async def running(name: str) -> list[TokenChunk]:
        chunks = []
        async for chunk in engine.generate(asked(name, max_tokens=95, seed=len(name))):
            chunks.append(chunk)
            seen.set()
        return chunks

    old = [asyncio.create_task(running("r" * (i + 1))) for i in range(4)]
    await seen.wait()
    await engine.pause()
    await give_weights(engine, served.new.state_dict().items(), version)
    late = {
        "new": asyncio.create_task(collect(engine, asked("n", max_tokens=30))),
        "kept": asyncio.create_task(
            collect(engine, asked("k", max_tokens=60, kept=_TEXT["kept"], seed=11))
        ),
    }
    await engine.resume()
    (score,) = await engine.score([score_request(_TEXT["kept"].tokens)])
    still = sum(not task.done() for task in old)
    out = {name: await task for name, task in late.items()}
    after = await asyncio.gather(*old)
    last = await collect(engine, asked("l", max_tokens=30))
    return out | {"score": score, "old": after, "last": last, "still": still}


_TEXT: dict[str, KeptTokens] = {}


def test_requests_after_an_update_while_older_ones_still_run(served: Served) -> None:
    for attempt in range(5):  # on a busy machine the old requests may end before the update
        served.install(served.old)
        _TEXT["kept"] = kept_of(generate(served, f"text{attempt}", max_tokens=60, seed=10))
        out = served.call(_update_under(served, served.engine.stats().policy_version + 1))
        if out["still"] > 0:
            break
    assert out["still"] > 0, "the old requests had ended before anything else was asked for"
    check(served.new, served.old, out["new"])
    check(served.new, served.old, out["kept"])
    check(served.new, served.old, out["last"])
    assert error(served.new, _TEXT["kept"].tokens, out["score"].logprobs) < CLOSE
    crossed = 0
    for chunks in out["old"]:
        swap = sum(len(c.tokens) for c in chunks if c.policy_version == chunks[0].policy_version)
        tokens = tokens_of(chunks)
        if swap < len(tokens):
            # By design they continue with the KV that they have.
            want = drawn_across(served.old, served.new, PROMPT, tokens, swap)
            np.testing.assert_allclose(logprobs_of(chunks), want, atol=CLOSE)
            assert error(served.new, tokens, logprobs_of(chunks)) > 0.01
            crossed += 1
    assert crossed > 0


def test_one_salt_for_all_versions_is_seen(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that forgets the version fails the checks above."""
    monkeypatch.setattr(type(served.core), "_salt", lambda _: "any")
    served.install(served.old)
    text = generate(served, "before", max_tokens=60)
    served.install(served.new)
    stale = generate(served, "after")
    assert error(served.new, tokens_of(stale), logprobs_of(stale)) > CLOSE
    # A prompt is scored without reading the cache; generation after it reads the cache.
    rest = generate(served, "rest", max_tokens=60, kept=kept_of(text))
    assert error(served.new, tokens_of(rest), logprobs_of(rest)) > CLOSE
