"""A simulated generator whose samples have several turns, with an environment behind each.

At the end of a turn a sample leaves its slot and waits for its environment. It keeps its KV while
there is room; samples that have waited longest lose it first, and all at an install, since KV of
old weights is never reused. Then it waits for a slot and is fed the observation, or everything.

Verification judges generated tokens only. If it changes turn t, all later turns are gone, and the
environment goes back to before t (`environments.GoBack`): at once, or by repeating the accepted
turns, which the sample waits for at the end of turn t if they take longer than that turn.
"""

import heapq
import random
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from asyncrl.rollout.trajectory import SampleId
from asyncrl.simulation.environments import Plan
from asyncrl.simulation.setting import Setting
from asyncrl.simulation.sim_generator import SimGenerator
from asyncrl.simulation.sim_request import SimRequest

_AT_ONCE = 1e-9
"""Tolerance in seconds within which an event is due."""


@dataclass(slots=True)
class TurnRequest(SimRequest):
    """A sample of several turns."""

    plan: Plan = field(kw_only=True)
    turn: int = 0
    """The turn being generated, or whose observation is awaited."""
    away_until: float | None = None
    """Time of its observation; None if it does not wait for one."""
    ready_at: float = 0.0
    """Time when its environment has gone back and can take the next action."""
    kept: float = 0.0
    """Tokens of KV that it keeps while it waits."""

    @property
    def goal(self) -> int:
        """Generated tokens at the end of its turn."""
        return self.plan.ends[self.turn]

    def observe(self) -> None:
        """Begin the next turn, after the observation behind the present one."""
        self.away_until = None
        self.observed += self.plan.observations[self.turn]
        self.turn += 1

    def go_to(self, generated: float) -> None:
        """Keep `generated` tokens, and return to the turn in which they end."""
        self.turn = min(bisect_left(self.plan.ends, generated), len(self.plan.ends) - 1)
        self.observed = float(sum(self.plan.observations[: self.turn]))


class TurnGenerator(SimGenerator):
    """Requests that decode, wait for a slot, or wait for their environment."""

    def __init__(self, name: str, setting: Setting, rng: random.Random, **more: Any) -> None:
        super().__init__(name, setting, rng, **more)
        assert setting.environments is not None  # noqa: S101 - by the fleet
        self._environments = setting.environments
        self._away: list[tuple[float, int, TurnRequest]] = []
        """Heap of (time of the observation, tie-breaker, request); entries may be outdated."""
        self._keeping: dict[SampleId, TurnRequest] = {}
        """Waiting requests that keep their KV, longest wait first."""
        self._kept = 0.0
        """Tokens of their KV."""
        self.away = 0
        self.told_away = 0

    def advance(self, now: float) -> None:
        """Decode up to time `now`, and count the idle time."""
        seconds = now - max(self._clock, min(now, self.paused_until))
        if seconds > 0:
            if self._active:
                self.tally.rows += seconds * self._active
            elif self.away:
                self.tally.environment += seconds
        super().advance(now)

    def next_end(self) -> float | None:
        """Return the time of the next end of a turn or observation if nothing changes, or None."""
        away = self._away
        while away and away[0][2].away_until != away[0][0]:
            heapq.heappop(away)
        end = super().next_end()
        if not away:
            return end
        back = max(self._clock, away[0][0])
        return back if end is None else min(end, back)

    def start(self, sample: SampleId, priority: int) -> None:
        """Add a request."""
        plan = self._environments.plan(sample, self._setting.seed)
        self._add(TurnRequest(sample, plan.length, priority, plan=plan))

    def finish_next(self) -> SimRequest | None:
        """Handle the event of `next_end`; return the request if it is finished."""
        if self._away and self._away[0][0] <= self._clock + _AT_ONCE:
            self._come_back(heapq.heappop(self._away)[2])
            return None
        request = self._ends[0][3]
        if not isinstance(request, TurnRequest) or request.turn == len(request.plan.ends) - 1:
            return super().finish_next()
        heapq.heappop(self._ends)
        self._leave(request)
        request.round_off()
        self._send_away(request)
        self._fill()
        return None

    def _send_away(self, request: TurnRequest) -> None:
        latency = request.plan.latencies[request.turn]
        request.away_until = max(self._clock, request.ready_at) + latency
        self._count += 1
        heapq.heappush(self._away, (request.away_until, self._count, request))
        self.away += 1
        self.tally.turns += 1
        self._keep(request)

    def _keep(self, request: TurnRequest) -> None:
        request.kept = self._setting.prompt_tokens + request.generated + request.observed
        self._keeping[request.sample] = request
        self._kept += request.kept
        self._make_room()

    def _come_back(self, request: TurnRequest) -> None:
        self.away -= 1
        keeps = self._forget_kv(request)
        request.observe()
        if keeps:
            self._prefill(request.plan.observations[request.turn - 1])
        else:
            request.prefilled = False
            self.tally.prefilled_again += 1
        self._wait(request)
        self._fill()

    def _forget_kv(self, request: TurnRequest) -> bool:
        """Drop the KV of a waiting request; return True if it had some."""
        if self._keeping.pop(request.sample, None) is None:
            return False
        self._kept = max(0.0, self._kept - request.kept)
        return True

    def _make_room(self) -> None:
        """Drop the KV of those that have waited longest until the rest fits."""
        while self._keeping and self._context + self._kept > self._setting.kv_tokens:
            self._forget_kv(next(iter(self._keeping.values())))

    def _wait(self, request: SimRequest) -> None:
        if not isinstance(request, TurnRequest) or request.away_until is None:
            super()._wait(request)

    def _take(self, request: SimRequest) -> None:
        if isinstance(request, TurnRequest) and request.away_until is not None:
            return  # an outdated entry
        super()._take(request)
        if isinstance(request, TurnRequest):
            self._make_room()

    def _enter(self, request: SimRequest) -> None:
        super()._enter(request)
        self._context += request.observed

    def _leave(self, request: SimRequest) -> None:
        super()._leave(request)
        self._context = max(0.0, self._context - request.observed)

    def _accept(self, request: SimRequest) -> float:
        if not isinstance(request, TurnRequest):
            return super()._accept(request)
        if self._environments.go_back == "start over":
            return self._start_over(request)
        turn = request.turn
        was_away = request.away_until is not None
        rejected = self.tally.rejected
        scored = super()._accept(request)
        if self.tally.rejected == rejected:
            if was_away and request.sample not in self._keeping:  # it has its KV again
                self._keep(request)
            return scored + request.observed
        judged = request.observed
        request.go_to(request.generated)
        self.tally.turns_discarded += turn + was_away - request.turn
        request.drafted = min(request.drafted, request.goal - request.generated)
        self._come_to_nothing(request)
        request.ready_at = self._clock
        if self._environments.go_back == "replay":
            request.ready_at += sum(request.plan.latencies[: request.turn])
        return scored + judged

    def _start_over(self, request: TurnRequest) -> float:
        """Restart a sample whose environment cannot go back; it is never judged."""
        self.tally.rejected += request.generated
        self.tally.turns_discarded += request.turn + (request.away_until is not None)
        request.unknown = False
        request.segments, request.generated, request.drafted = [], 0.0, 0.0
        request.rewarded_at = 0.0
        self._come_to_nothing(request)
        request.go_to(0.0)
        return 0.0

    def _come_to_nothing(self, request: TurnRequest) -> None:
        if request.away_until is not None:
            request.away_until = None
            self.away -= 1
            self._forget_kv(request)

    def release(self, samples: tuple[SampleId, ...]) -> None:
        """Forget samples that were delivered or discarded."""
        for sample in samples:
            request = self._requests.get(sample)
            if isinstance(request, TurnRequest):
                self._come_to_nothing(request)
        super().release(samples)

    def install(self, version: int) -> None:
        """Install new weights. Waiting samples lose their KV."""
        self._drop_kept()
        super().install(version)

    def rewind(self, version: int) -> int:
        """Forget the policies after `version`, and the KV of waiting samples."""
        self._drop_kept()
        return super().rewind(version)

    def _drop_kept(self) -> None:
        for request in list(self._keeping.values()):
            self._forget_kv(request)
