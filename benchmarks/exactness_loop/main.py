"""Whether the whole loop hands the trainer what it promises: scheduler, generator, engine together.

    python -m benchmarks.exactness_loop [--samples N] [--engine torch|vllm] [--modes a,b] [--json F]

Two fixed sets of weights take turns as policy versions, so that what each step's trajectories must
be distributed as can be enumerated (`exactness_loop_laws`), while updates land in the middle of
rollouts (`exactness_loop_house`). Statements, each by chi-square:

    texts        whole trajectories of the steps of one policy follow that policy
    lengths      so do the response lengths within each step, and their mean: no step favours short
                 answers
    tokens       each token, given those before it, follows the policy of the version that it bears
    logprobs     the recorded log-probabilities are the enumerated ones (greatest difference)

Verify with k = 0 and learning rate 0 promise the first two, every mode the last two.
Ends with status 1 if a p-value is below `ALARM`, or a log-probability is off.

What does the work is imported only where it is needed: see `benchmarks.exactness`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from benchmarks.exactness_loop.distributions import Laws, Verdict, Way
    from benchmarks.exactness_loop.harness import Delivered, Outcome, Setting
    from engine.protocol import Engine

ALARM = 1e-6
"""A statement fails below this p-value: the probability of a false alarm, for each of them."""
VOCABULARY, STOP, LENGTH = 4, 2, 8
PROMPTS = ((1, 0, 1), (1, 1), (0, 0, 0, 1))
TOLERANCE = {"torch": 1e-4, "vllm": 1e-3}
"""Of recorded log-probabilities, nats."""
_SEED, _DRIFT = 18, 0.2
_BINS = 10


@dataclass(frozen=True)
class Mode:
    """One way to run the loop, and what it promises."""

    scheduler: dict[str, Any]
    learning: bool = True
    """False: all versions have the same weights."""
    whole: bool = True
    """Whether whole trajectories follow the policy that trains on them, at staleness 0."""
    slots: int = 64
    top_k: int = 3
    drafts: int = 2
    rebuilt: bool = False
    """Whether tokens behind an update see KV of the new weights only."""
    depths: tuple[int, ...] = (0, 1, 2, 3)
    after_install: int = 0
    """See `exactness_loop_house.Setting`."""
    turns: int = 4
    """Turns of the event loop that a step of the torch engine takes, see `pace`."""


_AHEAD: dict[str, Any] = {"group_size": 16, "groups_per_step": 9}
_OFF = _AHEAD | {"max_off_policy_steps": 1}
MODES: dict[str, Mode] = {
    "verify, 1 ahead": Mode(_AHEAD | {"max_runahead_groups": 9}),
    "verify, 3 ahead": Mode(_AHEAD | {"max_runahead_groups": 27}),
    "verify, no drafts": Mode(_AHEAD | {"max_runahead_groups": 9}, drafts=0),
    "learning rate 0": Mode(
        _AHEAD | {"max_runahead_groups": 9},
        learning=False,
        top_k=VOCABULARY,
        drafts=0,
        after_install=2,
        turns=8,
    ),
    "verify, k = 1": Mode(_OFF | {"max_runahead_groups": 9}, whole=False),
    "keep, k = 1": Mode(_OFF | {"on_update": "keep"}, whole=False),
    "recompute, k = 1": Mode(_OFF | {"on_update": "recompute"}, whole=False, rebuilt=True),
}


@dataclass(frozen=True)
class Finding:
    """What was seen of one mode."""

    mode: str
    verdicts: dict[str, Verdict]
    worst_logprob: float
    """Greatest difference of a recorded log-probability from the enumerated one, nats."""
    staleness: int
    """The greatest."""
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def p_value(self) -> float:
        """The least of all statements."""
        return min(verdict.p_value for verdict in self.verdicts.values())


def policies(learning: bool = True) -> list[Any]:
    """Two random Qwen3 models that differ by 0.13-0.15 (total variation) at a token; or one."""
    import torch

    from benchmarks.tiny_models import random_qwen3

    one, other, two = (random_qwen3(seed, VOCABULARY) for seed in (_SEED, 1000 + _SEED, _SEED))
    with torch.no_grad():
        for mine, theirs in zip(two.parameters(), other.parameters(), strict=True):
            mine.lerp_(theirs, _DRIFT if learning else 0.0)
    return [one, two]


def way() -> Way:
    """How all modes draw."""
    from benchmarks.exactness_loop.distributions import Way

    return Way(LENGTH, STOP, VOCABULARY)


def setting_of(mode: Mode, samples: int, seed: int, **changes: Any) -> Setting:
    """Enough steps for so many samples."""
    from benchmarks.exactness_loop.harness import Setting
    from engine.protocol import SamplingParams
    from scheduler.config import SchedulerConfig

    config = SchedulerConfig(**mode.scheduler)
    steps = max(4, -(-samples // (config.group_size * config.groups_per_step)))
    sampling = SamplingParams(LENGTH, stop_tokens=(STOP,), top_k_logprobs=mode.top_k)
    fields: dict[str, Any] = {
        "depths": mode.depths,
        "after_install": mode.after_install,
        "seed": seed,
    } | changes
    return Setting(config, steps, sampling, **fields)


# --------------------------------------------------------------------- engines


def torch_engine(path: str, mode: Mode) -> Engine:
    """The embedded engine; drafts do not depend on the clock once `pace` was called on it."""
    from engine.config import EngineConfig
    from engine.factory import create_engine
    from engine.torch.config import TorchConfig

    config = EngineConfig(
        kind="torch",
        slots=mode.slots,
        max_model_len=16,
        device="cpu",
        dtype="float32",
        threads=1,
        top_k_logprobs=mode.top_k,
        torch=TorchConfig(max_step_tokens=4096),
    )
    return create_engine(config, path, cache_config=_drafts(mode.drafts), seed=1)


def vllm_engine(path: str, mode: Mode) -> Engine:
    """Real vLLM, with its prefix cache on."""
    from engine.config import EngineConfig
    from engine.factory import create_engine
    from engine.vllm.config import VllmConfig

    config = EngineConfig(
        kind="vllm",
        slots=mode.slots,
        max_model_len=32,
        threads=1,
        top_k_logprobs=mode.top_k,
        vllm=VllmConfig(kv_cache_gib=0.25, max_step_tokens=256, enable_prefix_caching=True),
    )
    return create_engine(config, path, cache_config=_drafts(mode.drafts), seed=1)


ENGINES: dict[str, Callable[[str, Mode], Engine]] = {"torch": torch_engine, "vllm": vllm_engine}


def _drafts(most: int) -> Any:
    from cache.config import CacheConfig

    return CacheConfig(max_draft_tokens=most, min_match=1, min_probability=0.0, max_bytes=1 << 24)


def pace(engine: Any, turns: int) -> None:
    """Slow a torch engine to a step in so many turns of the event loop, and let it draft always.

    A step on this tiny model is no longer than a message; on a real one it is a hundred times as
    long. Without this, the loop's messages would take longer than whole responses, and updates
    would find nothing being written.
    """
    from engine.drafting.fixed_budget import FixedBudget

    core, turn = engine._core, 0  # noqa: SLF001 - there is no other way to slow it
    step = core.step

    def rarely() -> list[Any]:
        nonlocal turn
        turn += 1
        return [] if turn % turns else list(step())

    core.step = rarely
    core._drafter.planner = FixedBudget(max_step_tokens=4096, max_draft_tokens=4)  # noqa: SLF001


async def loop_of(engine: Engine, models: Sequence[Any], setting: Setting, path: Path) -> Outcome:
    """One whole run on a started engine that has the first model's weights as version 0."""
    from benchmarks.exactness_loop.harness import House

    return await House(engine, [m.state_dict() for m in models], PROMPTS, setting, path).run()


async def run(kind: str, mode: Mode, setting: Setting, models: Sequence[Any]) -> Outcome:
    """Start an engine, run the loop, end the engine."""
    with tempfile.TemporaryDirectory() as path:
        models[0].save_pretrained(path)
        engine = ENGINES[kind](path, mode)
        await engine.start()
        try:
            if kind == "torch":
                pace(engine, mode.turns)
            return await loop_of(engine, models, setting, Path(path))
        finally:
            await engine.close()


# ------------------------------------------------------------------ statements


def find(name: str, mode: Mode, delivered: Sequence[Delivered], laws: Laws) -> Finding:
    """Everything that the mode promises of these trajectories."""
    worst, tokens = token_statement(delivered, laws, rebuilt=mode.rebuilt)
    verdicts = dict(tokens)
    if mode.whole:
        verdicts |= whole_statement(delivered, laws)
    staleness = max(int(one.trajectory.staleness(one.step).max()) for one in delivered)
    return Finding(name, verdicts, worst, staleness)


def whole_statement(delivered: Sequence[Delivered], laws: Laws) -> dict[str, Verdict]:
    """Whole trajectories, and lengths within each step, as the policy that trains on them."""
    from benchmarks.exactness_loop.distributions import judge

    out: dict[str, Verdict] = {}
    prompts = range(len(laws.prompts))
    for policy in (0, 1):
        mine = [one for one in delivered if one.step % 2 == policy]
        law = {prompt: laws.law(policy, prompt) for prompt in prompts}
        texts = [(one.prompt, one.text) for one in mine]
        out[f"texts of policy {'AB'[policy]}"] = judge(texts, law, pool=lambda t: (len(t), t[:2]))
    lengths, by_step = _lengths(delivered, laws)
    out["lengths within each step"] = judge(lengths, by_step)
    out["mean length"] = mean_length(delivered, laws)
    least = min(
        (judge([p for p in lengths if p[0] == step], by_step) for step in by_step),
        key=lambda verdict: verdict.p_value,
    )
    # The least of as many p-values.
    out["lengths, worst step"] = replace(least, p_value=min(1.0, least.p_value * len(by_step)))
    return out


def mean_length(delivered: Sequence[Delivered], laws: Laws) -> Verdict:
    """A normal test of the mean, two-sided; its `tv` is the bias in tokens, signed."""
    from benchmarks.exactness_loop.distributions import Verdict

    moments: dict[tuple[int, int], tuple[float, float]] = {}
    excess = variance = 0.0
    for one in delivered:
        key = (one.step % 2, one.prompt)
        if key not in moments:
            law = laws.law(*key).items()
            mean = sum(len(text) * mass for text, mass in law)
            moments[key] = mean, sum(len(text) ** 2 * mass for text, mass in law) - mean**2
        excess += len(one.text) - moments[key][0]
        variance += moments[key][1]
    n, sigma = len(delivered), math.sqrt(variance)
    p = math.erfc(abs(excess) / sigma / math.sqrt(2))
    return Verdict(n, p, 1, excess / n, sigma / n * math.sqrt(2 / math.pi))


def _lengths(delivered: Sequence[Delivered], laws: Laws) -> Any:
    """(step, length) pairs and each step's law, prompts mixed as they were asked for."""
    pairs = [(one.step, len(one.text)) for one in delivered]
    asked: dict[int, Counter[int]] = {}
    for one in delivered:
        asked.setdefault(one.step, Counter())[one.prompt] += 1
    of_length: dict[tuple[int, int], dict[int, float]] = {}
    mixed: dict[int, dict[int, float]] = {}
    for step, counts in asked.items():
        law = dict.fromkeys(range(1, laws.way.length + 1), 0.0)
        for prompt, count in counts.items():
            key = (step % 2, prompt)
            if key not in of_length:
                of_length[key] = dict.fromkeys(law, 0.0)
                for text, mass in laws.law(*key).items():
                    of_length[key][len(text)] += mass
            for length, mass in of_length[key].items():
                law[length] += mass * count / counts.total()
        mixed[step] = law
    return pairs, mixed


def token_statement(
    delivered: Sequence[Delivered], laws: Laws, *, rebuilt: bool
) -> tuple[float, dict[str, Verdict]]:
    """Each token given those before it follows the policy of the version that it bears.

    Two tests: by context, and for all tokens together by randomised probability integral
    transforms (uniform if the conditional law is right, whatever the context), by policy, by
    place, and by whether the weights changed before it.

    Behind an update a response goes on with the KV that it has, or, if it had to give its slot
    back, with new KV: the policy's distribution given the text is one of two. Which one is told
    by the reported top K of the first place behind the update, not by what was drawn there.

    Args:
        delivered: trajectories of at most two versions each.
        laws: what is enumerated.
        rebuilt: KV of older weights is never used, whatever the top K say.
    """
    from benchmarks.exactness_loop.distributions import judge

    chance = np.random.default_rng(0)
    worst, contexts, law, ranks = 0.0, [], {}, []
    for one in delivered:
        segments = one.trajectory.segments
        assert len(segments) <= 2, segments
        recorded = one.trajectory.behaviour_logprobs
        for segment in segments:
            policy, swap = segment.policy_version % 2, segment.start
            kind, table = ("given", 0), laws.given(policy, one.prompt)
            if swap and not rebuilt:
                stale = laws.across(1 - policy, one.prompt, swap)
                if _listed(one, swap, stale) < _listed(one, swap, table):
                    kind, table = ("across", swap), stale
            for at in range(segment.start, segment.end):
                row, token = table[one.text[:at]], one.text[at]
                worst = max(worst, abs(float(recorded[at]) - float(np.log(row[token]))))
                key = (policy, one.prompt, kind, one.text[:at])
                contexts.append((key, token))
                law[key] = dict(enumerate(row))
                rank = row[:token].sum() + chance.random() * row[token]
                ranks.append(((policy, at, swap > 0), min(int(rank * _BINS), _BINS - 1)))
    flat = {key: dict.fromkeys(range(_BINS), 1 / _BINS) for key, _ in ranks}
    return worst, {"tokens by context": judge(contexts, law), "all tokens": judge(ranks, flat)}


def _listed(one: Delivered, at: int, table: dict[tuple[int, ...], Any]) -> float:
    """Difference of the reported top K to what a table says; knows nothing of the token drawn."""
    ids, logprobs = one.trajectory.topk_ids[at], one.trajectory.topk_logprobs[at]
    known = ids >= 0
    return float(np.abs(np.log(table[one.text[:at]][ids[known]]) - logprobs[known]).max())


def rewards_fit(delivered: Sequence[Delivered]) -> bool:
    """Whether each reward is that of the delivered text, not of one that verification changed."""
    from benchmarks.exactness_loop.harness import reward_of

    return all(one.reward == reward_of(one.text) for one in delivered)


# --------------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run modes, print and write what was found."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from benchmarks.exactness_loop.distributions import Laws
    from benchmarks.report import write_json

    parser = argparse.ArgumentParser(description="what the whole loop hands to the trainer")
    parser.add_argument("--samples", type=int, default=50_000, help="for each mode")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="torch")
    parser.add_argument("--modes", help=f"some of: {'; '.join(MODES)} (by ;)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    names = options.modes.split(";") if options.modes else list(MODES)
    unknown = [name for name in names if name not in MODES]
    if unknown:
        parser.error(f"no mode {unknown[0]!r}: {'; '.join(MODES)}")
    torch.set_num_threads(1)
    table = Table(title=f"whole loop, {options.engine}")
    for column in ("mode", "statement", "samples", "cells", "TV", "by chance", "p-value", ""):
        table.add_column(column, justify="left" if column in ("mode", "statement") else "right")
    raw: dict[str, Any] = {}
    fine = True
    for name in names:
        mode, began = MODES[name], time.perf_counter()
        models = policies(mode.learning)
        laws = Laws(models, PROMPTS, way())
        setting = setting_of(mode, options.samples, options.seed)
        outcome = asyncio.run(run(options.engine, mode, setting, models))
        seen = find(name, mode, outcome.delivered, laws)
        good = seen.p_value >= ALARM and seen.worst_logprob <= TOLERANCE[options.engine]
        good &= rewards_fit(outcome.delivered) and seen.staleness <= (0 if mode.whole else 1)
        fine &= good
        for what, verdict in seen.verdicts.items():
            table.add_row(
                name, what, f"{verdict.samples:,}", f"{verdict.cells:,}", f"{verdict.tv:.4f}",
                f"{verdict.tv_by_chance:.4f}", f"{verdict.p_value:.2g}",
                "ok" if verdict.p_value >= ALARM else "WRONG",
            )  # fmt: skip
        raw[name] = {
            "statements": {what: vars(verdict) for what, verdict in seen.verdicts.items()},
            "worst_logprob": seen.worst_logprob, "staleness": seen.staleness, "fine": good,
            "verified": outcome.verified, "rejected": outcome.rejected, "cut": outcome.cut,
            "drafts_accepted": outcome.accepted, "seconds": time.perf_counter() - began,
        }  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    if options.json:
        write_json(options.json, "exactness_loop", raw, {})
    return 0 if fine else 1
