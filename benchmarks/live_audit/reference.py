"""What must hold of a run's records: without chance, and of hints.

`faults` are things that hold of every record of an exactly on-policy run. `statements` are about
the audit's own games, whose hints lie with a known probability whatever was said before: a hint
that is kept or exchanged because of what followed it is seen there, and not in the policy's tokens.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncrl.config.run_config import RunConfig
from asyncrl.monitoring.records.trained_samples import TrainedSample
from asyncrl.rollout.trajectory import Provenance
from asyncrl.tasks.prompts import Task
from benchmarks.live_audit.games import LIES, NUMBER, PLAYED_AGAIN
from benchmarks.live_audit.statements import Statement, of_mass, sum_of
from benchmarks.live_audit.tokens import Tokens

TOLERANCE = {"torch": 1e-4, "vllm": 1e-3, "sglang": 1e-3}
"""Largest difference of a recorded and the recomputed log-probability, in nats, by engine."""


def faults(
    records: Sequence[TrainedSample],
    tokens: Tokens,
    config: RunConfig,
    stops: Sequence[int],
) -> list[str]:
    """A sentence for each thing that does not hold."""
    found = [*_missing(records, config), *_versions(records), *_ends(records, config, stops)]
    found += _visits(records)
    off = np.abs(tokens.recorded - recomputed(tokens))
    limit = max(TOLERANCE[engine.kind] for engine in config.engines)
    if (wrong := int((off > limit).sum())) > 0:
        found.append(
            f"{wrong} of {len(tokens)} recorded log-probabilities are more than {limit:g} nats "
            f"from the recomputed ones, by up to {off.max():.3g}"
        )
    return found


def recomputed(tokens: Tokens) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """`[N]` log-probability of each token; -inf outside of what is sampled."""
    own = np.take_along_axis(tokens.probabilities, tokens.token[:, None], 1)[:, 0]
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(own))


def _missing(records: Sequence[TrainedSample], config: RunConfig) -> list[str]:
    """Step b trains on the groups b n to (b + 1) n - 1, on all samples of each, once."""
    n, size, steps = config.scheduler.groups_per_step, config.scheduler.group_size, config.run.steps
    there = Counter((one.step, one.group, one.sample) for one in records)
    twice = sum(count > 1 for count in there.values())
    found = [f"{twice} samples were trained on twice"] if twice else []
    due = {(g // n, g, s) for g in range(steps * n) for s in range(size)}
    if due - set(there):
        found.append(f"{len(due - set(there))} of {len(due)} samples are missing")
    if set(there) - due:
        found.append(f"{len(set(there) - due)} samples are in a step that is not theirs")
    return found


def _visits(records: Sequence[TrainedSample]) -> list[str]:
    """Each epoch has each prompt once: those of equally many groups, up to one."""
    counts = Counter(prompt for _, prompt in {(one.group, one.prompt_id) for one in records})
    spread = max(counts.values()) - min(counts.values())
    return [f"prompts were visited {sorted(set(counts.values()))} times"] if spread > 1 else []


def _versions(records: Sequence[TrainedSample]) -> list[str]:
    other = sum(any(s.policy_version != one.step for s in one.segments) for one in records)
    return [f"{other} samples have tokens of another version than their step's"] if other else []


def _ends(records: Sequence[TrainedSample], config: RunConfig, stops: Sequence[int]) -> list[str]:
    """A turn ends by its first stop token, a sample by one or at a limit."""
    inside = wrong = 0
    for one in records:
        tokens, marks = one.response_tokens or [], one.provenance or ""
        drawn = [mark != str(int(Provenance.OBSERVED)) for mark in marks]
        stopped = [own and token in stops for own, token in zip(drawn, tokens, strict=True)]
        inside += sum(
            stop and own for stop, (_, own) in zip(stopped, pairwise(drawn), strict=False)
        )
        if one.finish_reason == "stop":
            wrong += not stopped[-1] and not config.sampling.stop
        elif config.environment.name is None:
            wrong += len(tokens) != config.sampling.max_tokens or stopped[-1]
    found = [f"{inside} tokens follow a stop token in their turn"] if inside else []
    return found + ([f"{wrong} samples end otherwise than they say"] if wrong else [])


_OBSERVED = str(int(Provenance.OBSERVED))


class Hint(NamedTuple):
    lies: bool
    turn: int
    verified: bool
    """The last token of the turn before it was accepted again."""


def statements(records: Sequence[TrainedSample], config: RunConfig, task: Task) -> list[Statement]:
    """Of the games; none for other environments."""
    file, _, name = (config.environment.name or "").partition(":")
    if Path(file).name != "games.py" or name in PLAYED_AGAIN:
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
