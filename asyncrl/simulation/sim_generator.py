"""A simulated generator. Its requests decode in one batch, all at the same speed.

Every active request advances by the same number of tokens a step, so one *progress* counter, in
tokens, serves all: a request is done when the counter has grown by its remaining tokens. A request
that drafts from its own old continuation is faster by a constant factor. A change (a request more
or less, new weights, a prefill) costs O(log requests).
"""

import heapq
import math
import random

from asyncrl.rollout.trajectory import SampleId
from asyncrl.simulation.setting import Setting
from asyncrl.simulation.sim_request import SimRequest, Tally

_DRAWS = 1000


class SimGenerator:
    """Requests that decode, requests that wait for a slot, and finished ones that are held."""

    def __init__(
        self,
        name: str,
        setting: Setting,
        rng: random.Random,
        *,
        slowness: float = 1.0,
        version: int = 0,
    ) -> None:
        """Create a generator with `version`; -1: none. `slowness` multiplies computation times."""
        self.name, self.version = name, version
        self.paused_until = math.inf if version < 0 else 0.0
        self.tally = Tally()
        self._setting, self._cost, self._rng = setting, setting.cost, rng
        self._slots, self._slowness = setting.slots, slowness
        self._requests: dict[SampleId, SimRequest] = {}
        self._held: dict[SampleId, SimRequest] = {}
        self._waiting: list[tuple[int, int, SampleId]] = []
        """Heap of (priority, order of arrival, sample): requests that wait for a slot."""
        self._ends: list[tuple[float, int, int, SimRequest]] = []
        """Heap of (progress at its end, tie-breaker, attempt, request)."""
        self._ahead: list[tuple[int, int, int, SimRequest]] = []
        """Heap of (-group, -sample, tie-breaker, request): run-ahead requests that decode."""
        self._count = 0
        self._active = 0
        self._drafting = 0
        self._context = 0.0
        """Tokens attended to by all active requests together."""
        self._progress = 0.0
        """Tokens that an active request has generated since the generator began."""
        self._measured = 0.0, 0.0
        self._clock = 0.0
        self._pace: float | None = None
        """Seconds per token of each active request; None if that has changed."""

    def advance(self, now: float) -> None:
        """Decode up to time `now`."""
        clock, active = self._clock, self._active
        if active:
            start = max(clock, self.paused_until)
            if now > start:
                self.tally.busy += now - start
                progress = (now - start) / (self._pace or self._token_seconds())
                self._progress += progress
                self._context += progress * active
                self._pace = None
        if now > clock:
            self._clock = now

    def speed(self, seconds: float) -> float | None:
        """Return tokens per second and request since the last result; None if hardly busy."""
        busy, progress = self._measured
        if self.tally.busy - busy < seconds:
            return None
        self._measured = self.tally.busy, self._progress
        return (self._progress - progress) / (self.tally.busy - busy)

    def next_end(self) -> float | None:
        """Return the time of the next end if nothing changes; None if no request decodes."""
        if self.paused_until == math.inf:
            return None
        ends = self._ends
        while ends:
            end, _, attempt, request = ends[0]
            if request.attempt == attempt and request.decoding:
                left = end - self._progress
                start = max(self._clock, self.paused_until)
                return start + left * (self._pace or self._token_seconds()) if left > 0 else start
            heapq.heappop(ends)
        return None

    def _token_seconds(self) -> float:
        pace = self._pace
        if pace is None:
            cost, active = self._cost, self._active
            step = cost.decode(active, self._context, self._drafting)
            pace = self._pace = self._slowness * (step / cost.speed(active))
        return pace

    def _prefill(self, tokens: float) -> None:
        """Feed this many tokens in a decode step, and pause decoding for the added time."""
        seconds = self._slowness * self._cost.prefill(tokens, self._active, self._context)
        self.paused_until = max(self.paused_until, self._clock) + seconds
        self.tally.busy += seconds

    def start(self, sample: SampleId, priority: int) -> None:
        """Add a request."""
        setting = self._setting
        length = setting.known.get(sample) or setting.lengths(self._rng)
        if setting.failures.any:
            setting.known[sample] = length
        self._add(SimRequest(sample, length, priority))

    def finish_next(self) -> SimRequest | None:
        """Finish and hold the request that is done now; None if another event was due."""
        request = heapq.heappop(self._ends)[3]
        self._leave(request)
        request.round_off()
        sample = request.sample
        del self._requests[sample]
        self._held[sample] = request
        request.finishes += 1
        self._fill()
        return request

    def verify(self, samples: tuple[SampleId, ...], min_version: int) -> list[SimRequest]:
        """Verify samples with tokens below `min_version`; return held ones that do not need it."""
        scored, unchanged = 0.0, []
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
            elif sample in self._held:
                unchanged.append(request)
            if active:
                self._enter(request)
            elif sample in self._requests:
                self._wait(request)
        if scored:
            self._prefill(scored)
        self._fill()
        return unchanged

    def _accept(self, request: SimRequest) -> float:
        """Cut a request to the accepted prefix; return the number of scored tokens."""
        generated = request.generated
        setting = self._setting
        kept = setting.survival.kept(request.segments, self.version, setting.drift, self._rng)
        request.unknown = False
        self.tally.rejected += generated - kept
        # After a rejection verification draws the next token; the rejected ones serve as drafts.
        request.replace(self.version, kept + (kept < generated))
        if kept < generated:
            if setting.new_length and self._rng.random() < setting.new_length:
                draws = (self._another_length(request.sample) for _ in range(_DRAWS))
                request.length = next((one for one in draws if one > kept), request.length)
            speed = self._cost.redraft(self._active, self._drafting, setting.redraft)
            request.speedup = speed / self._cost.speed(self._active)
            request.drafted += generated - kept - 1
            request.rewarded_at = 0.0
        return generated

    def _another_length(self, sample: SampleId) -> int:
        again = self._setting.again
        return self._setting.lengths(self._rng) if again is None else again(sample, self._rng)

    @property
    def decoding(self) -> int:
        """Number of requests that decode."""
        return self._active

    def holds(self, request: SimRequest) -> bool:
        """Return True if the request is finished, and neither resumed nor released since."""
        return self._held.get(request.sample) is request

    def held(self, sample: SampleId) -> SimRequest:
        """Return a finished sample that is held. Raises KeyError if it is not."""
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
        running = self._restart(version)
        if self._setting.config.on_update == "recompute" and running:
            prompt_tokens = self._setting.prompt_tokens
            self._prefill(sum(prompt_tokens + one.generated + one.observed for one in running))
        if self.paused_until == math.inf:
            self.paused_until = self._clock
        self.paused_until = max(self.paused_until, self._clock) + self._cost.swap_seconds

    def rewind(self, version: int) -> int:
        """Forget policies after `version`; return the installed version, -1 if it is gone."""
        self._restart(self.version)
        for request in (*self._requests.values(), *self._held.values()):
            request.rewind(version)
        if self.version > version:
            self.version, self.paused_until = -1, math.inf
        return self.version

    def unfinished_tokens(self) -> float:
        """Count the tokens of all samples, finished or not."""
        self._restart(self.version)
        samples = (*self._requests.values(), *self._held.values())
        return sum(request.generated for request in samples)

    def _restart(self, version: int) -> list[SimRequest]:
        """Begin a new attempt, under this version, of all requests in a slot; return them."""
        running = [request for request in self._requests.values() if request.decoding]
        for request in running:
            self._leave(request)
        self.version = version
        for request in running:
            self._enter(request)
        return running

    def _add(self, request: SimRequest) -> None:
        self._requests[request.sample] = request
        if self._waiting or self._active >= self._slots:
            self._wait(request)
            self._fill()
        else:
            self._take(request)

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
            if self._active >= self._slots and not self._preempt(priority):
                return
            heapq.heappop(self._waiting)
            self._take(request)

    def _take(self, request: SimRequest) -> None:
        if not request.prefilled:
            self._prefill(self._setting.prompt_tokens + request.generated + request.observed)
            request.prefilled = True
        self._enter(request)

    def _preempt(self, priority: int) -> bool:
        """Free the slot of the last run-ahead request in data order; False if there is none."""
        while self._ahead:
            request = self._ahead[0][3]
            if not request.decoding or not request.priority:
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
        request.began = progress = self._progress
        request.attempt = attempt = request.attempt + 1
        self._pace = None
        self._active += 1
        self._drafting += request.drafted > 0.0
        self._context += self._setting.prompt_tokens + request.generated
        self._count = count = self._count + 1
        end = progress + request.progress_left()
        heapq.heappush(self._ends, (end, count, attempt, request))
        if request.priority:
            sample = request.sample
            heapq.heappush(self._ahead, (-sample.group, -sample.sample, count, request))

    def _leave(self, request: SimRequest) -> None:
        request.decoding = False
        self._pace = None
        self._active -= 1
        self._drafting -= request.drafted > 0.0
        progress = self._progress - request.began
        prompt_tokens = self._setting.prompt_tokens
        left = self._context - prompt_tokens - request.generated - progress
        self._context = max(0.0, left)
        self.tally.useful += request.grow(progress, self.version)
