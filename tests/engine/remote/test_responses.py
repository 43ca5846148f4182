"""Steps of a core on their way to chunks."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import GenerateRequest, SamplingParams, TokenChunk
from asyncrl.engine.remote.client.responses import AbortedError, Inbox, Response, Responses
from asyncrl.engine.remote.client.unreported import NO_ROW
from asyncrl.engine.remote.extras import NO_TICKET, StepTable
from asyncrl.engine.sampling.drawing import noise_seeds
from asyncrl.engine.sampling.stopping import StopRule
from asyncrl.rollout.trajectory import Provenance

K = 2
SAMPLED, DRAFTED = int(Provenance.SAMPLED), int(Provenance.DRAFTED)


class Engine:
    """Steps of all responses together, as the core would send them."""

    def __init__(self, chunk_tokens: int = 100, k: int = K) -> None:
        self.responses = Responses(chunk_tokens)
        self.k = k
        self.place = 0

    def ask(self, name: str = "r", prefix: tuple[int, ...] = (), **sampling: Any) -> Response:
        params = SamplingParams(**{"max_tokens": 99, "top_k_logprobs": self.k} | sampling)
        request = GenerateRequest(
            name, "", np.array([1], np.int32), params, np.array(prefix, np.int32)
        )
        return Response(request, 7, self.responses)

    def step(self, *given: tuple[Response, list[int]], version: int = 0) -> None:
        """Every response gets its tokens. Between any two of them lies a row that nobody gets."""
        tickets, tokens = [NO_TICKET], [-5]
        for response, drawn in given:
            tickets += [*[response.ticket] * len(drawn), NO_TICKET]
            tokens += [*drawn, -5]
        ids = np.array([[token, 100 + token, 200 + token][: 1 + self.k] for token in tokens])
        logprobs = -0.01 * np.abs(ids) - 0.001 * np.arange(len(ids))[:, None]
        table = StepTable(
            ids.astype(np.int32), logprobs.astype(np.float32), np.array(tickets, np.int64)
        )
        for array in table:
            array.setflags(write=False)  # as when they are received
        self.responses.record(table, version)
        self.responses.report_due()


def waiting(inbox: Inbox[TokenChunk]) -> list[TokenChunk]:
    async def take() -> list[TokenChunk]:
        return await asyncio.wait_for(inbox.take(), 1)

    return asyncio.run(take()) if inbox._items else []


def tokens_of(chunks: list[TokenChunk]) -> list[list[int]]:
    return [chunk.tokens.tolist() for chunk in chunks]


def joined(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens.tolist()]


@pytest.mark.parametrize("drafts", [False, True])
def test_each_response_gets_its_own_tokens_wherever_they_lie(drafts: bool) -> None:
    """40 responses, more than there are rows at first; rows are used again."""
    engine, rng = Engine(chunk_tokens=5), np.random.default_rng(drafts)
    expected: dict[str, list[int]] = {}
    got: dict[str, list[TokenChunk]] = {}
    running: list[Response] = []
    for step in range(60):
        if len(running) < 40:
            running += [engine.ask(f"r{step}.{i}") for i in range(4)]
        rng.shuffle(running)
        part = running[: rng.integers(1, len(running) + 1)]  # the others are preempted
        given = []
        for response in part:
            drawn = rng.integers(0, 90, rng.integers(1, 4) if drafts else 1).tolist()
            expected.setdefault(response.request.request_id, []).extend(drawn)
            given.append((response, drawn))
        engine.step(*given)
        for response in part[::7]:
            engine.responses.end(response, "length")
            running.remove(response)
        for response, _ in given:
            got.setdefault(response.request.request_id, []).extend(waiting(response))
    engine.responses.flush()
    for response in running:
        got.setdefault(response.request.request_id, []).extend(waiting(response))
    for name, tokens in expected.items():
        assert joined(got[name]) == tokens
        ids = np.concatenate([chunk.topk_ids for chunk in got[name]])
        assert (ids == np.add.outer(tokens, [100, 200])).all()
        for chunk in got[name]:
            values = np.concatenate([chunk.logprobs[:, None], chunk.topk_logprobs], axis=1)
            table = np.concatenate([chunk.tokens[:, None], chunk.topk_ids], axis=1)
            offsets = values + 0.01 * table  # the row of the step's table that it came from
            np.testing.assert_allclose(offsets, offsets[:, :1].repeat(1 + K, axis=1), atol=1e-5)
    assert engine.responses.tokens == sum(map(len, expected.values()))


def test_a_row_that_is_full_when_it_is_preempted_has_room_when_it_resumes() -> None:
    engine = Engine()
    full, other = engine.ask("full"), engine.ask("other")
    for i in range(16):  # the first is reported at once; the arrays grow by doubling, to 16
        engine.step((full, [i]))
    engine.step((other, [0]))
    engine.step((full, [16, 17, 18]))
    engine.responses.flush()
    assert joined(waiting(full)) == list(range(19))


def test_a_chunk_never_spans_two_versions() -> None:
    engine = Engine()
    response = engine.ask()
    for tokens, version in (([1], 3), ([2, 3], 3), ([4], 3), ([5], 4)):
        engine.step((response, tokens), version=version)
    engine.responses.end(response, "length")
    chunks = waiting(response)
    assert [(c.tokens.tolist(), c.policy_version, c.finish_reason) for c in chunks] == [
        ([1], 3, None),
        ([2, 3, 4], 3, None),
        ([5], 4, "length"),
    ]


@pytest.mark.parametrize(
    ("accepted", "last"), [(3, SAMPLED), (4, DRAFTED), (9, DRAFTED), (None, SAMPLED)]
)
def test_the_last_step_may_end_within_its_drafts(accepted: int | None, last: int) -> None:
    engine = Engine()
    response = engine.ask()
    for n in (1, 3, 2):
        engine.step((response, list(range(n))))
    engine.responses.end(response, "stop", accepted)
    provenance = np.concatenate([chunk.provenance for chunk in waiting(response)])
    assert provenance.tolist() == [SAMPLED, DRAFTED, DRAFTED, SAMPLED, DRAFTED, last]


def test_a_response_ends_where_a_stop_string_is_complete() -> None:
    """It resumes after a token that begins the string. Another one has other strings."""
    pieces = [b"c", b"", b"", b"de", b"b", b"", b"x"]
    rule, other = StopRule.of(["bcd"], pieces), StopRule.of(["xx"], pieces)
    engine = Engine()
    plain, stops, late = (
        engine.ask("plain"),
        engine.ask("stops", prefix=(4,), stop_rule=rule),
        engine.ask("late", stop_rule=other),
    )
    engine.step((plain, [0, 3]), (stops, [0, 3, 6]), (late, [6]))
    (chunk,) = waiting(stops)
    assert (chunk.tokens.tolist(), chunk.finish_reason) == ([0, 3], "stop")
    assert chunk.provenance.tolist() == [DRAFTED, DRAFTED], "the free draw was cut off"
    engine.step((stops, [0]), (plain, [3]), (late, [0, 6]))  # the core was not told yet
    engine.step((late, [6]), (plain, [0]))
    assert waiting(stops) == []
    assert tokens_of(waiting(late)) == [[6], [0, 6, 6]]
    engine.responses.flush()
    assert joined(waiting(plain)) == [0, 3, 3, 0]
    assert stops.over
    assert late.over
    assert not plain.over


def test_noise_is_keyed_by_the_version_that_drew_the_token() -> None:
    engine = Engine()
    response = engine.ask()
    for version in (3, 3, 4):
        engine.step((response, [1]), version=version)
    engine.responses.end(response, "length")
    got = [chunk.noise_seeds.tolist() for chunk in waiting(response)]
    seed = np.array([7], np.uint64)
    of_3, of_4 = (noise_seeds(seed, version).tolist() for version in (3, 4))
    assert got == [of_3, of_3, of_4]
    assert of_3 != of_4


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_a_response_may_want_fewer_of_the_most_probable(wanted: int) -> None:
    """Then it may run in steps whose table is narrow, next to ones with wider tables."""
    engine = Engine(k=0 if wanted == 0 else K)
    response, wide = (
        engine.ask("narrow", top_k_logprobs=wanted),
        engine.ask("wide", top_k_logprobs=K),
    )
    engine.step((response, [1]))
    engine.k = K
    engine.step((wide, [7]), (response, [2]))
    engine.responses.end(response, "length")
    chunks = waiting(response)
    assert [chunk.topk_ids.shape for chunk in chunks] == [(1, wanted), (1, wanted)]
    assert chunks[1].topk_ids.tolist() == [[102, 202][:wanted]]
    assert waiting(wide)[0].topk_ids.tolist() == [[107, 207]]


def test_chunks_are_reported_at_once_then_when_long_enough_then_at_a_flush() -> None:
    engine = Engine(chunk_tokens=3)
    response = engine.ask()
    engine.step((response, [1]))
    assert tokens_of(waiting(response)) == [[1]]
    engine.step((response, [2]))
    assert waiting(response) == []
    engine.responses.flush()
    assert tokens_of(waiting(response)) == [[2]]
    engine.step((response, [3]))
    engine.step((response, [4]))
    assert waiting(response) == []
    engine.step((response, [5, 6]))
    assert tokens_of(waiting(response)) == [[3, 4, 5, 6]]
    engine.responses.flush()
    assert waiting(response) == [], "no empty chunks"


def test_a_cut_hands_over_what_has_come_and_nothing_later() -> None:
    """Where it lies must not depend on what follows: an end that comes later is dropped too."""
    engine = Engine()
    response = engine.ask()
    engine.step((response, [1]))
    engine.step((response, [2]))
    response.put(None)
    assert response.row == NO_ROW
    engine.step((response, [3]))
    engine.responses.end(response, "stop")
    assert tokens_of(waiting(response)) == [[1], [2]]
    for _ in range(2):
        with pytest.raises(AbortedError):
            asyncio.run(response.take())
    assert not response.over


def test_what_is_cut_before_its_first_step_gets_nothing() -> None:
    """The core may have begun it already."""
    engine = Engine()
    response, other = engine.ask("cut"), engine.ask("other")
    response.put(None)
    engine.step((response, [1, 2]), (other, [3]))
    engine.responses.flush()
    assert waiting(response) == []
    assert tokens_of(waiting(other)) == [[3]]
    assert engine.responses.tokens == 1


def test_an_error_comes_after_the_tokens() -> None:
    engine = Engine()
    response = engine.ask()
    engine.step((response, [1]))
    engine.step((response, [2]))
    response.put(EngineError("gone"))
    assert tokens_of(waiting(response)) == [[1], [2]]
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(response.take())


def test_a_distribution_that_is_nan_fails_its_response_only() -> None:
    engine = Engine()
    bad, good = engine.ask("bad"), engine.ask("good")
    logprobs = np.array([[np.nan] * 3, [-1.0] * 3], np.float32)
    tickets = np.array([bad.ticket, good.ticket])
    engine.responses.record(StepTable(np.zeros((2, 3), np.int32), logprobs, tickets), 0)
    engine.responses.report_due()
    with pytest.raises(EngineError, match=r"'bad'.*not finite"):
        asyncio.run(bad.take())
    engine.step((bad, [1]), (good, [1]))
    engine.responses.flush()
    assert tokens_of(waiting(good)) == [[0], [1]]


def test_what_comes_after_an_end_is_dropped() -> None:
    """Scores that arrive after their request was interrupted or has failed, before it is read."""
    for end, error in ((None, AbortedError), (EngineError("the core is gone"), EngineError)):
        inbox: Inbox[int] = Inbox()
        inbox.put(end)
        inbox.push(1, last=True)
        assert not inbox.over
        with pytest.raises(error):
            asyncio.run(inbox.take())
    over: Inbox[int] = Inbox()
    over.push(1, last=True)
    over.push(2)
    assert asyncio.run(over.take()) == [1]


def test_a_reader_waits_for_an_item_or_the_end() -> None:
    async def scene() -> None:
        inbox: Inbox[int] = Inbox()
        taker = asyncio.ensure_future(inbox.take())
        done, _ = await asyncio.wait([taker], timeout=0.01)
        assert not done
        assert not inbox.started
        inbox.push(1)
        inbox.push(2)
        assert await taker == [1, 2]
        inbox.push(3, last=True)
        inbox.put(None)  # vLLM's own abort of what has ended
        assert not inbox.over
        assert await inbox.take() == [3]
        assert inbox.over
        aborted: Inbox[int] = Inbox()
        aborted.put(object())
        assert aborted.started, "new weights would begin it again"
        with pytest.raises(AbortedError):
            await aborted.take()

    asyncio.run(scene())
