"""What must hold of a run's records: without chance, of hints, and next to plain sampling.

`faults` are things that hold of every record of an exactly on-policy run. `statements` are about
the audit's own games, whose hints lie with a known probability whatever was said before: a hint
that is kept or exchanged because of what followed it is seen there, and not in the policy's tokens.

`compare` draws the same groups again. A step's samples are draws of the version that trains on
them, so for each group as many responses are sampled with `transformers` alone from the checkpoint.
The differences of the groups' means have mean 0; their sum, divided by the root of the sum of their
squares, is standard normal if there are many.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncrl.config.run_config import RunConfig
from asyncrl.monitoring.records.trained_samples import TrainedSample
from asyncrl.rollout.trajectory import Provenance
from asyncrl.tasks.prompts import Task
from benchmarks.live_audit.games import LIES, NUMBER
from benchmarks.live_audit.statements import Statement, of_mass, sum_of, two_sided
from benchmarks.live_audit.tokens import Tokens, load, policy_of

TOLERANCE = {"torch": 1e-4, "vllm": 1e-3, "sglang": 1e-3}
"""Largest difference of a recorded and the recomputed log-probability, in nats, by engine."""
Reward = Callable[[TrainedSample], float]


def faults(
    records: Sequence[TrainedSample],
    tokens: Tokens,
    config: RunConfig,
    stops: Sequence[int],
    reward: Reward | None = None,
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
    if reward is not None:
        wrong = sum(abs(one.reward - reward(one)) > 1e-6 for one in records)
        if wrong:
            found.append(f"{wrong} rewards are not those of the text that was trained on")
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


Score = Callable[[TrainedSample, list[int]], float]
"""The reward of a response (without its stop token's special meaning) to a record's prompt."""


def compare(
    records: Sequence[TrainedSample],
    models: Mapping[int, str],
    config: RunConfig,
    stops: Sequence[int],
    score: Score | None,
    seed: int,
) -> list[Statement]:
    """A statement for each number. Single turns only."""
    torch.manual_seed(seed)
    off: defaultdict[str, list[float]] = defaultdict(list)
    by_step: defaultdict[int, dict[int, list[TrainedSample]]] = defaultdict(dict)
    for one in records:
        by_step[one.step].setdefault(one.group, []).append(one)
    for step, groups in sorted(by_step.items()):
        model = load(models[step])
        prompts = [one.prompt_tokens or [] for group in groups.values() for one in group]
        texts = iter(sample(model, prompts, config, stops))
        for group in groups.values():
            for name, value in _differences(group, [next(texts) for _ in group], score, stops):
                off[name].append(value)
    return [_statement(name, np.array(values)) for name, values in off.items()]


def _differences(
    group: Sequence[TrainedSample],
    texts: Sequence[list[int]],
    score: Score | None,
    stops: Sequence[int],
) -> list[tuple[str, float]]:
    """Trained minus reference: the mean of the group's samples."""
    mine = [one.response_tokens or [] for one in group]

    def mean(of: Callable[[list[int]], float]) -> float:
        return float(np.mean([of(one) for one in mine]) - np.mean([of(one) for one in texts]))

    found = [
        ("length", mean(len)),
        ("length, squared", mean(lambda one: len(one) ** 2)),
        ("ended by a stop token", mean(lambda one: one[-1] in stops)),
        ("first token's id", mean(lambda one: one[0])),
        ("sum of token ids", mean(sum)),
        ("different texts", len(set(map(tuple, mine))) - len(set(map(tuple, texts)))),
    ]
    if score is not None:
        theirs = [score(one, text) for one, text in zip(group, texts, strict=True)]
        own = [one.reward for one in group]
        found.append(("reward", float(np.mean(own) - np.mean(theirs))))
        signal = float(min(own) != max(own)) - float(min(theirs) != max(theirs))
        found.append(("group has rewards that differ", signal))
        longer = float(np.cov(own, [len(one) for one in mine])[0, 1])
        found.append(
            ("reward x length", longer - float(np.cov(theirs, [len(one) for one in texts])[0, 1]))
        )
    return found


def _statement(name: str, off: np.ndarray[Any, np.dtype[np.float64]]) -> Statement:
    scale = math.sqrt(float((off**2).sum())) or 1.0
    z = float(off.sum()) / scale
    return Statement(f"like plain sampling: {name}", len(off), z, two_sided(z), float(off.mean()))


@torch.no_grad()
def sample(
    model: Any, prompts: Sequence[Sequence[int]], config: RunConfig, stops: Sequence[int]
) -> list[list[int]]:
    """A response to each prompt, token by token, with transformers' KV cache; left-padded."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(one)) + list(one) for one in prompts])
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
    places = (mask.cumsum(1) - 1).clamp(min=0)
    texts: list[list[int]] = [[] for _ in prompts]
    active, cache = list(range(len(prompts))), None
    for _ in range(config.sampling.max_tokens):
        out = model(
            ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True
        )
        cache = out.past_key_values
        p = torch.from_numpy(policy_of(out.logits[:, -1], config))
        drawn = torch.multinomial(p, 1)
        for row in active:
            texts[row].append(int(drawn[row]))
        active = [row for row in active if texts[row][-1] not in stops]
        if not active:
            break
        ids = drawn
        mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=mask.dtype)], 1)
        places = places[:, -1:] + 1
    return texts
