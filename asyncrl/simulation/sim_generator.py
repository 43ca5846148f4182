"""A simulated generator. Its requests decode in one batch, all at the same speed.

Between two changes every active request advances by the same number of tokens a step (one, or more
if the cache drafts). So one *progress* counter, in tokens, serves all requests: a request is done
when the counter has grown by the number of tokens that it has left. A request that drafts from its
own old continuation advances faster by a constant factor. A change (a request more or less, new
weights, a prefill) costs O(log requests).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.simulation.cost import Costs
from asyncrl.simulation.lengths import Lengths, Survival
from rollout.trajectory import SampleId

_DRAWS = 1000
"""Most draws of a length that is longer than an accepted prefix."""


@dataclass(frozen=True, slots=True)
class GeneratorSetting:
    """What all generators of a simulated run have in common."""

    cost: Costs
    """Seconds of decoding, scoring and installing weights."""
    lengths: Lengths
    """Draws the length of an answer."""
    known: Mapping[SampleId, int]
    """Lengths of answers that are not drawn, unless they are rejected."""
    prompt_tokens: float
    """Tokens of every prompt."""
    drift: float
    """Total variation per token and optimizer step."""
    redraft: float
    """Chance that a token of the old continuation is accepted as a draft."""
    new_length: float
    """Chance that a rejected answer gets another length."""
    survival: Survival
    """How much of a sample verification accepts."""
    rebuilds_kv: bool
    """Whether running requests are prefilled again at an update (`on_update: recompute`)."""


@dataclass(slots=True)
class SimRequest:
    """A sample at a simulated generator, from its start to its delivery."""

    sample: SampleId
    length: int
    """Tokens of the finished answer; a rejection changes it."""
    priority: int = 0
    """As in `StartSample`: 0 if due, above 0 if it runs ahead."""
    segments: list[tuple[int, float]] = field(default_factory=list)
    """(policy version, tokens), in order."""
    drafted: float = 0.0
    """Tokens of its old continuation that are left to draft from."""
    scoring: float = 0.0
    """Progress until its verification is over, which takes a slot for one step."""
    speedup: float = 1.0
    """Its speed relative to other requests while it has tokens to draft from."""
    began: float = 0.0
    """The progress counter when its current attempt began."""
    attempt: int = 0
    """Number of its current attempt, an uninterrupted time in a slot; heap entries of earlier
    attempts are outdated."""
    decoding: bool = False
    """Whether it has a slot."""
    prefilled: bool = False
    """Whether its KV exists; if not, it is computed when the request gets a slot."""
    finishes: int = 0
    """How many times it finished; a report of an earlier time is outdated."""
    rewarded_at: float = 0.0
    """Time at which it has its reward; 0 if no reward was requested."""

    @property
    def generated(self) -> float:
        """Tokens of its closed attempts; those of the current attempt are not included."""
        return sum(tokens for _, tokens in self.segments)

    @property
    def oldest_version(self) -> int:
        """Lowest policy version among its tokens."""
        return min(version for version, _ in self.segments)

    def progress_left(self) -> float:
        """How far the progress counter has to grow until the request is done."""
        left = max(0.0, self.length - self.generated)
        drafted = min(left, self.drafted)
        return self.scoring + drafted / self.speedup + left - drafted

    def grow(self, progress: float, version: int) -> float:
        """Add the tokens of this much progress as a segment; returns their number."""
        scoring = min(progress, self.scoring)
        self.scoring -= scoring
        progress -= scoring
        drafting = min(progress, self.drafted / self.speedup)
        drafted = drafting * self.speedup
        tokens = min(self.length - self.generated, drafted + progress - drafting)
        self.drafted = max(0.0, self.drafted - drafted)
        if tokens > 0:
            self.segments.append((version, tokens))
        return tokens


@dataclass(slots=True)
class Tally:
    """Counters of what a generator did."""

    busy: float = 0.0
    """Seconds of decoding and scoring."""
    useful: float = 0.0
    """Tokens decoded."""
    scored: float = 0.0
    """Tokens scored by verification."""
    rejected: float = 0.0
    """Tokens rejected by verification."""
    preempted: int = 0
    """Requests that lost their slot to due work."""


class SimGenerator:
    """Requests that decode, requests that wait for a slot, and finished ones that are held."""

    def __init__(
        self, name: str, slots: int, setting: GeneratorSetting, rng: random.Random
    ) -> None:
        self.name, self.slots = name, slots
        self.version = 0
        self.paused_until = 0.0
        self.tally = Tally()
        self._setting, self._cost, self._rng = setting, setting.cost, rng
        self._requests: dict[SampleId, SimRequest] = {}
        self._held: dict[SampleId, SimRequest] = {}
        self._waiting: list[tuple[int, int, SampleId]] = []
        """Heap of (priority, order of arrival, sample): requests that wait for a slot."""
        self._ends: list[tuple[float, int, int, SampleId]] = []
        """Heap of (progress at its end, tie-breaker, attempt, sample)."""
        self._ahead: list[tuple[int, int, int, SampleId]] = []
        """Run-ahead requests that decode, the last in data order first."""
        self._count = 0
        self._active = 0
        self._drafting = 0
        self._context = 0.0
        """Tokens attended to, all active requests together."""
        self._progress = 0.0
        """Tokens that an active request has generated since the generator began."""
        self._clock = 0.0

    # -------------------------------------------------------------------- time

    def advance(self, now: float) -> None:
        """Decode up to the time `now`."""
        start = max(self._clock, self.paused_until)
        if now > start and self._active:
            self.tally.busy += now - start
            progress = (now - start) / self._token_seconds()
            self._progress += progress
            self._context += progress * self._active
        self._clock = max(self._clock, now)

    def next_end(self) -> float | None:
        """Time at which the next request is done if nothing changes; None if none decodes."""
        while self._ends:
            end, _, attempt, sample = self._ends[0]
            request = self._requests.get(sample)
            if request is not None and request.decoding and request.attempt == attempt:
                left = max(0.0, end - self._progress) * self._token_seconds()
                return max(self._clock, self.paused_until) + left
            heapq.heappop(self._ends)
        return None

    def _token_seconds(self) -> float:
        """Seconds in which each active request generates one token."""
        cost = self._cost
        step = cost.decode(self._active, self._context, self._drafting)
        return step / cost.speed(self._active)

    def _prefill(self, tokens: float) -> None:
        """Feed this many tokens in a decode step; decoding pauses for what they add to it."""
        seconds = self._cost.prefill(tokens, self._active, self._context)
        self.paused_until = max(self.paused_until, self._clock) + seconds
        self.tally.busy += seconds

    # ---------------------------------------------------------------- requests

    def start(self, sample: SampleId, priority: int) -> None:
        """Add a request."""
        setting = self._setting
        length = setting.known.get(sample) or setting.lengths(self._rng)
        self._add(SimRequest(sample, length, priority))

    def next_finished(self) -> SimRequest | None:
        """A request that is done now, and held from now on; None if there is none."""
        if (end := self.next_end()) is None or end > self._clock + 1e-12:
            return None
        sample = heapq.heappop(self._ends)[3]
        request = self._requests[sample]
        self._leave(request)
        missing = request.length - request.generated
        if missing:  # rounding
            version, tokens = request.segments[-1]
            request.segments[-1] = (version, tokens + missing)
        del self._requests[sample]
        self._held[sample] = request
        request.finishes += 1
        self._fill()
        return request

    def verify(self, samples: tuple[SampleId, ...], min_version: int) -> None:
        """Verify samples with tokens below `min_version`; each resumes from its accepted prefix."""
        scored = 0.0
        for sample in samples:
            request = self._held.get(sample) or self._requests.get(sample)
            if request is None:
                continue
            if active := request.decoding:
                self._leave(request)
            request.priority = 0
            if request.segments and request.oldest_version < min_version:
                scored += self._accept(request)
                request.prefilled = True
                if self._held.pop(sample, None) is not None:
                    request.scoring = 1.0
                    self._add(request)
            if active:
                self._enter(request)
            elif sample in self._requests:
                self._wait(request)
        if scored:
            self.tally.scored += scored
            self._prefill(scored)
        self._fill()

    def _accept(self, request: SimRequest) -> float:
        """Cut a request to the accepted prefix; returns the number of tokens that were scored."""
        generated = request.generated
        setting = self._setting
        kept = setting.survival.kept(request.segments, self.version, setting.drift, self._rng)
        self.tally.rejected += generated - kept
        if kept < generated:
            # Verification draws the next token; the rejected ones serve as drafts.
            request.segments = [(self.version, kept + 1)]
            if setting.new_length and self._rng.random() < setting.new_length:
                request.length = self._length_above(kept, request.length)
            speed = self._cost.redraft(self._active, self._drafting, setting.redraft)
            request.speedup = speed / self._cost.speed(self._active)
            request.drafted += generated - kept - 1
            request.rewarded_at = 0.0
        else:
            request.segments = [(self.version, kept)]
        return generated

    def _length_above(self, kept: float, otherwise: int) -> int:
        """Draw the length of a response whose first `kept` tokens stay: what follows is new.

        Lengths are drawn until one is longer; `otherwise` stands for those that are hardly ever
        drawn.
        """
        for _ in range(_DRAWS):
            length = self._setting.lengths(self._rng)
            if length > kept:
                return length
        return otherwise

    @property
    def decoding(self) -> int:
        """Number of requests that decode."""
        return self._active

    def holds(self, request: SimRequest) -> bool:
        """Whether the request is finished, and neither resumed nor released since."""
        return self._held.get(request.sample) is request

    def held(self, sample: SampleId) -> SimRequest:
        """A finished sample that is held. Raises KeyError if it is not."""
        return self._held[sample]

    def release(self, samples: tuple[SampleId, ...]) -> None:
        """Forget samples that were delivered or discarded."""
        for sample in samples:
            self._held.pop(sample, None)
            request = self._requests.pop(sample, None)
            if request is not None and request.decoding:
                self._leave(request)
        self._fill()

    def install(self, version: int) -> None:
        """Install new weights; running requests continue under them with a new attempt."""
        running = [request for request in self._requests.values() if request.decoding]
        for request in running:
            self._leave(request)
        self.version = version
        for request in running:
            self._enter(request)
        if self._setting.rebuilds_kv and running:
            prompt_tokens = self._setting.prompt_tokens
            self._prefill(sum(prompt_tokens + request.generated for request in running))
        self.paused_until = max(self.paused_until, self._clock) + self._cost.swap_seconds

    def _add(self, request: SimRequest) -> None:
        self._requests[request.sample] = request
        self._wait(request)
        self._fill()

    def _wait(self, request: SimRequest) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (request.priority, self._count, request.sample))

    def _fill(self) -> None:
        while self._waiting:
            priority, _, sample = self._waiting[0]
            request = self._requests.get(sample)
            if request is None or request.decoding or request.priority != priority:
                heapq.heappop(self._waiting)
                continue
            if self._active >= self.slots and not self._preempt(priority):
                return
            heapq.heappop(self._waiting)
            if not request.prefilled:
                self._prefill(self._setting.prompt_tokens + request.generated)
                request.prefilled = True
            self._enter(request)

    def _preempt(self, priority: int) -> bool:
        """Free the slot of the last run-ahead request in data order; False if there is none."""
        while self._ahead:
            sample = self._ahead[0][3]
            request = self._requests.get(sample)
            if request is None or not request.decoding or not request.priority:
                heapq.heappop(self._ahead)
                continue
            if request.priority <= priority:
                return False
            heapq.heappop(self._ahead)
            self._leave(request)
            request.prefilled = False
            self.tally.preempted += 1
            self._wait(request)
            return True
        return False

    def _enter(self, request: SimRequest) -> None:
        request.decoding = True
        request.began = self._progress
        request.attempt += 1
        self._active += 1
        self._drafting += request.drafted > 0.0
        self._context += self._setting.prompt_tokens + request.generated
        self._count += 1
        end = self._progress + request.progress_left()
        heapq.heappush(self._ends, (end, self._count, request.attempt, request.sample))
        if request.priority:
            order = (-request.sample.group, -request.sample.sample, request.attempt, request.sample)
            heapq.heappush(self._ahead, order)

    def _leave(self, request: SimRequest) -> None:
        """Take a request out of its slot; the tokens of the attempt are of the current version."""
        request.decoding = False
        self._active -= 1
        self._drafting -= request.drafted > 0.0
        progress = self._progress - request.began
        prompt_tokens = self._setting.prompt_tokens
        left = self._context - prompt_tokens - request.generated - progress
        self._context = max(0.0, left)
        self.tally.useful += request.grow(progress, self.version)
