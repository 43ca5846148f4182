"""Spans of traced groups' samples in a generator: attempts, rewards, deliveries."""

import asyncio

from asyncrl.engine.protocol import GenerateRequest, TokenChunk
from asyncrl.monitoring.tracing.tracer import Moment, Tracer, Value
from asyncrl.rewards.calls import Reward
from asyncrl.rollout.trajectory import Provenance, SampleId


class AttemptTrace:
    """One attempt at a sample: a request to the engine, from its start to its end."""

    def __init__(self, tracer: Tracer, sample: SampleId, request: GenerateRequest) -> None:
        self._tracer = tracer
        self._sample = sample
        self._began = tracer.now()
        self._events: list[Moment] = []
        self._verifies = request.kept is not None
        self._verified = 0
        self._attributes: dict[str, Value] = {
            "asyncrl.prompt": request.cache_key,
            "asyncrl.priority": request.priority,
            "asyncrl.tokens.before": len(request.prefix_tokens),
        }
        if request.kept is not None:
            self._attributes["asyncrl.tokens.to_verify"] = len(request.kept)
        self._tokens = 0

    def add(self, chunk: TokenChunk) -> None:
        """Note tokens of the engine."""
        count = len(chunk.tokens)
        if count and not self._tokens:
            self._note("first token", **{"asyncrl.policy_version": chunk.policy_version})
        self._tokens += count
        if self._verifies:
            self._verified += int((chunk.provenance == Provenance.VERIFIED).sum())
        self._attributes["asyncrl.policy_version"] = chunk.policy_version
        if chunk.finish_reason is not None:
            self._attributes["asyncrl.finish_reason"] = chunk.finish_reason

    def interrupt(self) -> None:
        """Note its interruption."""
        self._note("interrupt")

    def end(self) -> None:
        """Record it."""
        self._attributes["asyncrl.tokens"] = self._tokens
        if self._verifies:
            self._attributes["asyncrl.tokens.verified"] = self._verified
        what, events = "verify" if self._verifies else "generate", tuple(self._events)
        now = self._tracer.now()
        self._tracer.of_sample(what, self._sample, self._began, now, self._attributes, events)

    def _note(self, name: str, **attributes: Value) -> None:
        self._events.append((name, self._tracer.now(), attributes))


class SampleTraces:
    """Spans of one generator."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def attempt(self, sample: SampleId, request: GenerateRequest) -> AttemptTrace | None:
        """Begin the trace of an attempt, if its group is traced."""
        if not self._tracer.is_traced(sample.group):
            return None
        return AttemptTrace(self._tracer, sample, request)

    def rewarding(self, sample: SampleId, reward: asyncio.Task[Reward]) -> None:
        """Trace the computation of a sample's reward."""
        if not self._tracer.is_traced(sample.group):
            return
        began = self._tracer.now()

        def record(done: asyncio.Task[Reward]) -> None:
            if done.cancelled():
                return
            error = done.exception()
            more: dict[str, Value] = {"asyncrl.error": type(error).__name__}
            if error is None:
                more = {"asyncrl.reward": done.result().value}
            self._tracer.of_sample("reward", sample, began, self._tracer.now(), more)

        reward.add_done_callback(record)

    def delivered(self, sample: SampleId, began: float, *, step: int, times: int) -> None:
        """Trace an acknowledged delivery, `began` at its first sending (monotonic seconds)."""
        if self._tracer.is_traced(sample.group):
            more: dict[str, Value] = {"asyncrl.step": step, "asyncrl.times_sent": times}
            self._tracer.of_sample("deliver", sample, began, self._tracer.now(), more)
