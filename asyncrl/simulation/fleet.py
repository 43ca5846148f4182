"""A simulated generator: its requests decode side by side, each at the same speed.

Between two changes all rows advance by the same number of tokens a step (one, or more if the cache
drafts), so one *progress* counter, of tokens, serves all rows: a row is done when the counter has
grown by what the row has left. One that drafts from its own old continuation advances so much
faster. A change (a row more or less, new weights, a prefill) is O(log rows).
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from asyncrl.simulation.cost import Costs
from asyncrl.simulation.lengths import Lengths, Survival
from rollout.trajectory import SampleId


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What all generators of a setting have in common."""

    cost: Costs
    lengths: Lengths
    prompt_tokens: int
    drift: float
    """Total variation per token and optimizer step."""
    redraft: float
    """Chance that a token of the old continuation is accepted as a draft."""
    survival: Survival
    rebuilds: bool
    """Whether running rows are prefilled again at an update (`on_update: recompute`)."""


@dataclass(slots=True)
class Row:
    """A request, from its start to its end."""

    sample: SampleId
    length: int
    """Tokens of the answer when it is done."""
    priority: int = 0
    segments: list[tuple[int, float]] = field(default_factory=list)
    """(policy version, tokens), in order."""
    drafted: float = 0.0
    """Tokens of its old continuation that are left to draft from."""
    faster: float = 1.0
    """How much faster than other rows it is while there are any."""
    began: float = 0.0
    """The progress counter when this stretch began."""
    stretch: int = 0
    """Which stretch this is; older entries of the heap are void."""
    decoding: bool = False
    prefilled: bool = False
    """Whether its KV is there; otherwise it is computed when it gets a slot."""
    finishes: int = 0
    """How often it was done: what is under way of an earlier time is void."""
    rewarded_at: float = 0.0
    """When it has its reward; 0 if none was asked for."""

    @property
    def written(self) -> float:
        """Tokens so far, those of the running stretch left out."""
        return sum(tokens for _, tokens in self.segments)

    @property
    def oldest(self) -> int:
        """Lowest policy version of its tokens."""
        return min(version for version, _ in self.segments)

    def left(self) -> float:
        """How far the progress counter has to grow until it is done."""
        left = max(0.0, self.length - self.written)
        drafted = min(left, self.drafted)
        return drafted / self.faster + left - drafted

    def grow(self, progress: float, version: int) -> float:
        """Take the tokens of so much progress, and say how many."""
        drafting = min(progress, self.drafted / self.faster)
        drafted = drafting * self.faster
        tokens = min(self.length - self.written, drafted + progress - drafting)
        self.drafted = max(0.0, self.drafted - drafted)
        if tokens > 0:
            self.segments.append((version, tokens))
        return tokens


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
    preempted: int = 0
    """Rows that lost their slot to due work."""


class SimGenerator:
    """Rows that decode, rows that wait, finished ones that are held."""

    def __init__(self, name: str, slots: int, behaviour: Behaviour, rng: random.Random) -> None:
        self.name, self.slots = name, slots
        self.version = 0
        self.paused_until = 0.0
        self.tally = Tally()
        self._how, self._cost, self._rng = behaviour, behaviour.cost, rng
        self._rows: dict[SampleId, Row] = {}
        self._held: dict[SampleId, Row] = {}
        self._waiting: list[tuple[int, int, SampleId]] = []
        self._ends: list[tuple[float, int, int, SampleId]] = []
        self._ahead: list[tuple[int, int, int, SampleId]] = []
        """Run-ahead rows that decode, the last in data order first."""
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
            grown = (now - start) / self._token()
            self._progress += grown
            self._context += grown * self._active
        self._clock = max(self._clock, now)

    def next_end(self) -> float | None:
        """When the next row is done, if nothing changes."""
        while self._ends:
            end, _, stretch, sample = self._ends[0]
            row = self._rows.get(sample)
            if row is not None and row.decoding and row.stretch == stretch:
                left = max(0.0, end - self._progress) * self._token()
                return max(self._clock, self.paused_until) + left
            heapq.heappop(self._ends)
        return None

    def _token(self) -> float:
        """Seconds in which each row writes a token."""
        cost = self._cost
        step = cost.decode(self._active, self._context, self._drafting)
        return step / cost.speed(self._active)

    def _work(self, tokens: float) -> None:
        """A prefill holds up the decoding rows."""
        seconds = self._cost.score(tokens)
        self.paused_until = max(self.paused_until, self._clock) + seconds
        self.tally.busy += seconds

    # Requests

    def start(self, sample: SampleId, priority: int) -> None:
        """A new request."""
        self._add(Row(sample, self._how.lengths(self._rng), priority))

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
        row.finishes += 1
        self._fill()
        return row

    def verify(self, samples: tuple[SampleId, ...], least: int) -> None:
        """Keep a prefix of what is too old, go on from there."""
        scored = 0.0
        for sample in samples:
            row = self._held.get(sample) or self._rows.get(sample)
            if row is None:
                continue
            if active := row.decoding:
                self._leave(row)
            row.priority = 0
            if row.segments and row.oldest < least:
                scored += self._judge(row)
                row.prefilled = True
                if self._held.pop(sample, None) is not None:
                    self._add(row)
            if active:
                self._enter(row)
            elif sample in self._rows:
                self._wait(row)
        if scored:
            self.tally.scored += scored
            self._work(scored)
        self._fill()

    def _judge(self, row: Row) -> float:
        """Cut a row to what the new policy accepts; gives the tokens that had to be scored."""
        written = row.written
        how = self._how
        kept = how.survival.kept(row.segments, self.version, how.drift, self._rng)
        self.tally.rejected += written - kept
        if kept < written:
            # Verification places the next token; the rest is drafted from what was there.
            row.segments = [(self.version, kept + 1)]
            speed = self._cost.redraft(self._active, self._drafting, how.redraft)
            row.faster = speed / self._cost.speed(self._active)
            row.drafted += written - kept - 1
            row.rewarded_at = 0.0
        else:
            row.segments = [(self.version, kept)]
        return written

    @property
    def decoding(self) -> int:
        """Rows that decode."""
        return self._active

    def holds(self, row: Row) -> bool:
        """Whether it is finished and was not begun again or let go."""
        return self._held.get(row.sample) is row

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
        running = [row for row in self._rows.values() if row.decoding]
        for row in running:
            self._leave(row)
        self.version = version
        for row in running:
            self._enter(row)
        if self._how.rebuilds and running:
            self._work(sum(self._how.prompt_tokens + row.written for row in running))
        self.paused_until = max(self.paused_until, self._clock) + self._cost.swap_seconds

    def _add(self, row: Row) -> None:
        self._rows[row.sample] = row
        self._wait(row)
        self._fill()

    def _wait(self, row: Row) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (row.priority, self._count, row.sample))

    def _fill(self) -> None:
        while self._waiting:
            priority, _, sample = self._waiting[0]
            row = self._rows.get(sample)
            if row is None or row.decoding or row.priority != priority:
                heapq.heappop(self._waiting)
                continue
            if self._active >= self.slots and not self._preempt(priority):
                return
            heapq.heappop(self._waiting)
            if not row.prefilled:
                self._work(self._how.prompt_tokens + row.written)
                row.prefilled = True
            self._enter(row)

    def _preempt(self, priority: int) -> bool:
        """Take the slot of the run-ahead row that is wanted last, if any."""
        while self._ahead:
            sample = self._ahead[0][3]
            row = self._rows.get(sample)
            if row is None or not row.decoding or not row.priority:
                heapq.heappop(self._ahead)
                continue
            if row.priority <= priority:
                return False
            heapq.heappop(self._ahead)
            self._leave(row)
            row.prefilled = False
            self.tally.preempted += 1
            self._wait(row)
            return True
        return False

    def _enter(self, row: Row) -> None:
        row.decoding = True
        row.began = self._progress
        row.stretch += 1
        self._active += 1
        self._drafting += row.drafted > 0.0
        self._context += self._how.prompt_tokens + row.written
        self._count += 1
        entry = (self._progress + row.left(), self._count, row.stretch, row.sample)
        heapq.heappush(self._ends, entry)
        if row.priority:
            order = (-row.sample.group, -row.sample.sample, row.stretch, row.sample)
            heapq.heappush(self._ahead, order)

    def _leave(self, row: Row) -> None:
        """Close a row's stretch: its tokens were drawn under the version of now."""
        row.decoding = False
        self._active -= 1
        self._drafting -= row.drafted > 0.0
        grown = self._progress - row.began
        self._context = max(0.0, self._context - self._how.prompt_tokens - row.written - grown)
        self.tally.useful += row.grow(grown, self.version)
