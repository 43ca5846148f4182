"""What `max_runahead_groups: auto` chooses: by cost, within its budget, and never in the dark."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from asyncrl.scheduler.run_ahead import BUDGET, DEPTHS, OWN, SHARED, WINDOW, Cost, RunAhead

STEPS = 600
TOKENS = 1000


@dataclass
class Played:
    """A run whose step takes a time that depends on the depth at which it was begun."""

    cost: Callable[[int], float]
    """Seconds of a step by its depth."""
    shared: bool = False
    noise: float = 0.08
    """Standard deviation of a step's time, as a share."""
    seed: int = 0
    steps: int = STEPS
    depths: list[int] = field(default_factory=list)
    """Of each step."""
    changes: list[int] = field(default_factory=list)
    """Steps after which the depth was changed."""

    def __post_init__(self) -> None:
        self.ahead = RunAhead(shared=self.shared, groups_per_step=4)
        self._rng = random.Random(self.seed)

    def play(self, steps: int | None = None) -> Played:
        bounds = [(0, self.ahead.groups)]
        issued = 0
        for step in range(self.steps if steps is None else steps):
            here = next(groups for first, groups in reversed(bounds) if first <= step) // 4
            self.depths.append(here)
            issued = max(issued, step + here + 1)
            seconds = self.cost(here) * max(0.1, self._rng.gauss(1, self.noise))
            self.ahead.on_step(
                step, seconds=seconds, tokens=TOKENS, next_free=issued + 1, last=self.steps - 1
            )
            if self.ahead.groups != bounds[-1][1]:
                bounds.append((issued + 1, self.ahead.groups))
                self.changes.append(step)
        return self

    @property
    def lost(self) -> float:
        """Time over that of the depth with which the run began, minus 1, without noise."""
        first = self.cost(OWN if not self.shared else SHARED)
        return sum(map(self.cost, self.depths)) / (first * len(self.depths)) - 1


def valley(best: int, slope: float = 0.1) -> Callable[[int], float]:
    """Seconds that rise by a share for each rung of `DEPTHS` away from the best depth."""
    return lambda depth: 1 + slope * abs(DEPTHS.index(depth) - DEPTHS.index(best))


def test_the_cost_is_that_of_all_tokens_and_a_long_step_counts_little() -> None:
    steps = [(1.0, 100), (3.0, 300), (2.0, 200)]
    cost = Cost.of(steps)
    assert (cost.mean, cost.error) == (pytest.approx(0.01), pytest.approx(0))
    rng = random.Random(0)
    many = [(rng.gauss(1, 0.1), 100) for _ in range(400)]
    assert Cost.of(many).error == pytest.approx(0.001 / 400**0.5, rel=0.1)
    assert Cost.of([*steps, (1000.0, 200)]).mean == pytest.approx(0.02), "as four medians"
    gain = Cost(0.9, 0.03).gain_over(Cost(1.0, 0.04))
    assert gain.mean == pytest.approx(0.1)
    assert gain.error == pytest.approx(0.9 * ((1 / 30) ** 2 + 0.04**2) ** 0.5)


@pytest.mark.parametrize("best", DEPTHS)
@pytest.mark.parametrize("shared", [False, True])
def test_it_goes_to_the_cheapest_depth(best: int, shared: bool) -> None:
    """Of those that differ by a tenth a rung; now and then it tries the neighbours again."""
    played = Played(valley(best), shared, steps=3000).play()
    last = played.depths[-200:]
    assert sum(map(valley(best), last)) / len(last) < 1.08, played.ahead.why


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("slope", [0.0, 0.02, 0.3])
def test_it_is_never_much_slower_than_what_it_began_with(
    shared: bool, noise: float, slope: float
) -> None:
    """Where the first depth is the best."""
    best = SHARED if shared else OWN
    for seed in range(12):
        played = Played(valley(best, slope), shared, noise, seed).play()
        most = 2 * BUDGET if noise < 0.2 else 4 * BUDGET  # a wrong verdict stays for a while
        assert played.lost <= most, (seed, played.lost, played.changes)


def test_where_depth_makes_no_difference_it_seldom_changes() -> None:
    changes = [len(Played(lambda _: 1.0, seed=seed).play().changes) for seed in range(12)]
    assert max(changes) < STEPS / 2 / WINDOW


def test_nothing_is_tried_that_could_not_be_measured_before_the_end() -> None:
    short = Played(valley(8, 0.3), steps=24).play()
    assert set(short.depths) == {OWN}
    assert not short.changes


def test_a_clearly_slower_trial_ends_early() -> None:
    played = Played(lambda depth: 1.0 if depth == OWN else 3.0, noise=0.02, steps=200).play()
    begun, ended = played.changes[:2]
    assert ended - begun < WINDOW + max(DEPTHS)
    assert "more time a token than 2 steps, which stay" in played.ahead.why


def test_a_disturbed_trial_is_given_up_and_what_was_measured_is_forgotten() -> None:
    played = Played(valley(4, 0.2), steps=400)
    while played.ahead.trying is None:
        played.depths.clear()
        played.ahead.on_step(
            played.ahead._count, seconds=1.0, tokens=TOKENS, next_free=played.ahead._count + 4,
            last=399,
        )  # fmt: skip
    step = played.ahead._count
    assert played.ahead.groups != OWN * 4
    played.ahead.restart()
    played.ahead.on_step(step, seconds=50.0, tokens=TOKENS, next_free=step + 4, last=399)
    assert played.ahead.trying is None
    assert played.ahead.groups == OWN * 4
    for later in range(step + 1, step + 5):
        played.ahead.on_step(later, seconds=50.0, tokens=TOKENS, next_free=later + 4, last=399)
        assert not played.ahead._base, "steps begun under the trial"
    played.ahead.on_step(step + 5, seconds=1.0, tokens=TOKENS, next_free=step + 9, last=399)
    assert played.ahead._base == [(1.0, TOKENS)]


def test_a_resumed_run_continues_with_the_depth_that_it_had() -> None:
    ahead = RunAhead(shared=True, groups_per_step=4, steps=3)
    assert (ahead.groups, ahead.why) == (12, "3 steps, as before the run was resumed")
    assert RunAhead(shared=True, groups_per_step=4, steps=5).groups == SHARED, "none of DEPTHS"
