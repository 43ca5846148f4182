"""What does the scheduler cost per event, with 8, 256 and 4,096 generators of 256 slots each?

    python -m benchmarks.scheduler [--quick] [--json FILE]

Only `Scheduler.on_event` is timed, in CPU seconds of this thread; fake generators and a trainer
finish and acknowledge every sample, install each version, and run out of work at different times.
Modes: `keep`, and `verify` with one step of run-ahead, where a third of the samples resume from a
rejection. The statistic is all of the scheduler's time over the number of events. In full steps of
1,048,576 samples are trained with 4,096 generators; `--quick` stops at 512.
"""

import gc
import heapq
import random
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import commands, events
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.scheduler.scheduler import Scheduler
from benchmarks.harness import parser_of, pick, report, table


@dataclass
class Result:
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
        """Microseconds of the scheduler per event, over all kinds of events."""
        return self.seconds / max(1, self.events) * 1e6


class FakeCluster:
    """Fake generators and a fake trainer: a clock, and the events that are due."""

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
        self.due: list[tuple[float, int, events.Event]] = []
        self.count = 0
        self.version: dict[str, int] = {}
        self.free: dict[str, int] = {}
        self.waiting: dict[str, deque[commands.StartSample]] = {}
        self.finished: commands.RunOutcome | None = None
        self.oldest_version: dict[SampleId, int] = {}
        """`verify` only: lowest version among the tokens of each running sample."""
        self.verifies: dict[str, tuple[commands.VerifySamples, ...]] = {}
        """By generator: what it verifies as soon as its weights are installed."""
        self.spent: dict[str, list[float]] = {}
        """By type of event: (seconds, number of events)."""

    def run(self) -> None:
        """Run from the first join to `FinishRun`."""
        for i in range(self.result.generators):
            name = f"generator-{i}"
            self.version[name], self.free[name] = 0, self.result.slots
            self.waiting[name] = deque()
            self.tell(events.GeneratorJoined(name, self.result.slots, 0))
        self.tell(events.TrainerJoined(0))
        while self.finished is None:
            self.now, _, event = heapq.heappop(self.due)
            if isinstance(event, events.SampleFinished) and event.sample in self.oldest_version:
                oldest = self.oldest_version.pop(event.sample)
                event = events.SampleFinished(event.generator, event.sample, event.length, oldest)
            if isinstance(event, events.WeightsInstalled):
                self.version[event.generator] = event.policy_version
                for due in self.verifies.pop(event.generator, ()):
                    self.verify(due)
            self.tell(event)
            if isinstance(event, events.SampleFinished) and event.length:
                self.free[event.generator] += 1
                self.decode(event.generator)

    def tell(self, event: events.Event) -> None:
        """Time one event and carry out its commands."""
        start = time.thread_time()
        issued = self.scheduler.on_event(event)
        elapsed = time.thread_time() - start
        result = self.result
        result.events += 1
        result.commands += len(issued)
        result.seconds += elapsed
        result.longest_ms = max(result.longest_ms, elapsed * 1e3)
        entry = self.spent.setdefault(type(event).__name__, [0.0, 0.0])
        entry[0] += elapsed
        entry[1] += 1
        for command in issued:
            self.carry_out(command)

    def carry_out(self, command: commands.Command) -> None:
        """Schedule the events that a command leads to."""
        if isinstance(command, commands.StartSample):
            self.waiting[command.generator].append(command)
            self.decode(command.generator)
        elif isinstance(command, commands.VerifySamples):
            self.verify(command)
        elif isinstance(command, commands.DeliverGroup):
            for name, sample in command.samples:
                self.after(0.01, events.SampleDelivered(name, sample))
        elif isinstance(command, commands.DeclareStep):
            self.after(0.5, events.StepFinished(command.step, command.groups))
            self.after(0.6, events.WeightsPublished(command.step + 1))
        elif isinstance(command, commands.InstallWeights):
            self.verifies[command.generator] = command.verify
            self.after(0.05, events.WeightsInstalled(command.generator, command.policy_version))
        elif isinstance(command, commands.FinishRun):
            self.finished = command.outcome

    def decode(self, name: str) -> None:
        waiting = self.waiting[name]
        while waiting and self.free[name]:
            self.free[name] -= 1
            sample = waiting.popleft().sample
            length = self.rng.lognormvariate(0.0, 1.0)
            event = events.SampleFinished(name, sample, 1 + int(length * 1000), self.version[name])
            if self.config.on_update == "verify":
                self.oldest_version[sample] = self.version[name]
            self.after(length, event)

    def verify(self, command: commands.VerifySamples) -> None:
        """Finish held samples again, at once or after more decoding; running ones just continue."""
        for sample in command.samples:
            if sample in self.oldest_version:
                self.oldest_version[sample] = command.min_version
            else:
                seconds = self.rng.lognormvariate(0.0, 1.0) if self.rng.random() < 0.33 else 0.02
                # Length 0 marks a sample that takes no slot here.
                event = events.SampleFinished(command.generator, sample, 0, command.min_version)
                self.after(seconds, event)

    def after(self, seconds: float, event: events.Event) -> None:
        self.count += 1
        heapq.heappush(self.due, (self.now + seconds, self.count, event))


def measure(generators: int, slots: int, mode: str, bound: int, *, steps: int) -> Result:
    result = Result(generators, slots, mode, bound)
    cluster = FakeCluster(result, steps=steps, group_size=8, seed=0)
    gc.collect()
    cluster.run()
    assert cluster.finished is commands.RunOutcome.DONE, cluster.finished
    result.peak_in_flight = cluster.scheduler.state.admission.max_groups_in_flight * 8
    result.by_event_us = {k: 1e6 * a / n for k, (a, n) in sorted(cluster.spent.items())}
    return result


def memory(generators: int, slots: int, mode: str, *, steps: int) -> tuple[float, float]:
    """Bytes of the scheduler per sample that may be in flight, at the first opening and the last.

    The second is no greater than the first if nothing accumulates.
    """
    result = Result(generators, slots, mode, 0)
    cluster = FakeCluster(result, steps=steps, group_size=8, seed=0)
    only = tracemalloc.Filter(inclusive=True, filename_pattern="*/scheduler/*.py")
    bench = tracemalloc.Filter(inclusive=False, filename_pattern="*/benchmarks/*.py")
    tracemalloc.start()
    sizes: list[float] = []
    original = cluster.tell

    def tell(event: events.Event) -> None:
        original(event)
        opened = isinstance(event, events.TrainerJoined) or (
            isinstance(event, events.WeightsPublished) and event.policy_version == steps - 1
        )
        if opened:
            taken = tracemalloc.take_snapshot().filter_traces([only, bench])
            sizes.append(sum(s.size for s in taken.statistics("filename")))

    cluster.tell = tell  # type: ignore[method-assign]
    cluster.run()
    tracemalloc.stop()
    samples = cluster.scheduler.state.admission.max_groups_in_flight * cluster.config.group_size
    return sizes[0] / samples, sizes[-1] / samples


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_of(__doc__, "up to 512 generators").parse_args(arguments)
    steps, many, slots = (10, (2,), 8) if options.smoke else (200, (8, 256), 256)
    largest = pick(options, 4096, 512, 4)
    gc.collect()
    gc.freeze()  # what is imported is no garbage
    sizes = [(2, 32, "keep", 1), (max(many), slots, "keep", 0)]
    for generators in (*many, largest):
        sizes += [(generators, slots, "keep", 1), (generators, slots, "verify", 0)]
    results = [measure(*size, steps=3 if index else steps) for index, size in enumerate(sizes)]
    small = (2, 8) if options.smoke else (8, 64)
    held = {mode: memory(*small, mode, steps=steps // 5) for mode in ("keep", "verify")}
    per_second = {
        f"scheduler_events_per_s_{r.mode}_{r.generators}": 1e6 / r.event_us for r in results[2:]
    }
    ratios = per_second | {
        # The slower of the two modes with the most generators.
        "scheduler_event_us": max(r.event_us for r in results[-2:]),
        "scheduler_event_us_keep": results[-2].event_us,
        "scheduler_event_us_verify": results[-1].event_us,
        "scheduler_event_growth": results[-2].event_us / results[0].event_us,
        "scheduler_bytes_per_sample": max(last for _, last in held.values()),
        "scheduler_memory_growth": max(last / first for first, last in held.values()),
    }
    raw = {
        "sizes": [{**vars(r), "event_us": r.event_us} for r in results],
        "bytes_per_sample": {mode: list(both) for mode, both in held.items()},
    }
    shown = table(
        "scheduler: cost per event",
        "mode,generators,slots,k,events,µs / event,longest ms,commands",
        (
            (r.mode, r.generators, r.slots, r.bound, r.events, r.event_us, r.longest_ms, r.commands)
            for r in results
        ),
    )
    by_event = [(r.mode, {k: round(v, 2) for k, v in r.by_event_us.items()}) for r in results[-2:]]
    report(options, "scheduler", raw, ratios, shown, table("by event", "mode,µs", by_event))
    return 0


if __name__ == "__main__":
    sys.exit(main())
