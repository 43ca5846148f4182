"""Whether the hints of the audit's own games (`games`) lie as often as they must.

A hint lies with a known probability, whatever was said before. So among the hints that were trained
on, given the turns that they answer, as many lie: also where turns were verified, environments went
back, replayed or started over. A hint that is kept or exchanged because of what followed it is seen
here, and not in the policy's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncrl.config.run_config import RunConfig
from asyncrl.monitoring.records.trained_samples import TrainedSample
from asyncrl.rollout.trajectory import Provenance
from asyncrl.tasks.prompts import Task
from benchmarks.live_audit.games import LIES, NUMBER
from benchmarks.live_audit.statements import Statement, of_mass, sum_of

_OBSERVED = str(int(Provenance.OBSERVED))


class Hint(NamedTuple):
    lies: bool
    turn: int
    verified: bool
    """The last token of the turn before it was accepted again."""


def statements(records: Sequence[TrainedSample], config: RunConfig, task: Task) -> list[Statement]:
    """Of the games; none for other environments."""
    if Path((config.environment.name or "").partition(":")[0]).name != "games.py":
        return []
    rows = {one.prompt_id: one.example["row"] for one in task.train}
    high = int(config.environment.args.get("high", 30))
    hints = [
        hint
        for one in records
        for hint in hints_of(one, int(rows[one.prompt_id]["number"]), high, task.tokenizer)
    ]
    if not hints:
        return []
    lies, turns, verified = (np.array(column) for column in zip(*hints, strict=True))
    off = of_mass(lies, np.full(len(lies), LIES))
    every = np.ones(len(lies), np.bool_)
    chosen = {"all": every, "after verified turns": verified, "after drawn turns": ~verified}
    chosen |= {f"after turn {turn + 1}": turns == turn for turn in sorted(set(turns.tolist()))}
    found = (sum_of(f"hints that lie: {which}", off, mask) for which, mask in chosen.items())
    return [one for one in found if one is not None]


def hints_of(record: TrainedSample, number: int, high: int, tokenizer: Any) -> Iterator[Hint]:
    """The hints of a sample whose number this is."""
    marks, tokens = record.provenance or "", record.response_tokens or []
    place, guess, last, turn = 0, -1, "", 0
    for is_hint, run in groupby(marks, lambda mark: mark == _OBSERVED):
        length = len(list(run))
        text = tokenizer.decode(tokens[place : place + length], skip_special_tokens=True)
        place += length
        if not is_hint:
            found = NUMBER.search(text)
            guess, last = -1 if found is None else int(found.group()), marks[place - 1]
            continue
        says_higher = "higher" in text or f"to {high}." in text
        verified = last == str(int(Provenance.VERIFIED))
        yield Hint(says_higher != (guess < number), turn, verified)
        turn += 1
