"""Stop strings on real engines, which know nothing of them: see `client.responses`.

A token depends on the request's seed and place only, so a response with stop strings is the one
without them, cut where the text has one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from served_engine import (
    SLOTS,
    VOCAB,
    Served,
    ask,
    collect_all,
    kept_of,
    provenance_of,
    tokens_of,
)
from stop_strings import end_by_looking

from asyncrl.engine.protocol import GenerateRequest, TokenChunk
from asyncrl.engine.sampling.stopping import StopRule
from asyncrl.rollout.trajectory import Provenance

PIECES = [b"a", b"b", b"ab", b"ba", b"", b"b\xc3", b"\xa9a", b"aa"]
STRINGS = ("bba", "éa")
RULE = StopRule.of(STRINGS, PIECES)
COUNT, MAX_TOKENS = 48, 60
assert len(PIECES) == VOCAB


def asked(name: str, i: int, **changes: object) -> GenerateRequest:
    """Whatever it draws is among the 4 tokens that are stored, so verification keeps it."""
    settings = {"cache_key": "strings", "seed": i, "max_tokens": MAX_TOKENS, "stop_rule": RULE}
    settings["top_k"] = 4
    return ask(f"{name}{i}", **(settings | changes))


def end_of(tokens: Sequence[int]) -> int | None:
    return end_by_looking(tokens, PIECES, STRINGS)


def test_responses_end_at_their_strings_generated_resumed_and_verified(served: Served) -> None:
    served.install(served.new)
    engine = served.engine
    plain = [asked("plain", i, stop_rule=None) for i in range(COUNT)]
    whole = served.call(collect_all(engine, plain))
    ends = [end_of(tokens_of(chunks).tolist()) for chunks in whole]
    assert COUNT / 4 < sum(end is not None for end in ends) < COUNT
    before = engine.stats().tokens.generated
    stopping = served.call(collect_all(engine, [asked("stop", i) for i in range(COUNT)]))
    lengths = sum(end or MAX_TOKENS for end in ends)
    assert engine.stats().tokens.generated - before == lengths, "tokens after an end do not count"
    kept = served.call(
        collect_all(
            engine,
            [asked("kept", i, seed=(1 << 40) + i, kept=kept_of(c)) for i, c in enumerate(whole)],
        )
    )
    half = [tokens_of(chunks)[: (end or 20) - 1] for chunks, end in zip(whole, ends, strict=True)]
    rest = served.call(
        collect_all(engine, [asked("rest", i, prefix_tokens=p) for i, p in enumerate(half)])
    )
    drafted = 0
    for i, end in enumerate(ends):
        want = tokens_of(whole[i])[:end]
        reason = "length" if end is None else "stop"
        np.testing.assert_array_equal(tokens_of(stopping[i]), want)
        np.testing.assert_array_equal(np.concatenate([half[i], tokens_of(rest[i])]), want)
        assert stopping[i][-1].finish_reason == rest[i][-1].finish_reason == reason
        drafted += int((provenance_of(stopping[i]) == Provenance.DRAFTED).sum())
        np.testing.assert_array_equal(tokens_of(kept[i]), want)
        assert (provenance_of(kept[i]) == Provenance.VERIFIED).all()
        assert kept[i][-1].finish_reason == reason
    assert drafted > COUNT
    assert engine.stats().running + engine.stats().waiting == 0


def test_an_interruption_after_the_end_reports_the_end(served: Served) -> None:
    """However many tokens were drawn since: the sample must not continue after its string."""
    served.install(served.new)
    engine = served.engine

    async def cut() -> list[list[TokenChunk]]:
        async def one(request: GenerateRequest, steps: int) -> list[TokenChunk]:
            chunks = []
            async for chunk in engine.generate(request):
                chunks.append(chunk)
                if sum(len(c.tokens) for c in chunks) >= steps and chunk.finish_reason is None:
                    engine.interrupt(request.request_id)
            return chunks

        return list(await asyncio.gather(*(one(asked("cut", i), 1 + 2 * i) for i in range(SLOTS))))

    whole = served.call(collect_all(engine, [asked("w", i, stop_rule=None) for i in range(SLOTS)]))
    for i, chunks in enumerate(served.call(cut())):
        tokens, reference = tokens_of(chunks), tokens_of(whole[i])
        end = end_of(reference.tolist())
        np.testing.assert_array_equal(tokens, reference[: len(tokens)])
        if end is not None and len(tokens) >= end:
            assert (len(tokens), chunks[-1].finish_reason) == (end, "stop")
        else:
            assert chunks[-1].finish_reason == ("length" if len(tokens) == MAX_TOKENS else "abort")
