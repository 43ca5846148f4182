"""A world of two turns with a random tool, of which everything can be enumerated.

The policy's turn ends with a stop token. The tool answers with two tokens: a frame, which is a stop
token itself, and a token whose chances depend on the turn. Then the second turn begins, and its end
is the end. A response has LENGTH tokens at most, observed ones included. A turn may have a limit,
which ends it like a stop.

`draw` and `verify` do for many samples what a generator does for one. `Change` has ways to do it
wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.protocol import GenerateRequest, SamplingParams, TokenChunk
from asyncrl.rollout.trajectory import IntArray, Provenance, SampleId, TrajectoryBuilder

LENGTH = 6
FRAME, ANSWERS = 1, (0, 2)
"""What the tool says: the frame, then one of these."""
STOPS = (1, 2, 4, 6)
"""FRAME and one of ANSWERS are among them: observed stop tokens end nothing."""

Ask = Callable[[list[GenerateRequest]], list[list[TokenChunk]]]
"""Has an engine serve requests; gives the chunks of each."""
Chances = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""`[N, V]` probabilities of the token after each of `[N, T]` responses."""
Probabilities = dict[tuple[int, ...], float]
"""Probability of every response."""
Part = Callable[[tuple[int, ...]], tuple[int, ...]]
"""Of a response."""


def chance_of_first(turn: Sequence[int]) -> float:
    """Of the first answer, after a turn of these tokens."""
    return 0.9 if turn[-1] in STOPS[:2] else 0.2 if len(turn) == 1 else 0.5


def answer_to(turn: Sequence[int], rng: np.random.Generator) -> IntArray:
    """`[2]` what the tool says to a turn, at random."""
    other = rng.random() >= chance_of_first(turn)
    return np.array([FRAME, ANSWERS[int(other)]], np.int32)


def has_room(length: int) -> bool:
    """Whether an answer fits after so many tokens."""
    return length + 2 <= LENGTH


def enumerate_responses(
    chances: Chances,
    answered_at: Callable[[int], bool] = has_room,
    fails: Callable[[tuple[int, ...]], bool] = lambda _turn: False,
    turn_limit: int | None = None,
) -> Probabilities:
    """Probability of every response, observed tokens included.

    Args:
        chances: of the policy.
        answered_at: whether a first turn that ends after so many tokens is answered.
        fails: whether the tool fails at such a turn, which ends the response.
        turn_limit: most tokens of a turn.
    """
    done: Probabilities = {}
    frontier: dict[tuple[int, ...], tuple[float, int]] = {(): (1.0, 0)}
    while frontier:
        size = min(map(len, frontier))
        texts = [text for text in frontier if len(text) == size]
        table = chances(np.array(texts, np.int64).reshape(len(texts), size))
        for text, row in zip(texts, table, strict=True):
            mass, begun = frontier.pop(text)
            for token in np.flatnonzero(row).tolist():
                grown, share = (*text, token), mass * row[token]
                ended = token in STOPS or len(grown) - begun == turn_limit
                if ended and not begun and answered_at(len(grown)) and not fails(grown):
                    first = chance_of_first(grown)
                    for answer, part in zip(ANSWERS, (first, 1 - first), strict=True):
                        after = (*grown, FRAME, answer)
                        if len(after) == LENGTH:
                            done[after] = share * part
                        else:
                            frontier[after] = share * part, len(after)
                elif ended or len(grown) == LENGTH:
                    done[grown] = share
                else:
                    frontier[grown] = share, begun
    assert abs(sum(done.values()) - 1) < 1e-9
    return done


def rewritten(turn: Sequence[int], answer: Sequence[int], prompt: Sequence[int]) -> list[int]:
    """The whole prompt of a second turn that knows little of the first: its last token."""
    return [*prompt[1:], turn[-1], *answer]


def enumerate_rewritten(chances: Chances, prompt: tuple[int, ...], room: int) -> Probabilities:
    """Probability of every response whose second turn is drawn after a prompt of its own.

    Args:
        chances: of the policy, after whole `[N, T]` contexts.
        prompt: of all samples.
        room: tokens that the first turn may have; the second has as many more as its prompt is
            shorter.
    """
    turns = cache(partial(_enumerate_turns, chances))
    done: Probabilities = {}
    for turn, mass in turns(prompt, room).items():
        if turn[-1] not in STOPS:
            done[turn] = mass
            continue
        first = chance_of_first(turn)
        for last, part in zip(ANSWERS, (first, 1 - first), strict=True):
            own = rewritten(turn, (FRAME, last), prompt)
            left = room + len(prompt) - len(own)
            for second, share in turns(tuple(own), left).items():
                done[(*turn, *own, *second)] = mass * part * share
    assert abs(sum(done.values()) - 1) < 1e-9
    return done


def _enumerate_turns(chances: Chances, prompt: tuple[int, ...], room: int) -> Probabilities:
    """Probability of every turn after a prompt: it ends with a stop or with so many tokens."""
    done: Probabilities = {}
    going: Probabilities = {(): 1.0}
    for length in range(1, room + 1):
        rows = chances(np.array([(*prompt, *text) for text in going], np.int64))
        grown: Probabilities = {}
        for (text, mass), row in zip(going.items(), rows, strict=True):
            for token, chance in enumerate(row.tolist()):
                ended = token in STOPS or length == room
                (done if ended else grown)[(*text, token)] = mass * chance
        going = grown
    return done


@dataclass
class Sample:
    """A response so far."""

    builder: TrajectoryBuilder
    over: bool = False

    @classmethod
    def begun(cls, number: int, prompt: IntArray) -> Sample:
        return cls(TrajectoryBuilder(SampleId(0, number), "p", prompt))

    @property
    def text(self) -> tuple[int, ...]:
        return tuple(self.builder.tokens().tolist())


@dataclass
class Change:
    """How to treat samples after a verification; by default as a generator does."""

    keeps_answer: bool = False
    """Wrong: the old answer is given to a new first turn."""
    restarts_rejected: bool = False
    """Wrong: a sample starts over if any token was rejected."""


@dataclass
class World:
    """Runs samples on an engine.

    Args:
        ask: of the engine.
        sampling: how tokens are drawn.
        prompt: of all samples.
        request: more fields of the requests.
    """

    ask: Ask
    sampling: SamplingParams
    prompt: IntArray
    request: dict[str, Any] = field(default_factory=dict)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))
    asked: int = 0

    def draw(self, samples: list[Sample], limit: int = LENGTH) -> list[Sample]:
        """Continue samples to their ends, or until they have so many tokens."""
        while running := [one for one in samples if not one.over and len(one.builder) < limit]:
            self._step(running, [self._request(one, limit) for one in running], limit)
        return samples

    def verify(
        self, samples: list[Sample], limit: int = LENGTH, change: Change | None = None
    ) -> list[Sample]:
        """Have the current policy judge samples and go on to their ends, or to `limit` tokens."""
        change = change or Change()
        assert all(len(one.builder) <= limit for one in samples)
        new = [Sample.begun(i, self.prompt) for i in range(len(samples))]
        requests = [
            replace(self._request(sample, limit), kept=old.builder.kept())
            for sample, old in zip(new, samples, strict=True)
        ]

        def answer(sample: Sample, turn: list[int]) -> IntArray:
            old = samples[sample.builder.id.sample].builder
            if change.keeps_answer and old.turn_start:
                return old.tokens()[old.turn_start - 2 : old.turn_start]
            return answer_to(turn, self.rng)

        self._step(new, requests, limit, answer)
        for i, (sample, old) in enumerate(zip(new, samples, strict=True)):
            provenance = sample.builder.finish("abort").provenance
            drawn = np.flatnonzero(provenance < Provenance.VERIFIED)
            if not len(drawn) or drawn[0] >= len(old.builder):
                continue  # all of it was accepted
            if change.restarts_rejected:
                new[i] = Sample.begun(i, self.prompt)
        while running := [one for one in new if not one.over and len(one.builder) < limit]:
            self._step(running, [self._request(one, limit) for one in running], limit, answer)
        return new

    def _step(
        self,
        samples: list[Sample],
        requests: list[GenerateRequest],
        limit: int,
        answer: Callable[[Sample, list[int]], IntArray] | None = None,
    ) -> None:
        """One request of each sample, and the tool's answer where it ended a first turn."""
        for sample, chunks in zip(samples, self.ask(requests), strict=True):
            builder = sample.builder
            for chunk in chunks:
                chunk.append_to(builder)
            ended = chunks[-1].finish_reason == "stop"
            ended |= len(builder) - builder.turn_start == self.sampling.max_turn_tokens
            if ended and not builder.turn_start and has_room(len(builder)):
                turn = builder.tokens().tolist()
                said = answer_to(turn, self.rng) if answer is None else answer(sample, turn)
                builder.append_observed(said)
                sample.over = len(builder) == LENGTH
            else:
                sample.over = ended or limit == LENGTH

    def _request(self, sample: Sample, limit: int) -> GenerateRequest:
        """The next turn, or the rest of it. Every request has a seed of its own."""
        self.asked += 1
        return GenerateRequest(
            f"turn{self.asked}",
            prompt_tokens=self.prompt,
            prefix_tokens=sample.builder.tokens(),
            turn_start=sample.builder.turn_start,
            sampling=replace(
                self.sampling, max_tokens=limit, stop_tokens=STOPS, seed=10**6 + self.asked
            ),
            **({"cache_key": "two turns"} | self.request),
        )

    def begin(self, count: int) -> list[Sample]:
        return [Sample.begun(i, self.prompt) for i in range(count)]


def summary(text: tuple[int, ...]) -> tuple[int, ...]:
    """Length and end of the first turn, the answer and the first token of the second turn."""
    ends = [place for place, token in enumerate(text) if token in STOPS]
    if not ends or not has_room(ends[0] + 1):
        return (len(text),)
    end = ends[0]
    return (end, text[end], *text[end + 2 : end + 4])


def answer_and_chance(text: tuple[int, ...]) -> tuple[int, ...]:
    """The answer to the first turn, and how likely the first of the two was, in percent."""
    ends = [place for place, token in enumerate(text) if token in STOPS]
    if not ends or len(text) == ends[0] + 1:
        return ()
    return (text[ends[0] + 2], round(100 * chance_of_first(text[: ends[0] + 1])))


def likelier(new: Probabilities, old: Probabilities) -> Part:
    """How much likelier responses are under a policy than under another, in steps of 0.7 nats.

    Whoever selects responses by what is rejected shows it here.
    """
    edges = 0.7 * np.arange(-2.5, 3.0)
    ratios = np.log([[mass, old[text]] for text, mass in new.items()]) @ np.array([1.0, -1.0])
    places = dict(zip(new, np.searchsorted(edges, ratios).tolist(), strict=True))
    return lambda text: (places.get(text, -1),)


def summed(whole: Probabilities, part: Part) -> Probabilities:
    """Those of a part of each response."""
    out: Probabilities = {}
    for text, mass in whole.items():
        out[part(text)] = out.get(part(text), 0.0) + mass
    return out


def texts_of(samples: Sequence[Sample]) -> list[tuple[int, ...]]:
    assert all(one.over for one in samples)
    return [one.text for one in samples]
