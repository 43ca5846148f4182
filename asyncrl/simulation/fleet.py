"""The generators of a simulated run: requests, weights and losses; and the agenda of events."""

import heapq
import random
from collections.abc import Callable
from dataclasses import replace

import msgspec

from asyncrl.scheduler import commands, events
from asyncrl.simulation.outcome import Installs
from asyncrl.simulation.setting import Setting
from asyncrl.simulation.sim_generator import SimGenerator
from asyncrl.simulation.sim_request import SimRequest, Tally
from asyncrl.simulation.sim_turns import TurnGenerator

_AT_ONCE = 1e-12
"""Tolerance in seconds within which an item is due."""
MEASURED_SECONDS = 5.0
"""Minimum busy seconds of a speed measurement; as in `controller/inbox.py`."""


class FinishedReport(msgspec.Struct, frozen=True, gc=False):
    """The message that a sample is finished; outdated if the sample was resumed since."""

    generator: str
    request: SimRequest
    finishes: int


class FromTrainer(msgspec.Struct, frozen=True, gc=False):
    """Events that the trainer causes, at one time; outdated if that trainer is lost."""

    lineage: int
    events: tuple[events.Event, ...]


Due = events.Event | str | FinishedReport | FromTrainer | Callable[[], None]
"""A due item: an event for the scheduler, the name of a generator whose next request is done, a
report of a sample, events of the trainer, or a callback."""


class Agenda:
    """A heap of due items; at equal times, the first added comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Due]] = []
        self._count = 0

    def at(self, when: float, due: Due) -> None:
        """Schedule an item at this time."""
        self._count += 1
        heapq.heappush(self._due, (when, self._count, due))

    def after(self, seconds: float, due: Due) -> None:
        """Schedule an item in this many seconds."""
        self.at(self.now + seconds, due)

    def next(self) -> Due:
        """Advance to the next due item."""
        self.now, _, due = heapq.heappop(self._due)
        return due


class Fleet:
    """Advances generators to the time of their events, and wakes them when they are done."""

    def __init__(self, setting: Setting, agenda: Agenda, rng: random.Random) -> None:
        # With losses, lengths are kept: regenerated samples get their earlier length.
        self._setting = replace(setting, known=dict(setting.known))
        self._agenda, self._rng = agenda, rng
        self._slowness = setting.stragglers.slowness(setting.generators, setting.seed)
        self._generators: dict[str, SimGenerator] = {}
        self._names: list[str] = [""] * setting.generators
        self._numbers: dict[str, int] = {}
        self._restarts = [0] * setting.generators
        self._wake_at: dict[str, float] = {}
        """Times at which each generator's next request is done, if nothing changes."""
        self._installs: dict[str, events.WeightsInstalled] = {}
        self._verifies: dict[str, tuple[commands.VerifySamples, ...]] = {}
        """Samples to verify, by generator, after the weights of its install are swapped in."""
        self.installs = Installs()
        self._message = setting.cost.message_seconds + setting.network.latency_seconds
        self._rewards_cost = setting.cost.reward(0) > 0
        self._rewards_free: dict[str, float] = {}
        """Time, by generator, at which all requested rewards are computed."""
        self.lost = Tally()
        self.lost_tokens = 0.0
        self.losses = 0

    def add(self, number: int) -> events.GeneratorJoined:
        """Add a generator: at first with the initial weights, after a loss without any."""
        restarts, setting = self._restarts[number], self._setting
        name = f"g{number}.{restarts}" if restarts else f"g{number}"
        version = -1 if restarts else 0
        rng = random.Random(self._rng.random())  # noqa: S311 - a simulation
        slowness = self._slowness[number]
        made = SimGenerator if setting.environments is None else TurnGenerator
        self._generators[name] = made(name, setting, rng, slowness=slowness, version=version)
        self._names[number], self._numbers[name] = name, number
        return events.GeneratorJoined(name, setting.slots, version)

    def environment_waits(self) -> list[events.EnvironmentWaits]:
        """Return changed numbers of samples that wait for their environment."""
        changed = []
        for name, generator in self._generators.items():
            if isinstance(generator, TurnGenerator) and generator.away != generator.told_away:
                generator.told_away = generator.away
                changed.append(events.EnvironmentWaits(name, generator.away))
        return changed

    def lose(self, number: int) -> events.GeneratorLost | None:
        """Lose a generator with its samples; return None if it is lost already."""
        name = self._names[number]
        if not name:
            return None
        self._names[number] = ""
        self._restarts[number] += 1
        generator = self._generators.pop(name)
        generator.advance(self._agenda.now)
        self.lost_tokens += generator.unfinished_tokens()
        self.losses += 1
        self.lost.add(generator.tally)
        for table in (self._wake_at, self._installs, self._verifies, self._rewards_free):
            table.pop(name, None)
        return events.GeneratorLost(name)

    def tally(self) -> Tally:
        """Sum the work of all generators until now, lost ones included."""
        total = replace(self.lost)
        for generator in self._generators.values():
            generator.advance(self._agenda.now)
            total.add(generator.tally)
        return total

    def touch(self, name: str, touched: dict[str, SimGenerator]) -> SimGenerator:
        """Advance a generator to now; `plan` it again after the event."""
        generator = touched.get(name)
        if generator is None:
            generator = touched[name] = self._generators[name]
            generator.advance(self._agenda.now)
        return generator

    def plan(self, generator: SimGenerator) -> None:
        """Schedule the generator for when its next request is done."""
        if (end := generator.next_end()) is not None:
            end = max(end, self._agenda.now)
            self._wake_at[generator.name] = end
            self._agenda.at(end, generator.name)

    def wake(self, name: str) -> None:
        """Take the finished requests of a generator, unless its plan has changed since."""
        now = self._agenda.now
        if self._wake_at.get(name) != now:
            return
        generator = self._generators[name]
        del self._wake_at[name]
        generator.advance(now)
        while (end := generator.next_end()) is not None and end <= now + _AT_ONCE:
            if (request := generator.finish_next()) is None:
                continue
            self._report(generator, request)
            if self._rewards_cost and not request.rewarded_at:
                # Rewards are computed outside the slots, one at a time; delivery waits for them.
                free = max(now, self._rewards_free.get(name, 0.0))
                request.rewarded_at = free + self._setting.cost.reward(generator.decoding)
                self._rewards_free[name] = request.rewarded_at
        self.plan(generator)

    def verify(self, generator: SimGenerator, due: commands.VerifySamples) -> None:
        """Verify samples; those that do not need it are reported at once."""
        for request in generator.verify(due.samples, due.min_version):
            self._report(generator, request)

    def _report(self, generator: SimGenerator, request: SimRequest) -> None:
        report = FinishedReport(generator.name, request, request.finishes)
        self._agenda.after(self._message, report)

    def finished(self, report: FinishedReport) -> events.SampleFinished | None:
        """Return the event of a report; None if the sample was resumed or lost since."""
        name, request = report.generator, report.request
        generator = self._generators.get(name)
        is_held = generator is not None and generator.holds(request)
        if not is_held or request.finishes != report.finishes:
            return None
        return events.SampleFinished(name, request.sample, request.length, request.oldest_version)

    def rewarded(self, report: FinishedReport) -> events.SampleRewarded | None:
        """Return the event of a sample's reward, or None as `finished`; groups have one signal."""
        finished = self.finished(report)
        if finished is None:
            return None
        sample = finished.sample
        draw = random.Random(f"{self._setting.seed} {sample.group}")  # noqa: S311 - a simulation
        reward = float(draw.random() < self._setting.signal_share and sample.sample % 2)
        return events.SampleRewarded(finished.generator, sample, reward)

    def install(self, command: commands.InstallWeights) -> None:
        """Begin an install. It ends when the weights have reached the generator's node."""
        name, version = command.generator, command.policy_version
        setting, now = self._setting, self._agenda.now
        end = now + (self._message + setting.cost.stage_seconds)
        if self._generators[name].version < 0:
            end = max(end, now + setting.network.fetch_seconds(setting.weights_bytes))
        elif version in self.installs.published:
            node = self._numbers[name] // setting.generators_per_node
            sent = setting.network.weights_seconds(node, setting.weights_bytes)
            end = max(end, self.installs.published[version] + sent)
        self._verifies[name] = command.verify
        event = self._installs[name] = events.WeightsInstalled(name, version)
        self._agenda.at(end, event)

    def swap(self, event: events.WeightsInstalled) -> bool:
        """Swap the weights in, and verify what is due; False if the install was abandoned."""
        if self._installs.get(event.generator) is not event:
            return False
        generator = self._generators[event.generator]
        generator.advance(self._agenda.now)
        if generator.version >= 0:  # not one that joined long after the version was published
            self.installs.installed(event.policy_version, self._agenda.now)
        generator.install(event.policy_version)
        for due in self._verifies.pop(event.generator, ()):
            self.verify(generator, due)
        self.plan(generator)
        return True

    def speed(self, name: str) -> events.SpeedMeasured | None:
        """Return a generator's speed since the last measurement; None if it was hardly busy."""
        measured = self._generators[name].speed(MEASURED_SECONDS)
        return None if measured is None else events.SpeedMeasured(name, measured)

    def rewind(
        self, command: commands.RewindGenerator, touched: dict[str, SimGenerator]
    ) -> events.GeneratorRewound:
        """Forget the policies after a version, and their installs under way."""
        name = command.generator
        self._installs.pop(name, None)
        self._verifies.pop(name, None)
        version = self.touch(name, touched).rewind(command.policy_version)
        return events.GeneratorRewound(name, command.lineage, version)
