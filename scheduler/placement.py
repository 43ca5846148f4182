"""Decides which generator generates which group.

All samples of a group go to one generator, since they share the prompt's KV and its tree. A group
is placed when the admission rule opens its step:

1. on the generator that its prompt went to last time, unless that generator has clearly more to do
   than the least loaded one, or would queue the group while another has idle slots (`_choose`);
2. otherwise on the generator that would finish it first: the one with the lowest load relative to
   its slots, unless one is known to be slower than others (`_until_done`).

Only generators that have the latest published version, or were ordered to install it, are
candidates; a generator that lags catches up first. Those that are still installing count, so that
the first one to be ready does not take everything.

A generator starts its groups in data order, and a new sample whenever one finishes. When it runs
out of work and has idle slots, it takes over the next untouched group of the generator with the
longest queue, provided that all slots of that one are busy. So a group is taken over at most once
per placement, and a straggler delays no other work. A slower generator takes the last group
instead, and only if it would finish it before the owner.

Speeds are relative to their geometric mean. Similar speeds count as equal, so that noise changes no
decision; an unmeasured generator counts as average.

The generator of a sample is chosen before the sample is drawn, by loads, speeds and prompts, so the
choice favours no text.

Memory: O(groups in flight), and four bytes per prompt for the affinity.
"""

import heapq
import math
from array import array

from asyncrl.scheduler.errors import SchedulerError
from asyncrl.scheduler.records import Generator, Group

ALIKE = 1.35
"""Factor from the mean up to which speeds count as equal."""
_WEIGHT = 0.3
"""Weight of a new measurement against earlier ones: few running samples are faster than many."""
_STEP = 1.15
"""A relative speed changes only if it is off by more than this factor."""


class RelativeSpeeds:
    """Measured speeds. O(1) for each measurement."""

    def __init__(self) -> None:
        self._logs: dict[str, float] = {}
        self._sum = 0.0

    def measured(self, generator: Generator, tokens_per_row_second: float) -> bool:
        """Note a speed in tokens per row-second; return True if the relative speed has changed."""
        if not 0.0 < tokens_per_row_second < math.inf:
            return False
        log = math.log(tokens_per_row_second)
        if (before := self._logs.get(generator.name)) is not None:
            log = before + _WEIGHT * (log - before)
            self._sum -= before
        self._sum += log
        self._logs[generator.name] = log
        relative = math.exp(log - self._sum / len(self._logs))
        if 1 / ALIKE <= relative <= ALIKE:
            relative = 1.0
        if generator.speed / _STEP <= relative <= generator.speed * _STEP and relative != 1.0:
            return False
        changed = relative != generator.speed
        generator.speed = relative
        return changed

    def forget(self, generator: Generator) -> None:
        """Forget a generator that is gone."""
        self._sum -= self._logs.pop(generator.name, 0.0)


class MinIndex:
    """Names with integer keys; `first()` has the lowest key, the longest unchanged among equals.

    A heap in which a changed key leaves its old entry behind. Old entries are dropped when they
    reach the top, or all at once when they outnumber the live ones. O(log n) amortised, O(n)
    memory.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []
        self._live: dict[str, tuple[int, int]] = {}
        self._count = 0

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def __len__(self) -> int:
        return len(self._live)

    def set(self, name: str, key: int) -> None:
        """Add a name, or change its key."""
        live = self._live
        old = live.get(name)
        if old is not None and old[0] == key:
            return
        self._count += 1
        live[name] = (key, self._count)
        heapq.heappush(self._heap, (key, self._count, name))
        if len(self._heap) > 2 * len(live) + 64:
            self._heap = [(k, count, n) for n, (k, count) in live.items()]
            heapq.heapify(self._heap)

    def discard(self, name: str) -> None:
        """Remove a name if it is there."""
        self._live.pop(name, None)

    def first(self) -> str | None:
        """The name with the lowest key, if there is one."""
        heap = self._heap
        while heap:
            key, count, name = heap[0]
            if self._live.get(name) == (key, count):
                return name
            heapq.heappop(heap)
        return None


_OWN = 4
"""Time of a group itself, in units of a generator's time for as many samples as it has slots: its
longest sample is several times as long as their mean."""
_LOAD_UNITS = 32
"""Units per slot count in which relative loads are compared."""
_MAX_PROMPTS = 1 << 31
"""Bound on prompt indices: they index the affinity table, so larger ones are refused."""


class Placement:
    """The live generators, the groups of each, and the choice of the next group."""

    def __init__(self, group_size: int) -> None:
        self.generators: dict[str, Generator] = {}
        self.unplaced: list[tuple[int, Group]] = []
        """Heap of groups that wait for a generator; entries may be outdated."""
        self._group_size = group_size
        self._by_number: dict[int, Generator] = {}
        self._joined = 0
        self._speeds = RelativeSpeeds()
        self._candidates = MinIndex()
        self._backlogs = MinIndex()
        """Generators with busy slots and waiting groups, longest queue first."""
        self._last_place: array[int] = array("i")
        """Number of the last generator of each prompt index; -1 if none."""

    def __contains__(self, name: str) -> bool:
        """Return True if groups may be placed on, or taken over from, this generator."""
        return name in self._candidates or name in self._backlogs

    @property
    def has_candidates(self) -> bool:
        """True if there is a generator that groups may be placed on."""
        return len(self._candidates) > 0

    def add(
        self, name: str, *, slots: int, limit: int, version: int, most: int | None = None
    ) -> Generator:
        """Add a generator. It becomes a candidate by `offer`."""
        most = limit if most is None else max(limit, most)
        generator = Generator(name, self._joined, slots, limit, version, most=most)
        self._joined += 1
        self.generators[name] = generator
        self._by_number[generator.number] = generator
        return generator

    def remove(self, generator: Generator) -> list[Group]:
        """Remove a generator; return its groups in data order, now without an owner."""
        del self.generators[generator.name]
        self._speeds.forget(generator)
        self.withdraw(generator)
        groups = [generator.groups[index] for index in sorted(generator.groups)]
        for group in groups:
            group.owner = None
        return groups

    def withdraw(self, generator: Generator) -> None:
        """Place no more groups on a generator, and take over none from it."""
        self._by_number.pop(generator.number, None)
        self._candidates.discard(generator.name)
        self._backlogs.discard(generator.name)

    def offer(self, generator: Generator, latest_version: int) -> None:
        """Make a generator a candidate if it has, or is installing, the latest version."""
        if generator.target >= latest_version and not generator.leaving:
            self._candidates.set(generator.name, _until_done(generator))
        else:
            self._candidates.discard(generator.name)

    def place(self, group: Group) -> Generator | None:
        """Choose an owner for a group and queue it there, if there is a candidate."""
        name = self._candidates.first()
        if name is None:
            heapq.heappush(self.unplaced, (group.index, group))
            return None
        generator = self._choose(group, self.generators[name])
        self._own(group, generator)
        heapq.heappush(generator.queue, (group.index, group))
        self.update(generator)
        return generator

    def measured(self, generator: Generator, tokens_per_row_second: float) -> None:
        """Note a generator's measured speed (`RelativeSpeeds.measured`)."""
        if self._speeds.measured(generator, tokens_per_row_second):
            self.update(generator)

    def put_back(self, group: Group) -> None:
        """Update the queue after begun samples of a group were queued again."""
        owner = group.owner
        if owner is not None:
            heapq.heappush(owner.begun, (group.index, group))
            self.update(owner)

    def next_unplaced(self) -> Group | None:
        """Take the earliest group that waits for a generator."""
        while self.unplaced:
            _, group = heapq.heappop(self.unplaced)
            if group.owner is None and group.queued:
                return group
        return None

    def next_group(self, generator: Generator, last_group: int) -> Group | None:
        """Return the group of which this generator should start a sample, if there is one.

        The earliest in data order of those that it has begun and those in its queue; otherwise one
        taken over from a busy generator. Only groups whose `place` is at most `last_group` may be
        started.
        """
        begun, head = _begun(generator), self._head(generator)
        earliest = begun is not None and (head is None or begun.index < head.index)
        if earliest and begun is not None and begun.place <= last_group:
            return begun
        if head is not None and head.place <= last_group:
            self._pop(generator)
        else:
            head = self._take_over(generator, last_group)
        if head is not None:
            heapq.heappush(generator.begun, (head.index, head))
        return head

    def update(self, generator: Generator) -> None:
        """Update the indices after a generator's load or queue changed."""
        name = generator.name
        if name in self._candidates:
            self._candidates.set(name, _until_done(generator))
        if generator.queue and generator.wanted > generator.width and not generator.leaving:
            self._backlogs.set(name, -len(generator.queue))
        else:
            self._backlogs.discard(name)

    def _choose(self, group: Group, least_loaded: Generator) -> Generator:
        """The previous generator of the group's prompt if it has room, else the least loaded."""
        previous = None
        if group.key is not None and group.key < len(self._last_place):
            previous = self._by_number.get(self._last_place[group.key])
        if previous is None or previous.name not in self._candidates:
            return least_loaded
        if previous.wanted >= previous.width and least_loaded.wanted < least_loaded.width:
            return least_loaded
        if previous.speed < least_loaded.speed:
            return least_loaded
        slack = max(2 * self._group_size, previous.slots // 4)
        scaled_load = least_loaded.load * previous.slots // least_loaded.slots
        return previous if previous.load <= scaled_load + slack else least_loaded

    def _own(self, group: Group, generator: Generator) -> None:
        group.owner = generator
        generator.groups[group.index] = group
        generator.load += group.queued
        if group.key is not None:
            places = self._last_place
            if group.key >= len(places):
                places.extend([-1] * (max(group.key + 1, 2 * len(places)) - len(places)))
            places[group.key] = generator.number

    def _head(self, generator: Generator) -> Group | None:
        queue = generator.queue
        while queue:
            group = queue[0][1]
            if group.owner is generator and group.queued:
                return group
            self._pop(generator)
        return None

    def _pop(self, generator: Generator) -> None:
        heapq.heappop(generator.queue)
        self.update(generator)

    def _take_over(self, taker: Generator, last_group: int) -> Group | None:
        """Move the next group of the longest queue to a generator that has idle slots."""
        while taker.wanted < taker.width and not taker.leaving:
            name = self._backlogs.first()
            if name is None or name == taker.name:
                return None
            owner = self.generators[name]
            group = self._head(owner)
            if group is None:
                continue  # all entries of its queue were outdated, so it left the index
            if owner.wanted <= owner.width or group.place > last_group:
                return None
            if taker.speed < owner.speed:
                if not _is_sooner_done(taker, owner):
                    return None
                group = _last(owner, last_group)  # its entry in the queue becomes outdated
            else:
                heapq.heappop(owner.queue)
            del owner.groups[group.index]
            owner.load -= group.queued
            self.update(owner)
            self._own(group, taker)
            self.update(taker)
            return group
        return None


def _until_done(generator: Generator) -> int:
    """Return the time until it would finish a group that is placed on it now.

    The unit is 1/`_LOAD_UNITS` of the time in which a generator of speed 1 finishes as many samples
    as it has slots.
    """
    if generator.speed == 1.0:
        return _OWN * _LOAD_UNITS + generator.load * _LOAD_UNITS // generator.slots
    units = (_OWN + generator.load / generator.slots) * _LOAD_UNITS
    return int(units / generator.speed)


def _is_sooner_done(taker: Generator, owner: Generator) -> bool:
    """Return True if a slower generator with idle slots would finish a group before its owner."""
    waits = owner.load / owner.slots - 1
    return (_OWN + taker.load / taker.slots) / taker.speed < (_OWN + waits) / owner.speed


def _last(owner: Generator, last_group: int) -> Group:
    """The last startable group in its queue: a slow generator has most time for it."""
    return max(
        group
        for _, group in owner.queue
        if group.place <= last_group and group.owner is owner and group.queued
    )


def _begun(generator: Generator) -> Group | None:
    begun = generator.begun
    while begun:
        group = begun[0][1]
        if group.owner is generator and group.queued:
            return group
        heapq.heappop(begun)
    return None


def prompt_key(key: int) -> int:
    """Check a prompt index from `group_key`. Raises SchedulerError unless 0 <= key < 2^31."""
    if not 0 <= key < _MAX_PROMPTS:
        raise SchedulerError(
            f"group_key returned {key}; it must return a prompt index, 0 to {_MAX_PROMPTS - 1}"
        )
    return key
