"""What an event of a sample costs the scheduler does not depend on generators or samples."""

import random
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from asyncrl.scheduler import events, scheduler
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.simulation.cost import Cost
from asyncrl.simulation.setting import Setting
from asyncrl.simulation.world import World

FOLDER = str(Path(scheduler.__file__).parent)
COST = Cost(0.01, 1e-4, 0.0, 0.0, 1e-5, 0.5)
PER_SAMPLE = (events.SampleFinished, events.SampleDelivered)


def lines_by_event(mode, generators):
    """Executed lines of the folder scheduler/, for each event of a sample."""
    lines = defaultdict(list)
    count = 0

    def trace(frame, _, __):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        return line

    def line(_, event, __):
        nonlocal count
        count += event == "line"
        return line

    tell = scheduler.Scheduler.on_event

    def telling(self, event):
        nonlocal count
        if not isinstance(event, PER_SAMPLE):
            return tell(self, event)
        count, before = 0, sys.gettrace()
        sys.settrace(trace)
        try:
            return tell(self, event)
        finally:
            sys.settrace(before)
            lines[type(event)].append(count)

    config = SchedulerConfig(
        on_update=mode, max_off_policy_steps=1, group_size=4, groups_per_step=2 * generators
    )
    draw = random.Random(0)
    setting = Setting(
        config, generators, 8, 3, COST, lambda _: int(draw.lognormvariate(4.0, 1.0)) + 1, drift=0.01
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler.Scheduler, "on_event", telling)
        World(setting).run(1)
    return lines


@pytest.mark.parametrize("mode", ["keep", "verify"])
def test_an_event_of_a_sample_takes_as_many_lines_among_many_generators(mode):
    """The samples in flight grow with the generators, 16 to 32 of each. No time is measured."""
    few, many = (lines_by_event(mode, generators) for generators in (4, 64))
    for kind in PER_SAMPLE:
        assert len(many[kind]) > 1000, "too few events to compare"
        mean_few, mean_many = (sum(counts) / len(counts) for counts in (few[kind], many[kind]))
        assert mean_many < 1.1 * mean_few, kind.__name__
        # Few events take more: those that rebuild an index that has many outdated entries.
        most = sorted(many[kind])[int(0.99 * len(many[kind]))]
        assert most < 1.5 * max(few[kind]), kind.__name__
