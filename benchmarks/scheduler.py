"""What the scheduler costs per event, from a few generators to 4,096 with 256 slots each.

    python -m benchmarks.scheduler [--quick] [--json FILE]

Only `Scheduler.on_event` is timed, in seconds of this thread's processor, so that other work on the
machine does not count (reading that clock is in the numbers, about half a microsecond). The fake
generators and the fake trainer around it are not timed. Every sample is finished and acknowledged,
generators install each version, groups of a prompt come back epoch after epoch, and lengths are
heavy-tailed, so that generators run dry at different times and take over each other's work. Modes:
`keep`, and `verify` with a step of run-ahead, where every sample written ahead is verified when it
is due (a third of them go on from a cut, the others are accepted as they are).
`µs / event` is all of the scheduler's time divided by all events, so a single event that opens a
whole step is in it. The full run (some minutes, about 1 GB) trains steps of 1,048,576 samples with
4,096 generators; the quick one stops at 512 generators.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import random
import time
import tracemalloc
from collections import deque
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from benchmarks.report import write_json
from rollout.trajectory import SampleId
from scheduler import commands as out
from scheduler import events as ev
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler


@dataclass
class Result:
    """One size."""

    generators: int
    slots: int
    mode: str
    bound: int
    events: int = 0
    seconds: float = 0.0
    longest_ms: float = 0.0
    commands: int = 0
    peak_in_flight: int = 0
    by_event_us: dict[str, float] = field(default_factory=dict)

    @property
    def event_us(self) -> float:
        """Microseconds of the scheduler per event, all events alike."""
        return self.seconds / max(1, self.events) * 1e6


class Fleet:
    """Fake generators and trainer: a clock, and the events that are due."""

    def __init__(self, result: Result, *, steps: int, group_size: int, seed: int) -> None:
        samples = result.generators * result.slots
        self.config = SchedulerConfig(
            on_update="verify" if result.mode == "verify" else "keep",
            max_off_policy_steps=result.bound,
            group_size=group_size,
            groups_per_step=samples // group_size,
            max_runahead_groups=samples // group_size if result.mode == "verify" else None,
        )
        prompts = 2 * self.config.groups_per_step
        self.scheduler = Scheduler(
            self.config, first_step=0, total_steps=steps, group_key=lambda g: g * 7919 % prompts
        )
        self.result = result
        self.rng = random.Random(seed)
        self.now = 0.0
        self.due: list[tuple[float, int, ev.Event]] = []
        self.count = 0
        self.version: dict[str, int] = {}
        self.free: dict[str, int] = {}
        self.waiting: dict[str, deque[out.StartSample]] = {}
        self.finished: out.RunOutcome | None = None
        self.begun: dict[SampleId, int] = {}
        """`verify`: lowest version of the tokens of what is being written."""
        self.spent: dict[str, list[float]] = {}

    def run(self) -> None:
        """From the first join to `FinishRun`."""
        for i in range(self.result.generators):
            name = f"generator-{i}"
            self.version[name], self.free[name] = 0, self.result.slots
            self.waiting[name] = deque()
            self.tell(ev.GeneratorJoined(name, self.result.slots, 0))
        self.tell(ev.TrainerJoined(0))
        while self.finished is None:
            self.now, _, event = heapq.heappop(self.due)
            if isinstance(event, ev.SampleFinished) and event.sample in self.begun:
                oldest = self.begun.pop(event.sample)
                event = ev.SampleFinished(event.generator, event.sample, event.length, oldest)
            if isinstance(event, ev.WeightsInstalled):
                self.version[event.generator] = event.policy_version
            self.tell(event)
            if isinstance(event, ev.SampleFinished) and event.length:
                self.free[event.generator] += 1
                self.decode(event.generator)

    def tell(self, event: ev.Event) -> None:
        """Time one event and do as it says."""
        start = time.thread_time()
        commands = self.scheduler.on_event(event)
        elapsed = time.thread_time() - start
        result = self.result
        result.events += 1
        result.commands += len(commands)
        result.seconds += elapsed
        result.longest_ms = max(result.longest_ms, elapsed * 1e3)
        entry = self.spent.setdefault(type(event).__name__, [0.0, 0.0])
        entry[0] += elapsed
        entry[1] += 1
        for command in commands:
            self.carry_out(command)

    def carry_out(self, command: out.Command) -> None:
        """Schedule the events that a command leads to."""
        if isinstance(command, out.StartSample):
            self.waiting[command.generator].append(command)
            self.decode(command.generator)
        elif isinstance(command, out.VerifySamples):
            self.verify(command)
        elif isinstance(command, out.DeliverGroup):
            for name, sample in command.samples:
                self.after(0.01, ev.SampleDelivered(name, sample))
        elif isinstance(command, out.DeclareStep):
            self.after(0.5, ev.StepFinished(command.step, command.groups))
            self.after(0.6, ev.WeightsPublished(command.step + 1))
        elif isinstance(command, out.InstallWeights):
            self.after(0.05, ev.WeightsInstalled(command.generator, command.policy_version))
        elif isinstance(command, out.FinishRun):
            self.finished = command.outcome

    def decode(self, name: str) -> None:
        """Put waiting samples into free slots."""
        waiting = self.waiting[name]
        while waiting and self.free[name]:
            self.free[name] -= 1
            sample = waiting.popleft().sample
            length = self.rng.lognormvariate(0.0, 1.0)
            event = ev.SampleFinished(name, sample, 1 + int(length * 1000), self.version[name])
            if self.config.on_update == "verify":
                self.begun[sample] = self.version[name]
            self.after(length, event)

    def verify(self, command: out.VerifySamples) -> None:
        """What is held is reported again, soon or after more writing; what runs just goes on."""
        for sample in command.samples:
            if sample in self.begun:
                self.begun[sample] = command.min_version
            else:
                seconds = self.rng.lognormvariate(0.0, 1.0) if self.rng.random() < 0.33 else 0.02
                # Length 0: it takes no slot here.
                event = ev.SampleFinished(command.generator, sample, 0, command.min_version)
                self.after(seconds, event)

    def after(self, seconds: float, event: ev.Event) -> None:
        """Let an event be due so much later."""
        self.count += 1
        heapq.heappush(self.due, (self.now + seconds, self.count, event))


def measure(generators: int, slots: int, mode: str, bound: int, *, steps: int) -> Result:
    result = Result(generators, slots, mode, bound)
    fleet = Fleet(result, steps=steps, group_size=8, seed=0)
    gc.collect()
    gc.freeze()
    fleet.run()
    assert fleet.finished is out.RunOutcome.DONE, fleet.finished
    result.peak_in_flight = fleet.scheduler.state.admission.max_groups_in_flight * 8
    result.by_event_us = {k: 1e6 * a / n for k, (a, n) in sorted(fleet.spent.items())}
    gc.unfreeze()
    return result


def memory(generators: int, slots: int, mode: str, *, steps: int) -> tuple[float, float]:
    """Bytes of the scheduler per sample that may be in flight: the first window open, and the last.

    The second is no greater than the first if nothing piles up.
    """
    result = Result(generators, slots, mode, 0)
    fleet = Fleet(result, steps=steps, group_size=8, seed=0)
    only = tracemalloc.Filter(inclusive=True, filename_pattern="*/scheduler/*.py")
    bench = tracemalloc.Filter(inclusive=False, filename_pattern="*/benchmarks/*.py")
    tracemalloc.start()
    sizes: list[float] = []
    original = fleet.tell

    def tell(event: ev.Event) -> None:
        original(event)
        opened = isinstance(event, ev.TrainerJoined) or (
            isinstance(event, ev.WeightsPublished) and event.policy_version == steps - 1
        )
        if opened:
            taken = tracemalloc.take_snapshot().filter_traces([only, bench])
            sizes.append(sum(s.size for s in taken.statistics("filename")))

    fleet.tell = tell  # type: ignore[method-assign]
    fleet.run()
    tracemalloc.stop()
    samples = fleet.scheduler.state.admission.max_groups_in_flight * fleet.config.group_size
    return sizes[0] / samples, sizes[-1] / samples


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 512 generators")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, raw and ratios")
    args = parser.parse_args()
    sizes = [(2, 32, "keep", 1), (64, 256, "keep", 0), (64, 256, "keep", 1), (64, 256, "verify", 0)]
    largest = 512 if args.quick else 4096
    sizes += [(largest, 256, "keep", 1), (largest, 256, "verify", 0)]
    table = Table(title="scheduler: cost per event", show_lines=False)
    columns = "generators,slots,mode,k,events,µs / event,longest ms,commands"
    for title in columns.split(","):
        table.add_column(title, justify="right")
    results = [measure(*size, steps=200 if size[0] == 2 else 3) for size in sizes]
    for r in results:
        table.add_row(
            *(str(x) for x in (r.generators, r.slots, r.mode, r.bound, r.events)),
            f"{r.event_us:.2f}",
            f"{r.longest_ms:.1f}",
            str(r.commands),
        )
    held = {mode: memory(8, 64, mode, steps=40) for mode in ("keep", "verify")}
    console = Console()
    console.print(table)
    for r in results[-2:]:
        console.print(r.mode, {k: round(v, 2) for k, v in r.by_event_us.items()})
    for mode, (first, last) in held.items():
        console.print(
            f"{mode}: {first:.0f} bytes per sample that may be in flight at first, {last:.0f} at "
            "the end"
        )
    ratios = {
        # The dearer of the two modes with the most generators.
        "scheduler_event_us": max(r.event_us for r in results[-2:]),
        "scheduler_event_us_keep": results[-2].event_us,
        "scheduler_event_us_verify": results[-1].event_us,
        "scheduler_event_growth": results[-2].event_us / results[0].event_us,
        "scheduler_bytes_per_sample": max(last for _, last in held.values()),
        "scheduler_memory_growth": max(last / first for first, last in held.values()),
    }
    console.print(ratios)
    if args.json:
        raw = {
            "sizes": [{**vars(r), "event_us": r.event_us} for r in results],
            "bytes_per_sample": {mode: list(both) for mode, both in held.items()},
        }
        write_json(args.json, "scheduler", raw, ratios)


if __name__ == "__main__":
    main()
