"""Every token that a run has trained on, with the distribution that it should be a draw of.

The distributions come from the checkpoint of the version that the step trained from and a plain
Hugging Face forward pass in float64, over the tokens that the model had seen: nothing of engines,
caches or verification is used. What was recorded when a token was drawn stands next to it.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config.run_config import RunConfig
from asyncrl.monitoring.records.trained_samples import TrainedSample
from asyncrl.rollout.trajectory import Provenance

Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]

FIRST = -1
"""In the place of the provenance of a token that is not there."""
VERSIONS_BEFORE = (1, 2)
_MAX_DRIFT = 2.0
_BATCH = 64


@dataclass(frozen=True)
class Tokens:
    """N trained tokens in the order of step, group, sample and place. V: the vocabulary."""

    probabilities: Doubles
    """`[N, V]` that the version of its step gives, after temperature and truncation."""
    drift: tuple[Doubles, ...]
    """For 1, 2 versions before: `[N, V]` log of the probability that it gives over the present one,
    clipped. What is wrong with old tokens goes into this direction."""
    token: Integers
    recorded: Doubles
    """`[N]` log-probability with which it was drawn, as the engine said."""
    provenance: Integers
    """`[N]` of the token. It is known after the draw: no statement may select by it."""
    before: Integers
    """`[N]` provenance of the token before it in the response; `FIRST` if it is the first one."""
    before_that: Integers
    """`[N]` of the one before that."""
    sample: Integers
    """`[N]` index of its record."""
    step: Integers
    group: Integers
    index: Integers
    """`[N]` of the sample in its group."""
    visit: Integers
    """`[N]` how often its prompt had been trained on before."""
    context: Integers
    """`[N]` number of its context in the sample."""
    offset: Integers
    """`[N]` place in the response of its context, from 0: what random numbers are keyed by."""
    turn: Integers
    """`[N]` of the sample."""
    turn_offset: Integers
    """`[N]` place in its turn."""
    prompt: Integers
    """`[N]` a number of its row in the data: several rows may have one text."""
    prefix: Integers
    """`[N]` hash of all that the model saw before it: equal for equal texts."""

    def __len__(self) -> int:
        return len(self.token)


@dataclass(frozen=True)
class Context:
    """What the model saw: a prompt, and a response of which some tokens were drawn."""

    prompt: list[int]
    response: list[int]
    start: int
    """Place of the response's first token among the sample's."""


def contexts_of(record: TrainedSample) -> list[Context]:
    """A sample's contexts. Observed tokens with which a context begins are its prompt."""
    prompt, tokens = record.prompt_tokens, record.response_tokens
    if prompt is None or tokens is None or record.provenance is None:
        raise ValueError("the run has no tokens in its log: it needs run.log_sample_tokens")
    drawn = [digit != str(int(Provenance.OBSERVED)) for digit in record.provenance]
    found = []
    for begin, end in pairwise([0, *record.contexts, len(tokens)]):
        first = begin if not begin else next((i for i in range(begin, end) if drawn[i]), end)
        if any(drawn[first:end]):
            found.append(
                Context(tokens[begin:first] if begin else prompt, tokens[first:end], first)
            )
    return found


def tokens_of(
    records: Sequence[TrainedSample], models: Mapping[int, str], config: RunConfig
) -> Tokens:
    """Recompute the distribution of every trained token."""
    visits = visits_of(records)
    parts: list[dict[str, Any]] = []
    drifts: list[list[Doubles]] = [[] for _ in VERSIONS_BEFORE]
    loaded: dict[int, Any] = {}
    for step in sorted({one.step for one in records}):
        loaded = {v: one for v, one in loaded.items() if v >= step - max(VERSIONS_BEFORE)}
        loaded[step] = load(models[step])
        contexts = [
            (i, number, context)
            for i, one in enumerate(records)
            if one.step == step
            for number, context in enumerate(contexts_of(one))
        ]
        only = [context for _, _, context in contexts]
        rows = distributions(loaded[step], only, config)
        made = [
            _columns(records[i], i, number, context, probabilities, visits)
            for (i, number, context), probabilities in zip(contexts, rows, strict=True)
        ]
        for drift, before in zip(drifts, VERSIONS_BEFORE, strict=True):
            older = loaded.get(step - before, loaded[step])
            for one, row, old in zip(made, rows, distributions(older, only, config), strict=True):
                drift.append(_log_ratio(old, row)[one["chosen"]])
        parts += made
    joined = {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}
    del joined["chosen"]
    return Tokens(drift=tuple(np.concatenate(one) for one in drifts), **joined)


def _log_ratio(old: Doubles, present: Doubles) -> Doubles:
    """Log of old / present, clipped; 0 where the present one is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.clip(np.log(old) - np.log(present), -_MAX_DRIFT, _MAX_DRIFT)
    return np.where(present > 0, found, 0.0)


def visits_of(records: Sequence[TrainedSample]) -> dict[int, int]:
    """By group, how many groups before it had its prompt."""
    found, seen = {}, dict[str, int]()
    for group, prompt in sorted({(one.group, one.prompt_id) for one in records}):
        found[group] = seen.get(prompt, 0)
        seen[prompt] = found[group] + 1
    return found


def load(path: str, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **more).eval()


def distributions(model: Any, contexts: Sequence[Context], config: RunConfig) -> list[Doubles]:
    """`[R, V]` for each context, the policy at each token of its response."""
    found: list[Doubles] = [np.empty(0)] * len(contexts)
    order = sorted(
        range(len(contexts)), key=lambda i: len(contexts[i].prompt + contexts[i].response)
    )
    for begin in range(0, len(order), _BATCH):
        chosen = order[begin : begin + _BATCH]
        texts = [contexts[i].prompt + contexts[i].response for i in chosen]
        width = max(map(len, texts))
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits
        for row, i in enumerate(chosen):
            first = len(contexts[i].prompt) - 1
            own = logits[row, first : first + len(contexts[i].response)]
            found[i] = policy_of(own, config)
    return found


def policy_of(logits: torch.Tensor, config: RunConfig) -> Doubles:
    """`[R, V]` temperature, top-k, top-p and min-p in this order, as sampling says."""
    sampling = config.sampling
    p = (logits.double() / sampling.temperature).softmax(-1).numpy()
    if sampling.top_k:
        edge = np.sort(p, axis=1)[:, -sampling.top_k][:, None]
        p = _rescaled(np.where(p >= edge, p, 0.0))
    if sampling.top_p < 1:
        order = np.argsort(-p, axis=1, kind="stable")
        mass = np.take_along_axis(p, order, 1).cumsum(1)
        inside = np.zeros(p.shape, np.bool_)
        reached = np.concatenate([np.zeros((len(p), 1)), mass[:, :-1]], 1) < sampling.top_p
        np.put_along_axis(inside, order, reached, 1)
        p = _rescaled(np.where(inside, p, 0.0))
    if sampling.min_p:
        p = _rescaled(np.where(p >= sampling.min_p * p.max(1, keepdims=True), p, 0.0))
    return p


def _rescaled(p: Doubles) -> Doubles:
    return p / p.sum(1, keepdims=True)


def _columns(
    record: TrainedSample,
    number: int,
    context: int,
    one: Context,
    probabilities: Doubles,
    visits: Mapping[int, int],
) -> dict[str, Any]:
    """The trained tokens of a context, a column each."""
    assert record.provenance is not None
    assert record.behaviour_logprobs is not None
    marks = [int(digit) for digit in record.provenance]
    rows = list(_rows(marks, one.start, len(one.response)))
    places = np.array([place for place, _, _ in rows], np.int64)
    near = [FIRST, FIRST, *marks]
    same = np.ones(len(rows), np.int64)
    return {
        "chosen": places - one.start,
        "probabilities": probabilities[places - one.start],
        "token": np.array([one.response[place - one.start] for place in places], np.int64),
        "recorded": np.array([record.behaviour_logprobs[place] for place in places]),
        "provenance": np.array([marks[place] for place in places], np.int64),
        "before": np.array([near[place + 1] for place in places], np.int64),
        "before_that": np.array([near[place] for place in places], np.int64),
        "sample": same * number,
        "step": same * record.step,
        "group": same * record.group,
        "index": same * record.sample,
        "visit": same * visits[record.group],
        "context": same * context,
        "offset": places - one.start,
        "turn": np.array([turn for _, turn, _ in rows], np.int64),
        "turn_offset": np.array([at for _, _, at in rows], np.int64),
        "prompt": same * zlib.crc32(record.prompt_id.encode()),
        "prefix": np.array(_prefixes(one), np.int64)[places - one.start],
    }


def _prefixes(context: Context) -> list[int]:
    """Before each token of the response; the hash of a tuple of numbers is always the same."""
    found = [hash(tuple(context.prompt))]
    for token in context.response[:-1]:
        found.append(hash((found[-1], token)))
    return found


def _rows(marks: Sequence[int], start: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Place, turn and place in the turn of each drawn token of a part of a response."""
    turn, at, drew = 0, 0, False
    for place, mark in enumerate(marks[: start + length]):
        if mark == Provenance.OBSERVED:
            turn, at, drew = turn + drew, 0, False
            continue
        if place >= start:
            yield place, turn, at
        at, drew = at + 1, True
