"""What budgets by worth, and run-ahead by measurement, gain where a step waits for long samples.

    python -m benchmarks.long_tail [--quick] [--json FILE]

`urgent`: one generator on a modelled H200 with 7B decodes, with the planner of every engine, the
samples that a step waits for (lengths with a tail: median 1,000, longest 16,000) beside run-ahead,
until the last of them ends: without drafts, with a planner to which all rows are alike, and with
`worth_of`. The three see the same lengths and the same drafts. Part of the samples repeat
themselves (0.98 a token), part do less (0.8), part are new (0.3). `urgent_over_equal` is the
geometric mean of the ratios of times over numbers of rows; `tokens_per_second_kept` the least ratio
of the tokens a second that are expected, at each step of the same rows.

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
from rich.table import Table

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
FIXED = (1, 2, 3, 4, 6)
"""Steps of run-ahead that `auto` is compared with."""
LAWS = (0.0, 1.0)
"""A rejected answer keeps its length, or gets a new one (`Conditions.new_length`)."""
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
    kept: float
    """Tokens a second that were expected, over those of equal budgets for the same rows."""


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
        planners = [DraftPlanner(max_step_tokens=8192, max_draft_tokens=DEPTH) for _ in range(2)]
        expected = np.zeros((2, 2))
        """Tokens and seconds, by this plan and with equal budgets."""
        seconds = 0.0
        while due[active].any():
            left = length[active] - done[active]
            known = np.where(remembers[active], left, 0)
            worth = worth_of((~due[active]).astype(np.int64), done[active], known)
            budgets = [
                self._draft(planners[0], left, rate[active], worth),
                self._draft(planners[1], left, rate[active], None),
            ]
            context = int((PROMPT + done[active]).sum())
            for i, fed in enumerate(budgets):
                expected[i] += self._expected(fed, rate[active], context)
            fed = budgets[0]
            took = self.cost.step(len(active) + int(fed.sum()), context)
            # All plans have the same luck: what is accepted depends on the sample and its place.
            hits = _hits(self.seed, active, done[active], rate[active])
            accepted = np.minimum(fed, hits)
            for planner in planners:
                _learn(planner, rate[active], fed, accepted, context, took)
            done[active] += np.minimum(accepted + 1, left)
            seconds += took
            over = done[active] >= length[active]
            fresh = np.arange(following, following + int(over.sum()))
            following += len(fresh)
            active = np.concatenate((active[~over], fresh[fresh < count]))
        speed, equal = expected[:, 0] / expected[:, 1]
        return Decoded(seconds, float(speed / equal))

    def _expected(self, fed: Ints, rate: NDArray[np.float64], context: int) -> tuple[float, float]:
        """Return the tokens that a step is expected to yield, and its seconds."""
        gains = rate * (1 - rate**fed) / (1 - rate)
        tokens = len(fed) + float(gains.sum())
        return tokens, self.cost.step(len(fed) + int(fed.sum()), context)

    def _draft(
        self,
        planner: DraftPlanner,
        left: Ints,
        rate: NDArray[np.float64],
        worth: NDArray[np.float64] | None,
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
        estimates = paths[asked].astype(np.float32)
        worth = worth if self.plan == URGENT else None
        return planner.choose(estimates, offsets, rows=len(left), worth=worth).astype(np.int64)


def _learn(
    planner: DraftPlanner,
    rate: NDArray[np.float64],
    fed: Ints,
    accepted: Ints,
    context: int,
    seconds: float,
) -> None:
    place, rows = np.arange(DEPTH), len(fed)
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
    options = parser_of(__doc__, "fewer rows and generators").parse_args(arguments)
    slots, seeds = pick(options, ((16, 32, 64, 128, 256), 5), ((64, 128), 3), ((8,), 1))
    generators, steps = pick(options, ((1, 4, 32, 256), 200), ((1, 4, 32), 160), ((1,), 24))
    fixed = pick(options, FIXED, FIXED, (1, 2))
    laws = pick(options, LAWS, LAWS, LAWS[:1])
    found = urgent(slots, seeds)
    runs = [depths(*one, steps, fixed) for one in itertools.product(generators, laws)]
    logs = [math.log(one) for by in found.values() for one in _over(by, EQUAL)]
    ratios = {
        "urgent_over_equal": math.exp(float(np.mean(logs))),
        "tokens_per_second_kept": min(_kept(by) for by in found.values()),
        "staleness_max": float(max(one.staleness for one in runs)),
        "auto_over_best_fixed": max(one.over_best for one in runs),
    }
    raw: dict[str, Any] = {
        "urgent": {
            str(rows): {plan: [one.seconds for one in by[plan]] for plan in PLANS}
            for rows, by in found.items()
        },
        "auto": [dataclasses.asdict(one) for one in runs],
    }
    tables = _of_rows(found), _of_depths(runs, fixed), targets_table(ratios, TARGETS, FLOORS)
    report(options, "long_tail", raw, ratios, *tables)
    return 0


def _of_rows(found: dict[int, dict[str, list[Decoded]]]) -> Table:
    lines = [
        [
            rows,
            *(f"{np.mean([one.seconds for one in by[plan]]):.1f}" for plan in PLANS),
            *(f"{math.exp(np.mean(np.log(_over(by, plan)))):.3f}" for plan in (NONE, EQUAL)),
            f"{_kept(by):.3f}",
        ]
        for rows, by in found.items()
    ]
    heads = "rows,no drafts,equal,urgent,none / urgent,equal / urgent,tokens/s kept"
    return table("Seconds until a step's last sample has ended", heads, lines)


def _of_depths(runs: Sequence[Depths], fixed: Sequence[int]) -> Table:
    lines = [
        [
            one.generators,
            "new" if one.new_length else "kept",
            *(f"{1e6 * one.seconds[str(depth)]:.1f}" for depth in (*fixed, "auto")),
            one.chosen,
            f"{one.over_best:.3f}",
        ]
        for one in runs
    ]
    depths_named = ",".join(map(str, fixed))
    heads = f"generators,rejected length,{depths_named},auto,chose,auto / best"
    return table("Simulated us a trained token by steps of run-ahead", heads, lines)


def _over(by: dict[str, list[Decoded]], plan: str) -> list[float]:
    pairs = zip(by[plan], by[URGENT], strict=True)
    return [other.seconds / mine.seconds for other, mine in pairs]


def _kept(by: dict[str, list[Decoded]]) -> float:
    return float(np.mean([one.kept for one in by[URGENT]]))


if __name__ == "__main__":
    raise SystemExit(main())
