"""What SGLang's scheduler reports of its steps: which tokens, for whom, in how many messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_clock import FakeClock

from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.remote.extras import NO_TICKET, RequestExtra, StepTable
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.sampling.drawing import Streams, noise_seeds
from asyncrl.engine.sampling.logits import draw_from_logits
from asyncrl.engine.sglang.messages import AddRequest, End, Gauges, Outputs
from asyncrl.engine.sglang.worker.drawing import StepDrawing
from asyncrl.engine.sglang.worker.requests import Requests, SchedulerBatch, entry_of
from asyncrl.engine.sglang.worker.steps import Outbox, Places, Reporting, StepOutput

VOCAB, K = 20, 3


class Scene:
    """Requests, a batch and an outbox whose messages are kept."""

    def __init__(self, steps_per_message: int = 1) -> None:
        self.clock = FakeClock()
        self.sent: list[Outputs] = []
        self.requests = Requests()
        self.outbox = Outbox(self.sent.append, Gauges, steps_per_message, self.clock)
        self.reporting = Reporting(self.requests, self.outbox)
        self.batch = SchedulerBatch(self.requests, K)

    def add(self, name: str, ticket: int, **fields: Any) -> AddRequest:
        extra = RequestExtra(seed=ticket * 7, ticket=ticket, top_k_logprobs=K, **fields)
        tokens = np.arange(5, dtype="<i4").tobytes()
        one = AddRequest(name, tokens, 9, 0.7, 1.0, [4], 0, "salt", extra.to_plain())
        self.requests.add(name, entry_of(one))
        return one

    def begin(self, names: list[str], lengths: list[int]) -> None:
        """The batch that SGLang runs next."""
        reqs = [SimpleNamespace(rid=name) for name in names]
        self.batch.begin(SimpleNamespace(reqs=reqs, seq_lens_cpu=torch.tensor(lengths)))

    def table(self, counts: list[int | None], starts: list[int], names: list[str]) -> StepTable:
        """What is reported of a table with a token of its own at each place."""
        size = 10
        tickets = np.array([self.requests.entries[name].extra.ticket for name in names], np.int64)
        output = StepOutput(
            torch.arange(size * 2).view(size, 2).int(),
            torch.arange(size * 2).view(size, 2).float(),
            Places(names, tickets, np.array(starts)),
            5,
            self.reporting,
        )
        commits = [
            None if count is None else SimpleNamespace(token_ids=(0,) * count) for count in counts
        ]
        output.copy_to_host(torch.clone).consume(None, commits)
        self.outbox.end_step()
        (step,) = self.sent[-1].steps
        assert step.policy_version == 5
        rows = len(step.tickets) // 8
        return StepTable(
            np.frombuffer(step.ids, "<i4").reshape(rows, step.width),
            np.frombuffer(step.logprobs, "<f4").reshape(rows, step.width),
            np.frombuffer(step.tickets, "<i8"),
        )


def test_a_message_says_all_of_its_request() -> None:
    scene = Scene()
    entry = entry_of(scene.add("a", 3, generated=2, top_k=6, min_p=0.1, cache_key="tree"))
    assert entry.context.tolist() == [0, 1, 2, 3, 4]
    assert (entry.start, entry.limit, entry.stop_tokens) == (3, 14, (4,))
    assert entry.sampling == SamplingParams(9, temperature=0.7, top_p=1.0, top_k=6, min_p=0.1)
    assert entry.extra.cache_key == "tree"


def test_only_tokens_that_stay_are_reported_for_those_who_still_run() -> None:
    """A prompt that is not all in, drafts cut off, an interrupted request, a scoring request."""
    scene = Scene()
    names = ["a", "b", "c", "d", "e"]
    for ticket, name in enumerate(names, 1):
        scene.add(name, NO_TICKET if name == "e" else ticket)
    assert scene.requests.interrupt("c")
    table = scene.table([2, None, 1, 3, 1], [0, 3, 4, 5, 8], names)
    assert table.tickets.tolist() == [1, 1, 4, 4, 4]
    assert table.ids[:, 0].tolist() == [0, 2, 10, 12, 14]
    assert table.logprobs[:, 1].tolist() == [1, 3, 11, 13, 15]


def test_a_step_without_tokens_is_not_sent() -> None:
    scene = Scene()
    scene.add("a", 1)
    with pytest.raises(IndexError):
        scene.table([None], [0], ["a"])
    assert not scene.sent


def test_an_end_is_sent_once() -> None:
    scene = Scene()
    for name in ("a", "b"):
        scene.add(name, 1)
    assert scene.requests.interrupt("a")
    assert not scene.requests.interrupt("a")
    assert not scene.requests.interrupt("never sent")
    assert not scene.requests.serves("a")
    assert not scene.requests.forget("a")  # SGLang is done with it later
    assert scene.requests.forget("b")
    assert not scene.requests.forget("b")
    assert not scene.requests.entries


def test_steps_share_a_message_until_it_is_full_or_old() -> None:
    scene = Scene(steps_per_message=3)
    table = StepTable(np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32), np.array([1]))

    def step() -> int:
        scene.outbox.add_step(table, 1)
        scene.outbox.end_step()
        return len(scene.sent)

    assert [step() for _ in range(7)] == [0, 0, 1, 1, 1, 2, 2]
    scene.clock.now = 0.1
    assert step() == 3
    assert [len(one.steps) for one in scene.sent] == [3, 3, 2]
    step()
    scene.outbox.add_end(End("a", "stop"))
    scene.outbox.flush()
    scene.outbox.flush()  # nothing is left
    assert len(scene.sent) == 4
    assert (len(scene.sent[-1].steps), scene.sent[-1].ends) == (1, [End("a", "stop")])
    assert scene.outbox.steps == 9


def test_scores_are_not_kept_waiting() -> None:
    scene = Scene(steps_per_message=100)
    scene.outbox.add_scored("a", np.ones((2, 3), np.int32), np.ones((2, 3), np.float32), 7)
    scene.outbox.end_step()
    (message,) = scene.sent
    (scored,) = message.scored
    assert (scored.request_id, scored.policy_version, scored.width) == ("a", 7, 3)
    assert np.frombuffer(scored.ids, "<i4").tolist() == [1] * 6


def test_draws_depend_on_seed_place_and_version_alone() -> None:
    """Whatever the row: the place is counted from where the response starts."""
    scene = Scene()
    scene.add("a", 1, generated=2)
    scene.add("b", 2)
    scene.batch.advance(4)
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(2, VOCAB))).float()
    draw = StepDrawing(scene.batch, Ranks(), scene.reporting, 1 << 20)
    scene.begin(["b", "a"], [9, 6])
    tokens, output = draw(logits.clone())
    seeds = np.array([14, 7], np.uint64)
    expected = draw_from_logits(
        logits.clone(),
        scene.batch.sampling,
        K,
        Streams(seeds, np.array([4, 3]), noise_seeds(seeds, 4)),
        max_bytes=1 << 20,
    )
    assert tokens.tolist() == expected.tokens.tolist()
    assert output is not None
    assert output.policy_version == 4
    assert torch.equal(output.ids, expected.ids)
    assert torch.equal(output.logprobs, expected.logprobs)
    assert output.places.tickets.tolist() == [2, 1]
    scene.begin(["a", "b"], [6, 9])
    assert draw(logits.flip(0).clone())[0].tolist() == tokens.tolist()[::-1]


def test_lists_are_as_long_as_some_row_asks() -> None:
    """What a request that only scores draws is thrown away."""
    scene = Scene()
    scene.add("a", 1, scored=2)
    scene.begin(["a"], [5])
    draw = StepDrawing(scene.batch, Ranks(), scene.reporting, 1 << 20)
    output = draw(torch.zeros(1, VOCAB))[1]
    assert output is not None
    assert output.ids.shape == (1, 1)
