"""What budgets by worth and run-ahead by measurement gain where a step waits for its longest sample.

    python -m benchmarks.long_tail [--quick] [--json FILE]

`urgent`: one generator on a modelled H200 with 7B decodes, with the planner of every engine, the
samples that a step waits for (lengths with a tail: median 1,000, longest 16,000) beside run-ahead,
until the last of them ends: without drafts, with a planner to which all rows are alike, and with
`worth_of`. The three see the same lengths and the same drafts. Part of the samples repeat
themselves (0.98 a token), part do less (0.8), part are new (0.3). `urgent_over_equal` is the
geometric mean of the ratios of times over numbers of rows; `tokens_per_second_kept` the least ratio
of speeds.

`auto`: the simulator (`asyncrl.simulation`) runs fixed depths of run-ahead and `auto`;
`auto_over_best_fixed` is the largest ratio of seconds a token in the second half of the runs, over
numbers of generators and both laws of a rejected answer's length. `staleness_max` is over all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.drafting.planner import DraftPlanner
from asyncrl.engine.drafting.worth import worth_of
from asyncrl.simulation.cost import DEVICES, MODELS, Cost, roofline
from asyncrl.simulation.study import Cluster, replaced
from benchmarks.harness import parser_of, pick, report, table, targets_table

NONE, EQUAL, URGENT = "none", "equal", "urgent"
PLANS = (NONE, EQUAL, URGENT)
KINDS = ((0.4, 0.98), (0.3, 0.8), (0.3, 0.3))
"""(share of the samples, acceptance of a drafted token) of each kind."""
DEPTH = 16
"""Tokens that are drafted for a row at most."""
PROMPT = 200
MEDIAN, SIGMA, LONGEST = 1000, 1.0, 16_000
REMEMBERED = 0.5
"""Share of the samples that continue after a rejection and know about their old length."""
TARGETS = {
    "urgent_over_equal": 1.1,
    "tokens_per_second_kept": 0.98,
    "staleness_max": 0.0,
    "auto_over_best_fixed": 1.03,
}
FLOORS = frozenset({"urgent_over_equal", "tokens_per_second_kept"})
Ints = NDArray[np.int64]


class Decoded(NamedTuple):
    seconds: float
    """Until the last due sample ended."""
    tokens_per_second: float


@dataclass
class Rollout:
    """One generator: `slots` rows, half of which a step waits for when it begins."""

    slots: int
    plan: str
    cost: Cost
    seed: int

    def decode(self) -> Decoded:
        """Decode until all due samples have ended; run-ahead takes their slots."""
        rng, slots = np.random.default_rng(self.seed), self.slots
        count = 20 * slots
        drawn = np.exp(rng.normal(math.log(MEDIAN), SIGMA, count))
        length = np.clip(drawn, 16, LONGEST).astype(np.int64)
        shares, rates = zip(*KINDS, strict=True)
        rate = rng.choice(rates, count, p=shares)
        remembers = rng.random(count) < REMEMBERED
        due = np.arange(count) < slots // 2
        done = np.zeros(count, np.int64)
        active, following = np.arange(slots), slots
        planner = DraftPlanner(max_step_tokens=8192, max_draft_tokens=DEPTH)
        seconds, tokens = 0.0, 0
        while due[active].any():
            left = length[active] - done[active]
            known = np.where(remembers[active], left, 0)
            fed = self._draft(planner, left, rate[active], done[active], known, ~due[active])
            context = int((PROMPT + done[active]).sum())
            took = self.cost.step(len(active) + int(fed.sum()), context)
            # Every plan sees the same drafts: what is accepted depends on the sample and its place.
            hits = _hits(self.seed, active, done[active], rate[active])
            accepted = np.minimum(fed, hits)
            self._learn(planner, rate[active], fed, accepted, len(active), context, took)
            grown = np.minimum(accepted + 1, left)
            done[active] += grown
            seconds += took
            tokens += int(grown.sum())
            over = done[active] >= length[active]
            fresh = np.arange(following, following + int(over.sum()))
            following += len(fresh)
            active = np.concatenate((active[~over], fresh[fresh < count]))
        return Decoded(seconds, tokens / seconds)

    def _draft(
        self,
        planner: DraftPlanner,
        left: Ints,
        rate: NDArray[np.float64],
        generated: Ints,
        known: Ints,
        ahead: NDArray[np.bool_],
    ) -> Ints:
        """Return the number of tokens that are drafted for each row."""
        nothing = np.zeros(len(left), np.int64)
        if self.plan == NONE:
            return nothing
        budgets, least = planner.ask(left.astype(np.int32))
        if not budgets.any():
            return nothing
        paths = rate[:, None] ** np.arange(1, DEPTH + 1)
        asked = (np.arange(DEPTH) < budgets[:, None]) & (paths >= least)
        offsets = np.concatenate(([0], np.cumsum(asked.sum(1)))).astype(np.int32)
        worth = worth_of(ahead.astype(np.int64), generated, known) if self.plan == URGENT else None
        estimates = paths[asked].astype(np.float32)
        return planner.choose(estimates, offsets, rows=len(left), worth=worth).astype(np.int64)

    def _learn(
        self,
        planner: DraftPlanner,
        rate: NDArray[np.float64],
        fed: Ints,
        accepted: Ints,
        rows: int,
        context: int,
        seconds: float,
    ) -> None:
        place = np.arange(DEPTH)
        inside = place < fed[:, None]
        paths = (rate[:, None] ** (place + 1)).astype(np.float32)
        planner.judge(paths[inside], (place < accepted[:, None])[inside])
        total = rows + int(fed.sum())
        planner.observe(tokens=total, rows=rows, context=context, seconds=seconds)


def _hits(seed: int, samples: Ints, places: Ints, rate: NDArray[np.float64]) -> Ints:
    """Return how many drafted tokens would be accepted, by sample and place only."""
    state = (samples.astype(np.uint64) << np.uint64(20)) + places.astype(np.uint64)
    state = (state + np.uint64(seed * 2654435761)) * np.uint64(0x9E3779B97F4A7C15)
    state ^= state >> np.uint64(29)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(32)
    uniform = (state >> np.uint64(11)).astype(np.float64) / 2**53
    # P(at least k accepted) = rate^k
    return np.floor(np.log(np.maximum(uniform, 1e-300)) / np.log(rate)).astype(np.int64)


def urgent(slots: Sequence[int], seeds: int) -> dict[int, dict[str, list[Decoded]]]:
    """Decode by every plan, by the number of rows."""
    cost = roofline(MODELS["7b"], DEVICES["h200"], trainer_devices=1)
    return {
        rows: {
            plan: [Rollout(rows, plan, cost, seed).decode() for seed in range(seeds)]
            for plan in PLANS
        }
        for rows in slots
    }


@dataclass(frozen=True)
class Depths:
    """Seconds a trained token, by depth of run-ahead in steps; "auto" is the chosen one."""

    generators: int
    new_length: float
    seconds: dict[str, float]
    staleness: int
    chosen: str

    @property
    def over_best(self) -> float:
        fixed = [value for name, value in self.seconds.items() if name != "auto"]
        return self.seconds["auto"] / min(fixed)


def depths(generators: int, new_length: float, steps: int, fixed: Sequence[int]) -> Depths:
    """Simulate fixed depths and `auto`; the first half of the steps is not counted."""
    cluster = Cluster(
        generators=generators, slots=16, steps=steps, warm_up=steps // 2, cool_down=8,
        new_length=new_length, rule="block", median=300, longest=4096,
    )  # fmt: skip
    seconds, staleness = {}, 0
    for depth in (*fixed, "auto"):
        groups = depth if isinstance(depth, str) else depth * cluster.step_groups
        settings = {"on_update": "verify", "max_off_policy_steps": 0}
        outcome = cluster.run(replaced(cluster.scheduler, **settings, max_runahead_groups=groups))
        seconds[str(depth)] = 1.0 / outcome.tokens_per_second
        staleness = max(staleness, outcome.staleness_max)
    return Depths(generators, new_length, seconds, staleness, outcome.run_ahead)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "fewer rows and generators")
    options = parser.parse_args(arguments)
    slots, seeds = pick(options, ((16, 32, 64, 128, 256), 5), ((64, 128), 3), ((8,), 1))
    found = urgent(slots, seeds)
    generators, steps = pick(options, ((1, 4, 32, 256), 200), ((1, 4, 32), 160), ((1,), 24))
    fixed = pick(options, (1, 2, 3, 4, 6), (1, 2, 3, 4, 6), (1, 2))
    runs = [
        depths(count, law, steps, fixed)
        for count, law in itertools.product(
            generators, pick(options, (0.0, 1.0), (0.0, 1.0), (0.0,))
        )
    ]
    ratios = {
        "urgent_over_equal": math.exp(
            float(np.mean([math.log(one) for rows in found for one in _over(found[rows], EQUAL)]))
        ),
        "tokens_per_second_kept": min(_kept(found[rows]) for rows in found),
        "staleness_max": float(max(one.staleness for one in runs)),
        "auto_over_best_fixed": max(one.over_best for one in runs),
    }
    raw: dict[str, Any] = {
        "urgent": {
            str(rows): {plan: [one._asdict() for one in runs_of] for plan, runs_of in by.items()}
            for rows, by in found.items()
        },
        "auto": [dataclasses.asdict(one) for one in runs],
    }
    by_rows = [
        [rows, *(f"{np.mean([one.seconds for one in by[plan]]):.1f}" for plan in PLANS),
         f"{math.exp(np.mean(np.log(_over(by, NONE)))):.2f}",
         f"{math.exp(np.mean(np.log(_over(by, EQUAL)))):.3f}", f"{_kept(by):.3f}"]
        for rows, by in found.items()
    ]  # fmt: skip
    by_depth = [
        [one.generators, "new" if one.new_length else "kept",
         *(f"{1e6 * one.seconds[str(depth)]:.1f}" for depth in (*fixed, "auto")), one.chosen,
         f"{one.over_best:.3f}"]
        for one in runs
    ]  # fmt: skip
    tables = (
        table(
            "A step's last sample, s",
            "rows,no drafts,equal,urgent,none / urgent,equal / urgent,tokens/s kept",
            by_rows,
        ),
        table(
            "Simulated us a token by steps of run-ahead",
            f"generators,rejected length,{','.join(map(str, fixed))},auto,chose,auto / best",
            by_depth,
        ),
        targets_table(ratios, TARGETS, FLOORS),
    )
    report(options, "long_tail", raw, ratios, *tables)
    return 0


def _over(by: dict[str, list[Decoded]], plan: str) -> list[float]:
    pairs = zip(by[plan], by[URGENT], strict=True)
    return [other.seconds / mine.seconds for other, mine in pairs]


def _kept(by: dict[str, list[Decoded]]) -> float:
    """Tokens a second over those of equal budgets, in the mean over the seeds."""
    speeds = [np.mean([one.tokens_per_second for one in by[plan]]) for plan in (URGENT, EQUAL)]
    return float(speeds[0] / speeds[1])


if __name__ == "__main__":
    raise SystemExit(main())
