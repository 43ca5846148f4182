"""Which generator writes which group.

All samples of a group go to one generator (they share the prompt's KV and its tree). A group is
placed when the admission rule opens its step:

1. on the generator that its prompt went to last time, unless that one has clearly more to do than
   the least loaded one (`_sticky`), or would queue the group while another has idle slots;
2. otherwise on the least loaded one, relative to its slots.

Only generators that have the newest published version, or were told to install it, are placed on:
one that lags catches up first. Placing on those that are still installing keeps the first to be
ready from taking everything.

A generator starts its groups in data order, one sample whenever one finishes. When it runs out of
work and has idle slots it takes over the next untouched group of the generator with the longest
queue, provided that one is full. So each group is taken over at most once per placement, and a
straggler or a slow generator holds nobody else up.

Memory: O(groups in flight), and four bytes per prompt for the affinity.
"""

from __future__ import annotations

import heapq
from array import array

from scheduler.errors import SchedulerError
from scheduler.min_index import MinIndex
from scheduler.records import Generator, Group

_LOAD_STEPS = 32
"""Relative loads are compared in units of 1/32 of a generator's slots."""
_MOST_PROMPTS = 1 << 31
"""Prompt indices at or above this are refused; the affinity table is indexed by them."""


class Placement:
    """The generators that are alive, what each has to do, and who takes the next group."""

    def __init__(self, group_size: int) -> None:
        self.generators: dict[str, Generator] = {}
        self.unplaced: list[tuple[int, Group]] = []
        """Heap of groups for which there is no generator; entries may be outdated."""
        self._group_size = group_size
        self._by_number: dict[int, Generator] = {}
        self._joined = 0
        self._candidates = MinIndex()
        """Generators to place on, by relative load."""
        self._backlogs = MinIndex()
        """Generators with more than they can decode and groups waiting, longest queue first."""
        self._last_place: array[int] = array("i")
        """By prompt: number of the generator it went to last, -1 for none."""

    @property
    def has_candidates(self) -> bool:
        """Whether there is a generator to place on."""
        return len(self._candidates) > 0

    def add(self, name: str, *, slots: int, limit: int, version: int) -> Generator:
        """A generator joins. It is placed on after `offer`."""
        generator = Generator(name, self._joined, slots, limit, version)
        self._joined += 1
        self.generators[name] = generator
        self._by_number[generator.number] = generator
        return generator

    def remove(self, generator: Generator) -> list[Group]:
        """A generator is gone; returns the groups it owned, in data order, now without owner."""
        del self.generators[generator.name]
        del self._by_number[generator.number]
        self._candidates.discard(generator.name)
        self._backlogs.discard(generator.name)
        groups = [generator.groups[index] for index in sorted(generator.groups)]
        for group in groups:
            group.owner = None
        return groups

    def offer(self, generator: Generator, newest_version: int) -> None:
        """Place on this generator from now on, if it has or is about to have the newest version."""
        if generator.target >= newest_version:
            self._candidates.set(generator.name, generator.load * _LOAD_STEPS // generator.slots)
        else:
            self._candidates.discard(generator.name)

    def place(self, group: Group) -> Generator | None:
        """Choose an owner for a group and queue it there; None when there is nobody."""
        least = self._candidates.least()
        if least is None:
            heapq.heappush(self.unplaced, (group.index, group))
            return None
        generator = self._sticky(group, self.generators[least])
        self._own(group, generator)
        heapq.heappush(generator.queue, (group.index, group))
        self.update(generator)
        return generator

    def next_unplaced(self) -> Group | None:
        """Take the earliest group that waits for a generator."""
        while self.unplaced:
            _, group = heapq.heappop(self.unplaced)
            if group.owner is None and group.queued:
                return group
        return None

    def unplaced_samples(self) -> int:
        """Samples that wait for a generator; O(groups that do)."""
        return sum(group.queued for _, group in self.unplaced if group.owner is None)

    def next_group(self, generator: Generator, newest_group: int) -> Group | None:
        """The group of which this generator should start a sample now; None when there is none.

        The earliest in data order of those that it has begun and those in its queue; else what
        others cannot get to. Only groups up to `newest_group` may be started.
        """
        begun, head = _begun(generator), self._head(generator)
        earliest = begun is not None and (head is None or begun.index < head.index)
        if earliest and begun is not None and begun.index <= newest_group:
            return begun
        if head is not None and head.index <= newest_group:
            self._pop(generator)
        else:
            head = self._take_over(generator, newest_group)
        if head is not None:
            heapq.heappush(generator.begun, (head.index, head))
        return head

    def update(self, generator: Generator) -> None:
        """Its load or its queue changed."""
        name = generator.name
        if name in self._candidates:
            self._candidates.set(name, generator.load * _LOAD_STEPS // generator.slots)
        if generator.queue and generator.load > generator.width:
            self._backlogs.set(name, -len(generator.queue))
        else:
            self._backlogs.discard(name)

    def _sticky(self, group: Group, least: Generator) -> Generator:
        """The generator of the group's prompt if it may have it, else the least loaded one."""
        previous = self._previous(group)
        if previous is None or previous is least or previous.name not in self._candidates:
            return least
        if previous.load >= previous.width and least.load < least.width:
            return least
        slack = max(2 * self._group_size, previous.slots // 4)
        scaled_least = least.load * previous.slots // least.slots
        return previous if previous.load <= scaled_least + slack else least

    def _previous(self, group: Group) -> Generator | None:
        if group.key is None or group.key >= len(self._last_place):
            return None
        return self._by_number.get(self._last_place[group.key])

    def _own(self, group: Group, generator: Generator) -> None:
        group.owner = generator
        generator.groups[group.index] = group
        generator.load += group.queued
        if group.key is not None:
            self._remember(group.key, generator.number)

    def _remember(self, key: int, number: int) -> None:
        places = self._last_place
        if key >= len(places):
            places.extend([-1] * (max(key + 1, 2 * len(places)) - len(places)))
        places[key] = number

    def _head(self, generator: Generator) -> Group | None:
        """The first group of its queue that still has something to start."""
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

    def _take_over(self, thief: Generator, newest_group: int) -> Group | None:
        """Move the next group of the longest queue to a generator that has idle slots."""
        while thief.load < thief.width:
            name = self._backlogs.least()
            if name is None or name == thief.name:
                return None
            owner = self.generators[name]
            group = self._head(owner)
            if group is None:
                continue  # its queue was outdated, and it is off the list now
            if owner.load <= owner.width or group.index > newest_group:
                return None
            del owner.groups[group.index]
            owner.load -= group.queued
            self._pop(owner)
            self._own(group, thief)
            self.update(thief)
            return group
        return None


def _begun(generator: Generator) -> Group | None:
    """The earliest group of which it has started a sample and may start another."""
    begun = generator.begun
    while begun:
        group = begun[0][1]
        if group.owner is generator and group.queued:
            return group
        heapq.heappop(begun)
    return None


def prompt_key(key: int) -> int:
    """Check what a caller's `group_key` returned. Raises SchedulerError unless 0 <= key < 2^31."""
    if not 0 <= key < _MOST_PROMPTS:
        raise SchedulerError(f"group_key returned {key}; a prompt index from 0 is needed")
    return key
