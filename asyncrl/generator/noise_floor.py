"""Measures the noise floor: verifies some responses again under the policy that drew them.

A response that the current policy drew is verified under that policy, as it would be after an
update. Exact arithmetic would accept every token; what it rejects, real verifications lose too.

The measurement changes no sample. The request names no tree of the cache, so it is neither drafted
from nor fed to it; its random numbers have no other use; it is not counted as verification, and its
stream ends after the verdict. It has the priority of run-ahead, so it never takes a slot that a due
sample waits for. At most one runs at a time, and one response in `every` is chosen, by its id: a
choice by time would prefer short responses. New weights end it.
"""

import asyncio
import hashlib
import logging
from dataclasses import replace

import numpy as np

from asyncrl.engine.protocol import Engine, GenerateRequest, SamplingParams, TokenChunk
from asyncrl.generator.background import BackgroundTasks
from asyncrl.rollout.trajectory import KeptTokens, Provenance, SampleId, VerifiableTrajectory
from asyncrl.wire.records.noise_floor import NoiseFloor

logger = logging.getLogger("asyncrl.generator")

EVERY = 64
"""One response in this many is verified again, which takes at most 1/64 of the engine's time."""
_PRIORITY = 1
_SECONDS = 60.0


class NoiseFloorProbe:
    """Verifies one in `every` finished responses again and adds up rejections. None: off."""

    def __init__(self, engine: Engine, sampling: SamplingParams, every: int | None) -> None:
        self._engine = engine
        self._sampling = sampling
        self._every = every
        self._task: asyncio.Task[None] | None = None
        self._held = False
        self.measured = NoiseFloor()

    @property
    def running(self) -> bool:
        """True while a response is being verified again."""
        return self._task is not None

    def consider(self, trajectory: VerifiableTrajectory, tasks: BackgroundTasks) -> None:
        """Verify a finished sample again, concurrently, if it is chosen and suitable.

        It is suitable if the installed policy drew or verified every unobserved token, drew one or
        more, and all are in one context. After a change of policy, KV of older weights remains.
        """
        if self._held or self._task is not None or not self._is_chosen(trajectory.id):
            return
        version = self._engine.stats().policy_version
        if [segment.policy_version for segment in trajectory.segments] != [version]:
            return
        judged = trajectory.trained & (trajectory.provenance != Provenance.VERIFIED)
        drawn = np.flatnonzero(judged)
        if len(drawn) and not trajectory.contexts:
            request = self._request(trajectory, int(drawn[0]), version)
            self._task = tasks.start(self._measure(request, version))
            self._task.add_done_callback(self._ended)

    async def idle(self) -> None:
        """Wait until no response is being verified again."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def cancel(self) -> None:
        """Drop a running measurement."""
        if self._task is not None:
            self._task.cancel()

    def hold(self) -> None:
        """Measure nothing until `allow`: a paused engine may be unable to verify."""
        self._held = True
        self.cancel()

    def allow(self) -> None:
        """Undo `hold`."""
        self._held = False

    def _ended(self, _task: asyncio.Task[None]) -> None:
        self._task = None

    def _is_chosen(self, sample: SampleId) -> bool:
        return self._every is not None and _hash("chosen", sample) % self._every == 0

    def _request(
        self, trajectory: VerifiableTrajectory, first: int, version: int
    ) -> GenerateRequest:
        """Request verification of the tokens from `first` on; earlier ones are verified already."""
        sample = trajectory.id
        observed = np.flatnonzero(~trajectory.trained[:first])
        return GenerateRequest(
            request_id=f"noise-floor-{sample}-v{version}",
            cache_key="",
            prompt_tokens=trajectory.prompt_tokens,
            sampling=replace(
                self._sampling,
                seed=_hash("numbers", sample, version),
                max_tokens=len(trajectory.tokens),
            ),
            prefix_tokens=trajectory.tokens[:first],
            kept=trajectory.kept().after(first),
            priority=_PRIORITY,
            turn_start=int(observed[-1]) + 1 if len(observed) else 0,
        )

    async def _measure(self, request: GenerateRequest, version: int) -> None:
        try:
            async with asyncio.timeout(_SECONDS):
                verdict = await self._verdict(request)
        except TimeoutError:
            logger.info("%s got no slot within %g s; dropped", request.request_id, _SECONDS)
            return
        if verdict is not None and verdict.policy_version == version and request.kept is not None:
            self.measured += _compared(request.kept, verdict)

    async def _verdict(self, request: GenerateRequest) -> TokenChunk | None:
        verdict = None
        async for chunk in self._engine.generate(request):
            if verdict is None and len(chunk.tokens):
                verdict = chunk
                if chunk.finish_reason is None:
                    self._engine.interrupt(request.request_id)
        return verdict


def _compared(kept: KeptTokens, verdict: TokenChunk) -> NoiseFloor:
    verified = np.flatnonzero(verdict.provenance == Provenance.VERIFIED)
    accepted, judged = len(verified), int((~kept.observed).sum())
    rejected = judged - accepted
    apart = np.abs(verdict.logprobs[verified] - kept.logprobs[verified], dtype=np.float64)
    return NoiseFloor(
        samples=1,
        cut_samples=int(rejected > 0),
        judged=judged,
        rejected=rejected,
        abs_mean=float(apart.mean()) if accepted else None,
        square_mean=float((apart**2).mean()) if accepted else None,
    )


def _hash(*parts: object) -> int:
    text = ":".join(str(part) for part in ("noise floor", *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
