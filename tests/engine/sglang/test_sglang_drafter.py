"""What SGLang's running requests generate, and what is drafted for them, without SGLang."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from fake_drafting import STOP, FixedPlanner, ids
from tree_sources import OracleTrees

from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.remote.extras import RequestExtra
from asyncrl.engine.remote.worker.entries import Entry
from asyncrl.engine.sglang.worker.drafts.drafting import Drafter

VOCAB = 100
TEXTS = {"a": [11, 12, 13, 14, 15, 16], "b": [21, 22, 23, 24, 25, 26]}
"""What each request is going to generate after the prompt (1, 2)."""


class Told(OracleTrees):
    """Remembers what it was told, also of rows that are closed."""

    def __init__(self) -> None:
        super().__init__(TEXTS, VOCAB)
        self.told: dict[str, list[int]] = {}
        self.versions: list[int] = []

    def close(self, row: int) -> None:
        self.remember()
        super().close(row)

    def advance(self, policy_version: int) -> None:
        self.remember()
        self.versions.append(policy_version)

    def remember(self) -> None:
        for row, key in self._keys.items():
            self.told[key] = list(self._tokens[row])


@dataclass
class Scene:
    """A drafter, and requests whose rows we move as SGLang does."""

    most: int = 6
    source: Told = field(default_factory=Told)

    def __post_init__(self) -> None:
        self.entries = {
            name: Entry(
                RequestExtra(seed=1, cache_key=name), SamplingParams(20), 2, ids(1, 2), 22, (STOP,)
            )
            for name in TEXTS
        }
        self.planner = FixedPlanner(self.most)
        self.drafter = Drafter(
            self.source,
            self.planner,
            self.entries.__getitem__,
            rows=4,
            width=40,
            vocab_size=VOCAB,
        )
        self.generated: dict[str, list[int]] = {name: [] for name in TEXTS}

    def take_in(self, name: str, row: int) -> None:
        self.drafter.take_in(name, row, lambda: [1, 2, *self.generated[name]])

    def generate(self, rows: dict[str, int], counts: dict[str, int]) -> None:
        """A step in which rows generate so many of their tokens."""
        new = [TEXTS[name][len(self.generated[name]) :][: counts[name]] for name in rows]
        lengths = np.array([2 + len(self.generated[name]) for name in rows], np.int64)
        self.drafter.append(
            np.array(list(rows.values())),
            lengths,
            ids(*(token for one in new for token in one)),
            np.array([len(one) for one in new]),
        )
        for name, tokens in zip(rows, new, strict=True):
            self.generated[name] += tokens

    def draft(self, rows: dict[str, int]) -> list[list[int]]:
        lengths = np.array([2 + len(self.generated[name]) for name in rows], np.int64)
        trees = self.drafter.draft(list(rows), np.array(list(rows.values())), lengths)
        return [part.tolist() for part in np.split(trees.tokens, trees.offsets[1:-1])]


def test_trees_follow_what_rows_have_generated_wherever_they_lie() -> None:
    scene = Scene(most=2)
    scene.take_in("a", 3)
    scene.take_in("b", 1)
    scene.generate({"a": 3, "b": 1}, {"a": 1, "b": 2})
    # Siblings, the right one second; `plant` puts the first path first.
    assert scene.draft({"a": 3, "b": 1}) == [[13, 12], [24, 23]]
    scene.generate({"b": 1, "a": 3}, {"a": 2, "b": 1})
    assert scene.draft({"b": 1, "a": 3}) == [[25, 24], [15, 14]]
    assert scene.drafter.last_tokens(np.array([1, 3]), np.array([5, 5])).tolist() == [23, 13]


def test_a_request_that_was_retracted_comes_back_in_another_row() -> None:
    scene = Scene(most=2)
    scene.take_in("a", 0)
    scene.generate({"a": 0}, {"a": 2})
    scene.take_in("b", 0)  # a was retracted, and its row is b's now
    scene.generate({"b": 0}, {"b": 1})
    scene.take_in("a", 2)
    scene.generate({"a": 2}, {"a": 1})
    assert scene.draft({"b": 0, "a": 2}) == [[23, 22], [15, 14]]
    assert len(scene.source._keys) == 2
    scene.drafter.end(["a", "b"])
    scene.drafter.settle()
    assert scene.source.told == {"a": [11, 12, 13], "b": [21]}


def test_what_ended_and_aborted_requests_generated_is_told_once() -> None:
    scene = Scene(most=0)
    scene.take_in("a", 0)
    scene.take_in("b", 1)
    scene.generate({"a": 0, "b": 1}, {"a": 3, "b": 2})
    assert scene.draft({"a": 0, "b": 1}) == [[], []]
    scene.drafter.end(["a"])
    scene.drafter.settle()
    assert scene.source.told["a"] == [11, 12, 13]
    scene.drafter.advance(7)
    assert (scene.source.told["b"], scene.source.versions) == ([21, 22], [7])
    scene.drafter.end(["b", "unknown"])
    scene.drafter.settle()
    assert scene.source.told["b"] == [21, 22]
    assert not scene.source._keys


def test_a_request_that_was_retracted_and_then_aborted_leaves_nothing_behind() -> None:
    scene = Scene()
    scene.take_in("a", 0)
    scene.generate({"a": 0}, {"a": 2})
    scene.take_in("b", 0)
    scene.generate({"b": 0}, {"b": 1})
    scene.drafter.end(["a"])
    scene.drafter.settle()
    assert list(scene.source._keys.values()) == ["b"]
    scene.drafter.end(["b"])
    scene.drafter.settle()
    assert scene.source.told == {"a": [11, 12], "b": [21]}


def test_a_row_that_a_retracted_request_had_before_it_ended_in_another_is_free() -> None:
    scene = Scene()
    scene.take_in("a", 0)
    scene.generate({"a": 0}, {"a": 2})
    scene.take_in("a", 2)  # retracted; row 0 was nobody else's meanwhile
    scene.generate({"a": 2}, {"a": 1})
    scene.drafter.end(["a"])
    scene.drafter.settle()
    assert scene.source.told["a"] == TEXTS["a"][:3]
    scene.take_in("b", 0)
    scene.generate({"b": 0}, {"b": 2})
    assert scene.draft({"b": 0})[0]


def test_a_row_that_a_request_has_left_is_nobodys() -> None:
    scene = Scene(most=2)
    scene.take_in("a", 0)
    scene.generate({"a": 0}, {"a": 1})
    scene.take_in("a", 2)  # retracted, and back in another row
    scene.generate({"a": 2}, {"a": 2})
    scene.take_in("a", 0)  # and again: the first row has an old text
    assert scene.draft({"a": 0}) == [[15, 14]]
    assert scene.drafter.last_tokens(np.array([0]), np.array([5])).tolist() == [13]
    scene.drafter.end(["a"])
    scene.drafter.settle()
    scene.take_in("b", 2)
    scene.take_in("b", 0)
    assert scene.source.told == {"a": [11, 12, 13]}
