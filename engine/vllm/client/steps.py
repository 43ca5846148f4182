"""The steps that vLLM's core reports, and the chunks of the protocol that are built from them.

One `Step` is what one forward pass added to one request. The core labels it with the version of
the weights that drew it, so a chunk has one version however late its steps are read.

Provenance: a step of n tokens accepted n - 1 drafts and drew one token. If the response ended
inside the accepted drafts (a stop token, the limit), all its tokens are drafts. vLLM's count of a
request's accepted drafts, sent with the last step, tells the two cases apart.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engine.drawing import noise_seeds
from engine.errors import EngineError
from engine.protocol import GenerateRequest, TokenChunk
from engine.stopping import StopRule
from rollout.trajectory import ByteArray, FinishReason, FloatArray, IntArray, Provenance


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens of one request from one forward pass."""

    tokens: IntArray
    """`[n]`"""
    logprob_ids: IntArray
    """`[n, 1 + K']` the drawn token, then the K' most probable ones."""
    logprobs: FloatArray
    """`[n, 1 + K']`"""
    policy_version: int
    finish_reason: FinishReason | None = None
    stopped: bool = False
    """A stop string was completed by its last token; what followed in this step was cut off."""
    accepted: int | None = None
    """In the last step: drafts accepted in all steps, including those cut off at the end."""
    scored_ids: IntArray | None = None
    """`[n, C]` for n scored tokens; columns as in `engine.vllm.extras.ScoreColumns`."""
    scored_logprobs: FloatArray | None = None
    """`[n, C]`"""


@dataclass(slots=True)
class StopWatch:
    """Follows the stop rule of one request over its steps. vLLM knows nothing of stop strings."""

    rule: StopRule
    state: int
    """After what the response resumes from."""
    ended: bool = False

    @classmethod
    def of(cls, request: GenerateRequest) -> StopWatch | None:
        """For a request that continues after its prefix; None if it has no stop strings."""
        rule = request.sampling.stop_rule
        if rule is None:
            return None
        return cls(rule, rule.follow(rule.start, request.prefix_tokens)[1])

    def cut(self, step: Step) -> Step:
        """The step up to the token that completes a stop string; all of it if none does."""
        count, self.state = self.rule.follow(self.state, step.tokens)
        if count is None:
            return step
        self.ended = True
        return replace(
            step,
            tokens=step.tokens[:count],
            logprob_ids=step.logprob_ids[:count],
            logprobs=step.logprobs[:count],
            finish_reason="stop",
            stopped=count < len(step.tokens),
            accepted=None,
        )


@dataclass(slots=True)
class StepQueue:
    """Steps of one request, from vLLM's output task to the consumer.

    The consumer is woken by the first step, when `wake_at` tokens are waiting, and by an end, an
    error or a flush.
    """

    wake_at: int
    watch: StopWatch | None = None
    """Ends the response where a stop string is complete; later steps are dropped."""
    _steps: deque[Step] = field(default_factory=deque)
    _waiting: int = 0
    _error: BaseException | None = None
    _aborted: bool = False
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    started: bool = False
    """A step has come, or an end."""

    def push(self, step: Step) -> None:
        """Add a step."""
        if self.watch is not None:
            if self.watch.ended:
                return  # drawn before vLLM was told that the response has ended
            step = self.watch.cut(step)
        first, self.started = not self.started, True
        self._steps.append(step)
        self._waiting += len(step.tokens)
        if first or self._waiting >= self.wake_at or step.finish_reason is not None:
            self._ready.set()

    def put(self, item: object) -> None:
        """Called by vLLM: with an exception when its core died, otherwise when it was aborted."""
        self.started = True
        if isinstance(item, BaseException):
            self._error = item
        else:
            self._aborted = True
        self._ready.set()

    def flush(self) -> None:
        """Wake the consumer if steps are waiting."""
        if self._steps:
            self._ready.set()

    async def take(self) -> list[Step]:
        """Wait for steps and take all of them.

        Raises:
            AbortedError: the request was aborted and no step is left.
            EngineError: it failed and no step is left; vLLM's own errors pass through.
        """
        await self._ready.wait()
        if self._error is None and not self._aborted:
            self._ready.clear()  # an end is told to every later call as well
        if self._steps:
            taken = list(self._steps)
            self._steps.clear()
            self._waiting = 0
            return taken
        if self._error is not None:
            raise self._error
        if self._aborted:
            raise AbortedError
        return []


class AbortedError(EngineError):
    """The request was aborted from this side."""


class ChunkBuilder:
    """Turns the steps of one request into chunks, with the K most probable tokens per position."""

    def __init__(self, request_id: str, top_k: int, seed: int) -> None:
        self._request_id = request_id
        self._top_k = top_k
        self._seed = np.array([seed], np.uint64)
        self._accepted = 0

    def chunks(self, steps: Sequence[Step]) -> list[TokenChunk]:
        """One chunk per run of steps of one policy version; the last one carries the end."""
        out: list[TokenChunk] = []
        run: list[Step] = []
        for step in steps:
            if run and run[-1].policy_version != step.policy_version:
                out.append(self._chunk(run))
                run = []
            run.append(step)
        if run:
            out.append(self._chunk(run))
        return out

    def _chunk(self, steps: list[Step]) -> TokenChunk:
        ids = np.concatenate([step.logprob_ids for step in steps])
        logprobs = np.concatenate([step.logprobs for step in steps])
        if np.isnan(logprobs[:, 0]).any():
            raise EngineError(not_finite(self._request_id))
        topk_ids, topk_logprobs = most_probable(ids, logprobs, self._top_k)
        return TokenChunk(
            request_id=self._request_id,
            tokens=np.concatenate([step.tokens for step in steps]),
            logprobs=np.ascontiguousarray(logprobs[:, 0]),
            topk_ids=topk_ids,
            topk_logprobs=topk_logprobs,
            noise_seeds=np.repeat(noise_seeds(self._seed, steps[-1].policy_version), len(ids)),
            provenance=np.concatenate([self._provenance(step) for step in steps]),
            policy_version=steps[-1].policy_version,
            finish_reason=steps[-1].finish_reason,
        )

    def _provenance(self, step: Step) -> ByteArray:
        n = len(step.tokens)
        out = np.full(n, Provenance.DRAFTED, np.uint8)
        # A step that was cut short ends inside its accepted drafts.
        drafted = n if step.stopped else max(n - 1, 0)
        if step.accepted is not None:
            drafted = min(step.accepted - self._accepted, n)
        out[drafted:] = Provenance.SAMPLED
        self._accepted += drafted
        return out


def not_finite(request_id: str) -> str:
    """The error message for a distribution that is NaN."""
    return (
        f"request {request_id!r}: the model's probabilities are not finite: its weights or "
        "activations overflowed"
    )


def most_probable(ids: IntArray, logprobs: FloatArray, k: int) -> tuple[IntArray, FloatArray]:
    """Columns 1 to K of a table whose column 0 is the token itself, `[n, K]` each.

    Padded with id -1 and -inf where fewer than K tokens have mass.
    """
    n = len(ids)
    have = min(k, ids.shape[1] - 1)
    out_ids = np.full((n, k), -1, np.int32)
    out_logprobs = np.full((n, k), -np.inf, np.float32)
    out_ids[:, :have] = ids[:, 1 : 1 + have]
    out_logprobs[:, :have] = logprobs[:, 1 : 1 + have]
    out_ids[np.isneginf(out_logprobs)] = -1
    return out_ids, out_logprobs
