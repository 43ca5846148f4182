"""Ways to spoil the records of a right run, to see which statements find it.

Each takes what a right run has trained on and leaves out or exchanges some samples *because of
their tokens*, as a wrong loop would. The rest of the run stays as it is, so a finding is the
spoiler's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from benchmarks.live_audit.audit import Material
from benchmarks.live_audit.tokens import Integers

Spoil = Callable[[Material, np.random.Generator], Integers]
"""Indices of the records that are left."""


def drop_long(one: Material, rng: np.random.Generator) -> Integers:
    """Half of the longest tenth is not trained on."""
    lengths = np.array([record.response_length for record in one.records])
    long = lengths >= np.quantile(lengths, 0.9)
    return np.flatnonzero(~(long & (rng.random(len(lengths)) < 0.5)))


def drop_wrong(one: Material, rng: np.random.Generator) -> Integers:
    """A third of the samples with the lowest reward is not trained on."""
    rewards = np.array([record.reward for record in one.records])
    return np.flatnonzero(~((rewards <= rewards.min()) & (rng.random(len(rewards)) < 1 / 3)))


def short_first(one: Material, rng: np.random.Generator) -> Integers:
    """Of each group the longest sample is left out: the others are trained on as they end."""
    del rng
    longest: dict[int, int] = {}
    for i, record in enumerate(one.records):
        best = longest.setdefault(record.group, i)
        if record.response_length > one.records[best].response_length:
            longest[record.group] = i
    return np.array(sorted(set(range(len(one.records))) - set(longest.values())), np.int64)


SPOILS: dict[str, Spoil] = {
    "half of the longest tenth dropped": drop_long,
    "a third of the wrong ones dropped": drop_wrong,
    "the longest of each group dropped": short_first,
}


def spoiled(one: Material, name: str, seed: int) -> Material:
    """The same run with these records left."""
    left = SPOILS[name](one, np.random.default_rng(seed))
    number = np.full(len(one.records), -1, np.int64)
    number[left] = np.arange(len(left))
    tokens = one.tokens.where(number[one.tokens.sample] >= 0)
    tokens = dataclasses.replace(tokens, sample=number[tokens.sample])
    return dataclasses.replace(one, records=[one.records[i] for i in left], tokens=tokens)
