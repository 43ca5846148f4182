"""Steps with drafts draw what steps without draw, whatever is drafted; wrong rules are noticed.

The model is a table: a distribution for each text. So every response has a known probability.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from false_alarms import Claims, is_caught
from numpy.typing import NDArray
from scipy.stats import chisquare
from tree_sources import CorruptTrees, RandomTrees

from asyncrl.cache.tree.rollout_tree import Drafts
from asyncrl.engine.drafting.trees import TokenTrees, no_trees, plant
from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.remote.extras import RequestExtra
from asyncrl.engine.remote.worker.entries import Entry
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.sglang.messages import Gauges, Outputs
from asyncrl.engine.sglang.worker.drafts import tree_drawing
from asyncrl.engine.sglang.worker.drafts.tree_drawing import Accepted, TreeDrawing
from asyncrl.engine.sglang.worker.drafts.verify_step import Feed, lay_out
from asyncrl.engine.sglang.worker.requests import Requests, SchedulerBatch
from asyncrl.engine.sglang.worker.steps import Outbox, Reporting
from asyncrl.rollout.trajectory import IntArray

VOCAB, LENGTH, PROMPT = 6, 12, (1, 2)
CLAIMS = Claims(__file__)


def logits_of(text: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(tuple(text)) % (1 << 40))
    return 1.5 * torch.randn(VOCAB, generator=generator)


@dataclass
class Batch:
    """What `SchedulerBatch.begin` reads of SGLang's."""

    reqs: list[object]
    seq_lens_cpu: torch.Tensor


@dataclass
class Named:
    rid: str


Draft = Callable[[list[list[int]]], TokenTrees]


@dataclass
class World:
    """Requests that generate LENGTH tokens each, in steps of this drawing."""

    names: list[str]
    how: dict[str, float] = field(default_factory=dict)
    ragged: bool = True
    there: bool = False
    """Follow the trees as on a device."""

    def __post_init__(self) -> None:
        requests = Requests()
        for i, name in enumerate(self.names):
            extra = RequestExtra(seed=i, ticket=i + 1, top_k_logprobs=2)
            prompt = np.array(PROMPT, np.int32)
            sampling = SamplingParams(LENGTH, **self.how)
            requests.add(name, Entry(extra, sampling, 2, prompt, 2 + LENGTH, ()))
        self.batch = SchedulerBatch(requests, 4)
        outbox = Outbox(self._take, Gauges, 1)
        reporting = Reporting(requests, outbox)
        self.drawing = TreeDrawing(self.batch, Ranks(), reporting, 1 << 20)
        self.texts = [list(PROMPT) for _ in self.names]
        self.steps = 0

    def _take(self, _outputs: Outputs) -> None: ...

    def run(self, draft: Draft) -> list[list[int]]:
        """Generate; the texts, prompt included, cut to their length."""
        while min(map(len, self.texts)) < 2 + LENGTH:
            self.step(draft(self.texts))
            self.steps += 1
        return [text[: 2 + LENGTH] for text in self.texts]

    def step(self, trees: TokenTrees) -> None:
        contexts = np.array([len(text) - 1 for text in self.texts])
        last = np.array([text[-1] for text in self.texts], np.int32)
        self.batch.begin(Batch([Named(name) for name in self.names], torch.from_numpy(contexts)))
        feed = lay_out(trees, last, contexts, ragged=self.ragged)
        logits = self._forward(trees, feed)
        if self.there:
            drawn = self.drawing._draw(logits, feed)
            accepted = self.drawing._accept_there(drawn, trees, feed)
        else:
            accepted = self.drawing(logits, trees, feed)
        self._check_report(accepted)
        for text, tokens, count in zip(
            self.texts, accepted.tokens.tolist(), accepted.counts.tolist(), strict=True
        ):
            text += tokens[:count]

    def _forward(self, trees: TokenTrees, feed: Feed) -> torch.Tensor:
        """Logits after each fed token of its own path; padding gets nan."""
        rows = torch.full((len(feed.tokens), VOCAB), torch.nan)
        at = iter(range(len(feed.tokens)) if feed.real is None else feed.real.tolist())
        for row, text in enumerate(self.texts):
            begin, end = int(trees.offsets[row]), int(trees.offsets[row + 1])
            paths = [text]
            for token, parent in zip(
                trees.tokens[begin:end].tolist(), trees.parents[begin:end].tolist(), strict=True
            ):
                paths.append([*paths[parent + 1], token])
            for path in paths:
                rows[next(at)] = logits_of(path)
        return rows

    def _check_report(self, accepted: Accepted) -> None:
        """The table has the tokens that are generated, with the ticket of their request."""
        output = accepted.output
        assert output is not None
        for row, count in enumerate(accepted.counts.tolist()):
            at = int(output.places.starts[row])
            table = output.ids[at : at + count, 0].tolist()
            assert table == accepted.tokens[row, :count].tolist()
            assert output.places.tickets[row] == row + 1
            assert output.logprobs[at : at + count, 0].isfinite().all()


def nothing(texts: list[list[int]]) -> TokenTrees:
    return no_trees(len(texts))


def from_source(source: RandomTrees | CorruptTrees, rows: int) -> Draft:
    handles = np.array([source.open("k", np.zeros(0, np.int32)) for _ in range(rows)], np.int32)

    def draft(texts: list[list[int]]) -> TokenTrees:
        most = np.full(len(texts), 7, np.int32)
        return plant(source.draft(handles, most, branching=True), most, most, VOCAB)

    return draft


@pytest.mark.parametrize("there", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "uniform"])
@pytest.mark.parametrize(
    "how",
    [{"temperature": 0.6}, {"temperature": 1.3, "top_p": 0.8}, {"top_k": 4, "min_p": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("kind", [RandomTrees, CorruptTrees])
def test_a_seed_generates_the_same_tokens_whatever_is_drafted(
    how: dict[str, float], ragged: bool, there: bool, kind: type
) -> None:
    names = [f"r{i}" for i in range(6)]
    plain = World(names, how)
    expected = plain.run(nothing)
    world = World(names, how, ragged, there)
    assert world.run(from_source(kind(VOCAB), len(names))) == expected
    if kind is RandomTrees:
        assert world.steps < plain.steps


def two_tokens(world: World, draft: Draft) -> NDArray[np.int64]:
    """How often each pair of first tokens was generated."""
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    while min(map(len, world.texts)) < 4:
        world.step(draft(world.texts))
    for text in world.texts:
        counts[text[2], text[3]] += 1
    return counts.ravel()


def enumerated() -> NDArray[np.float64]:
    first = logits_of(list(PROMPT)).double().softmax(0)
    second = [logits_of([*PROMPT, token]).double().softmax(0) for token in range(VOCAB)]
    return (first[:, None] * torch.stack(second)).numpy().ravel()


def p_value(counts: NDArray[np.int64]) -> float:
    return float(chisquare(counts, enumerated() * counts.sum()).pvalue)


def forks(texts: list[list[int]]) -> TokenTrees:
    """The same tree for all rows: two children of the root, and one below each."""
    rows = len(texts)
    drafts = Drafts(
        np.tile(np.array([3, 0, 1, 3], np.int32), rows),
        np.tile(np.array([-1, -1, 0, 1], np.int32), rows),
        np.arange(rows + 1, dtype=np.int32) * 4,
        np.tile(np.array([0.9, 0.8, 0.7, 0.6], np.float32), rows),
    )
    four = np.full(rows, 4, np.int32)
    return plant(drafts, four, four, VOCAB)


def test_drafted_pairs_follow_the_enumerated_distribution() -> None:
    counts = two_tokens(World([f"r{i}" for i in range(4000)]), forks)
    assert CLAIMS.fit(p_value(counts))


def test_committing_the_most_probable_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's verification does on a CPU, at any temperature."""
    right = tree_drawing.draw_from_logits

    def argmax(logits: torch.Tensor, *args: object, **named: object) -> object:
        drawn = right(logits, *args, **named)  # type: ignore[arg-type]
        drawn.ids[:, 0] = logits.argmax(1)
        return drawn

    monkeypatch.setattr(tree_drawing, "draw_from_logits", argmax)
    monkeypatch.setattr(World, "_check_report", lambda *_: None)
    assert is_caught(p_value(two_tokens(World([f"r{i}" for i in range(400)]), forks)))


def rejection(children: list[int], p: NDArray[np.float64], rng: np.random.Generator) -> int:
    """SGLang's rule for one position (`tree_speculative_sampling_target_only`, thresholds of 1)."""
    coin, mass, left = rng.random(), 0.0, p.copy()
    for child in children:
        mass += p[child]
        if coin <= mass:
            return child
        left[child] = 0.0
    return int(rng.choice(len(p), p=left / left.sum()))


def test_siblings_that_are_alike_would_bias_sglangs_own_rule_and_are_never_fed() -> None:
    """SGLang's NGRAM pads its trees with children that hold token 0."""
    p = logits_of(list(PROMPT)).double().softmax(0).numpy()
    rng = np.random.default_rng(0)

    def tested(children: list[int]) -> float:
        drawn = [rejection(children, p, rng) for _ in range(20_000)]
        return float(chisquare(np.bincount(drawn, minlength=VOCAB), p * 20_000).pvalue)

    assert CLAIMS.fit(tested([3, 0]))
    assert is_caught(tested([3, 0, 0, 0]))
    padded = Drafts(
        np.array([3, 0, 0, 0], np.int32),
        np.full(4, -1, np.int32),
        np.array([0, 4], np.int32),
        np.array([0.9, 0.5, 0.4, 0.3], np.float32),
    )
    four: IntArray = np.array([4], np.int32)
    assert plant(padded, four, four, VOCAB).tokens.tolist() == [3, 0]


class CountedRanks:
    """One of two ranks, whose broadcasts are counted."""

    def __init__(self, rank: int) -> None:
        self.leads = rank == 0
        self.broadcasts: list[object] = []

    def share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        self.broadcasts.append((tokens.shape, tokens.dtype))
        return tokens


@pytest.mark.parametrize("draft", [nothing, forks])
def test_all_ranks_make_the_same_broadcasts_with_and_without_drafts(draft: Draft) -> None:
    """A rank that waits for one more than rank 0 makes waits forever."""
    made = []
    for rank in range(2):
        world, ranks = World(["a", "b"]), CountedRanks(rank)
        world.drawing._ranks = ranks  # type: ignore[assignment]
        trees, contexts = draft(world.texts), np.array([1, 1])
        world.batch.begin(Batch([Named("a"), Named("b")], torch.from_numpy(contexts)))
        feed = lay_out(trees, np.array([2, 2], np.int32), contexts, ragged=True)
        world.drawing(world._forward(trees, feed), trees, feed)
        made.append(ranks.broadcasts)
    assert made[0] == made[1]
    assert len(made[0]) == 3
