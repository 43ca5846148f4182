"""Which steps a planner is told the time of, and how long they took."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from fake_drafting import FixedPlanner

from asyncrl.engine.remote.worker.drafting import StepTimer


@dataclass
class Timed:
    """A timer, and steps of one row that draw 1 ms after they begin."""

    guess_breaks: bool = False
    now: float = 0.0
    planner: FixedPlanner = field(default_factory=lambda: FixedPlanner(3))

    def __post_init__(self) -> None:
        self.timer = StepTimer(self.planner, lambda: self.now, guess_breaks=self.guess_breaks)

    def step(self, host_seconds: float, *, tokens: int = 1, rows: int = 1) -> None:
        """A step, and what the engine does after it has drawn."""
        self.timer.begin(self.now)
        self.timer.note(self.now, tokens=tokens, rows=rows, drafted=0)
        self.now += 0.001
        self.timer.drawn(5)
        self.now += host_seconds

    @property
    def seconds(self) -> list[float]:
        return [seconds for *_, seconds in self.planner.observed]


def test_what_the_engine_does_between_two_steps_is_part_of_the_first() -> None:
    timed = Timed()
    for host in (0.0, 0.01, 0.3):  # however long
        timed.step(host)
    timed.timer.begin(timed.now)
    assert timed.seconds == pytest.approx([0.001, 0.011, 0.301])


def test_a_step_before_a_break_is_over_when_the_break_begins() -> None:
    timed = Timed()
    timed.step(0.004)
    timed.timer.rest(timed.now)
    timed.now += 10.0
    timed.timer.rest(timed.now)  # nothing is left to tell
    timed.step(0.001)
    timed.timer.begin(timed.now)
    assert timed.seconds == pytest.approx([0.005, 0.002])


def test_steps_that_take_in_prompts_or_draw_nothing_are_not_timed() -> None:
    timed = Timed()
    timed.step(0.0, tokens=3)
    timed.step(0.0, tokens=0, rows=0)
    timed.timer.begin(timed.now)
    timed.timer.note(timed.now, tokens=1, rows=1, drafted=0)
    timed.timer.begin(timed.now + 1.0)
    assert timed.seconds == []


def test_an_engine_that_tells_no_breaks_has_them_guessed() -> None:
    timed = Timed(guess_breaks=True)
    for host in (0.002, 0.004, 0.0):  # the step itself and 2 ms are 3 ms
        timed.step(host)
    timed.timer.begin(timed.now)
    assert timed.seconds == pytest.approx([0.003, 0.001])
