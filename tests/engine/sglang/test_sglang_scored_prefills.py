"""Scored tokens of prompts that SGLang takes in: in chunks, from the beginning again, or never."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from asyncrl.engine.remote.extras import RequestExtra, ScoreColumns
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.remote.worker.scoring import Scorer
from asyncrl.engine.sglang.messages import AddRequest, Gauges, Outputs, Scored
from asyncrl.engine.sglang.worker.requests import Requests, SchedulerBatch, entry_of
from asyncrl.engine.sglang.worker.steps import Outbox, Prefill, PrefillScoring, Reporting

VOCAB, WIDTH, K = 11, 5, 2
HEAD = torch.from_numpy(np.random.default_rng(1).normal(size=(WIDTH, VOCAB))).float()


class Scene:
    """Requests `r0`, `r1`, ... with prompts of 2 tokens, of whose continuations all is scored."""

    def __init__(self, lengths: list[int]) -> None:
        rng = np.random.default_rng(0)
        self.sent: list[Outputs] = []
        self.requests = Requests()
        reporting = Reporting(self.requests, Outbox(self.sent.append, Gauges, 1))
        self.batch = SchedulerBatch(self.requests)
        scorer = Scorer(lambda hidden: hidden @ HEAD, VOCAB, Ranks(), 1 << 20, 8)
        self.scoring = PrefillScoring(self.batch, scorer, reporting)
        self.outbox = reporting.outbox
        self.tokens: dict[str, np.ndarray] = {}
        self.hidden: dict[str, torch.Tensor] = {}
        for i, n in enumerate(lengths):
            name = f"r{i}"
            self.tokens[name] = rng.integers(0, VOCAB, n + 2).astype("<i4")
            self.hidden[name] = torch.from_numpy(rng.normal(size=(n + 2, WIDTH))).float()
            extra = RequestExtra(seed=i, generated=n, scored=n, top_k_logprobs=K)
            message = AddRequest(
                name, self.tokens[name].tobytes(), 0, 1.0, 1.0, [], 0, "", extra.to_plain()
            )
            self.requests.add(name, entry_of(message))

    def step(self, fed: dict[str, tuple[int, int]]) -> dict[str, Scored]:
        """Take in tokens begin .. begin + count of each; the tables that come back."""
        reqs = [SimpleNamespace(rid=name) for name in fed]
        lengths = torch.tensor([sum(part) for part in fed.values()])
        self.batch.begin(SimpleNamespace(reqs=reqs, seq_lens_cpu=lengths))
        begins, counts = ([part[i] for part in fed.values()] for i in (0, 1))
        self.scoring.begin(Prefill(begins, counts))
        assert self.scoring.wanted
        hidden = [self.hidden[name][a : a + n] for name, (a, n) in fed.items()]
        self.scoring.compute(torch.cat(hidden))
        self.outbox.end_step()
        return {one.request_id: one for message in self.sent for one in message.scored}

    def expected(self, name: str) -> list[float]:
        """Log-probability of each scored token."""
        logprobs = torch.log_softmax(self.hidden[name] @ HEAD, -1)
        tokens = self.tokens[name]
        return [float(logprobs[i, tokens[i + 1]]) for i in range(1, len(tokens) - 1)]


def own(scored: Scored) -> list[float]:
    table = np.frombuffer(scored.logprobs, "<f4").reshape(-1, scored.width)
    return table[:, ScoreColumns(K).own].tolist()


def test_prompts_in_chunks_and_from_the_beginning_again() -> None:
    scene = Scene([6, 3])
    assert not scene.step({"r0": (0, 4)})
    assert not scene.step({"r0": (0, 3)})  # it was retracted
    done = scene.step({"r1": (1, 4), "r0": (3, 5)})
    assert {*done} == {"r0", "r1"}
    for name, scored in done.items():
        np.testing.assert_allclose(own(scored), scene.expected(name), rtol=1e-5)


def test_nothing_is_looked_at_where_nothing_is_scored() -> None:
    scene = Scene([3])
    message = AddRequest("g", scene.tokens["r0"].tobytes(), 4, 1.0, 1.0, [], 0, "",
                         RequestExtra(seed=1, ticket=1).to_plain())  # fmt: skip
    scene.requests.add("g", entry_of(message))
    reqs, lengths = [SimpleNamespace(rid="g")], torch.tensor([5])
    scene.batch.begin(SimpleNamespace(reqs=reqs, seq_lens_cpu=lengths))
    for prefill in (Prefill([0], [5]), None):
        scene.scoring.begin(prefill)
        assert not scene.scoring.wanted


def test_a_request_that_was_interrupted_reports_no_scores() -> None:
    """Its end was sent. SGLang still runs it once more, and forgets it then."""
    scene = Scene([6, 3])
    scene.step({"r0": (0, 4)})
    scene.requests.interrupt("r1")
    assert not scene.step({"r1": (0, 5)})
    scene.requests.forget("r0")
    scene.step({"r1": (0, 5)})
    assert not scene.scoring._scorer.requests
