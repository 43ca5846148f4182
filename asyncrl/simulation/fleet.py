"""A simulated generator: its requests decode side by side, each at the same speed.

Between two changes every row advances one token a step (or several, if it drafts well), so one
*progress* counter serves all rows: a row is done when the counter has grown by its steps. A change
(a row more or less, new weights, a prefill) is O(log rows).
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from asyncrl.simulation.cost import Cost
from asyncrl.simulation.lengths import Lengths, survivors
from cache.trajectory import SampleId


@dataclass(slots=True)
class Row:
    """A request, from its start to its end."""

    sample: SampleId
    length: int
    """Tokens of the answer when it is done."""
    priority: int = 0
    segments: list[tuple[int, float]] = field(default_factory=list)
    """(policy version, tokens), in order."""
    speed: float = 1.0
    """Tokens that a step yields."""
    began: float = 0.0
    """The progress counter when this stretch began."""
    stretch: int = 0
    """Which stretch this is; older entries of the heap are void."""
    decoding: bool = False

    @property
    def written(self) -> float:
        """Tokens so far, those of the running stretch left out."""
        return sum(tokens for _, tokens in self.segments)

    @property
    def oldest(self) -> int:
        """Lowest policy version of its tokens."""
        return min(version for version, _ in self.segments)


@dataclass(slots=True)
class Tally:
    """What a generator did."""

    busy: float = 0.0
    """Seconds of decoding and scoring."""
    useful: float = 0.0
    """Tokens decoded."""
    scored: float = 0.0
    """Tokens scored by verification."""
    rejected: float = 0.0
    """Tokens thrown away by verification."""


class SimGenerator:
    """Rows that decode, rows that wait, finished ones that are held."""

    def __init__(
        self,
        name: str,
        slots: int,
        cost: Cost,
        lengths: Lengths,
        *,
        prompt: int,
        drift: float,
        redraft: float,
        rng: random.Random,
    ) -> None:
        self.name, self.slots = name, slots
        self.version = 0
        self.paused_until = 0.0
        self.tally = Tally()
        self._cost, self._lengths, self._prompt = cost, lengths, prompt
        self._drift, self._redraft, self._rng = drift, redraft, rng
        self._rows: dict[SampleId, Row] = {}
        self._held: dict[SampleId, Row] = {}
        self._waiting: list[tuple[int, int, SampleId]] = []
        self._ends: list[tuple[float, int, int, SampleId]] = []
        self._count = 0
        self._active = 0
        self._drafting = 0
        self._context = 0.0
        self._progress = 0.0
        self._clock = 0.0

    # Time

    def advance(self, now: float) -> None:
        """Let the rows decode up to `now`."""
        start = max(self._clock, self.paused_until)
        if now > start and self._active:
            self.tally.busy += now - start
            steps = (now - start) / self._step()
            self._progress += steps
            self._context += steps * self._active
        self._clock = max(self._clock, now)

    def next_end(self) -> float | None:
        """When the next row is done, if nothing changes."""
        while self._ends:
            end, _, stretch, sample = self._ends[0]
            row = self._rows.get(sample)
            if row is not None and row.decoding and row.stretch == stretch:
                left = max(0.0, end - self._progress) * self._step()
                return max(self._clock, self.paused_until) + left
            heapq.heappop(self._ends)
        return None

    def _step(self) -> float:
        """Seconds of a decode step with the rows of now; drafts fill what is free."""
        fed = self._active
        if self._drafting:
            fed = max(fed, min(self._active + 16 * self._drafting, int(self._cost.free_tokens)))
        return self._cost.decode(fed, self._context)

    def _work(self, tokens: float) -> None:
        """A prefill holds up the decoding rows."""
        seconds = self._cost.score(tokens)
        self.paused_until = max(self.paused_until, self._clock) + seconds
        self.tally.busy += seconds

    # Requests

    def start(self, sample: SampleId, priority: int) -> None:
        """A new request."""
        self._add(Row(sample, self._lengths(self._rng), priority))

    def finished(self) -> Row | None:
        """The row that is done now; it is held from here on."""
        if (end := self.next_end()) is None or end > self._clock + 1e-12:
            return None
        sample = heapq.heappop(self._ends)[3]
        row = self._rows[sample]
        self._leave(row)
        short = row.length - row.written
        if short:  # rounding
            version, tokens = row.segments[-1]
            row.segments[-1] = (version, tokens + short)
        del self._rows[sample]
        self._held[sample] = row
        self._fill()
        return row

    def verify(self, samples: tuple[SampleId, ...], least: int) -> None:
        """Keep a prefix of what is too old, go on from there."""
        scored = 0.0
        for sample in samples:
            row = self._held.get(sample) or self._rows.get(sample)
            if row is None:
                continue
            active = row.decoding
            if active:
                self._leave(row)
            if row.segments and row.oldest < least:
                scored += self._judge(row)
                if self._held.pop(sample, None) is not None:
                    self._add(row)
            if active:
                self._enter(row)
        if scored:
            self.tally.scored += scored
            self._work(scored)
        self._fill()

    def _judge(self, row: Row) -> float:
        """Cut a row to what the new policy accepts; gives the tokens that had to be scored."""
        written = row.written
        kept = survivors(row.segments, self.version, self._drift, self._rng)
        self.tally.rejected += written - kept
        row.priority = 0
        if kept < written:
            # Verification places the next token; the rest is drafted from what was there.
            row.segments = [(self.version, kept + 1)]
            row.speed = self._speed()
        else:
            row.segments = [(self.version, kept)]
        return written

    def held(self, sample: SampleId) -> Row:
        """A finished sample."""
        return self._held[sample]

    def release(self, samples: tuple[SampleId, ...]) -> None:
        """Delivered or discarded."""
        for sample in samples:
            self._held.pop(sample, None)
            row = self._rows.pop(sample, None)
            if row is not None and row.decoding:
                self._leave(row)
        self._fill()

    def install(self, version: int) -> None:
        """New weights under the running rows: their stretch under the old ones is closed."""
        for row in self._rows.values():
            if row.decoding:
                self._leave(row)
                self._enter(row)
        self.version = version
        self.paused_until = max(self.paused_until, self._clock) + self._cost.swap_seconds

    def _speed(self) -> float:
        """Tokens a step of a row that drafts from an old continuation accepted with `redraft`."""
        free = max(0.0, self._cost.free_tokens - self._active) / (self._drafting + 1)
        drafts = int(min(16.0, free))
        a = self._redraft
        return 1.0 + (a * (1 - a**drafts) / (1 - a) if a < 1 else drafts)

    def _add(self, row: Row) -> None:
        self._rows[row.sample] = row
        self._count += 1
        heapq.heappush(self._waiting, (row.priority, self._count, row.sample))
        self._fill()

    def _fill(self) -> None:
        while self._waiting and self._active < self.slots:
            sample = heapq.heappop(self._waiting)[2]
            row = self._rows.get(sample)
            if row is not None and not row.decoding:
                if not row.segments:
                    self._work(self._prompt)
                self._enter(row)

    def _enter(self, row: Row) -> None:
        row.decoding = True
        row.began = self._progress
        row.stretch += 1
        self._active += 1
        self._drafting += row.speed > 1.0
        self._context += self._prompt + row.written
        self._count += 1
        steps = max(0.0, row.length - row.written) / row.speed
        entry = (self._progress + steps, self._count, row.stretch, row.sample)
        heapq.heappush(self._ends, entry)

    def _leave(self, row: Row) -> None:
        """Close a row's stretch: its tokens were drawn under the version of now."""
        row.decoding = False
        self._active -= 1
        self._drafting -= row.speed > 1.0
        grown = self._progress - row.began
        self._context = max(0.0, self._context - self._prompt - row.written - grown)
        tokens = min(row.length - row.written, grown * row.speed)
        if tokens > 0:
            row.segments.append((self.version, tokens))
            self.tally.useful += tokens
