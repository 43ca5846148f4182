"""Trajectories from a generator to the trainer, and the acknowledgement back."""

from __future__ import annotations

import msgspec
import numpy as np

from rollout.trajectory import FinishReason, SampleId, Segment, Trajectory


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of this direction."""


class TrajectoryDelivery(Message, frozen=True):
    """One trajectory with its reward, sent again until `Received` names it.

    Arrays are little-endian bytes: int32 for ids, float32 for log-probabilities, uint8 provenance.
    """

    step: int
    sample: SampleId
    prompt_id: str
    prompt_tokens: bytes
    tokens: bytes
    behaviour_logprobs: bytes
    topk: int
    topk_ids: bytes
    topk_logprobs: bytes
    provenance: bytes
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    reward: float

    @classmethod
    def of(cls, trajectory: Trajectory, *, reward: float, step: int) -> TrajectoryDelivery:
        """Encode a trajectory for the wire."""
        return cls(
            step=step,
            sample=trajectory.id,
            prompt_id=trajectory.prompt_id,
            prompt_tokens=trajectory.prompt_tokens.astype("<i4").tobytes(),
            tokens=trajectory.tokens.astype("<i4").tobytes(),
            behaviour_logprobs=trajectory.behaviour_logprobs.astype("<f4").tobytes(),
            topk=int(trajectory.topk_ids.shape[1]),
            topk_ids=trajectory.topk_ids.astype("<i4").tobytes(),
            topk_logprobs=trajectory.topk_logprobs.astype("<f4").tobytes(),
            provenance=trajectory.provenance.tobytes(),
            segments=trajectory.segments,
            finish_reason=trajectory.finish_reason,
            reward=reward,
        )

    def trajectory(self) -> Trajectory:
        """Decode; arrays are read-only views of the message. Raises ValueError on wrong lengths."""
        tokens = np.frombuffer(self.tokens, "<i4")
        n = len(tokens)
        out = Trajectory(
            id=self.sample,
            prompt_id=self.prompt_id,
            prompt_tokens=np.frombuffer(self.prompt_tokens, "<i4"),
            tokens=tokens,
            behaviour_logprobs=np.frombuffer(self.behaviour_logprobs, "<f4"),
            topk_ids=np.frombuffer(self.topk_ids, "<i4").reshape(n, self.topk),
            topk_logprobs=np.frombuffer(self.topk_logprobs, "<f4").reshape(n, self.topk),
            provenance=np.frombuffer(self.provenance, np.uint8),
            segments=self.segments,
            finish_reason=self.finish_reason,
        )
        if not (n == len(out.behaviour_logprobs) == len(out.provenance) == self.segments[-1].end):
            raise ValueError(f"trajectory {self.sample}: arrays of different lengths on the wire")
        return out


class Received(Message, frozen=True):
    """The trainer holds this sample (for the first time or again)."""

    sample: SampleId


FromGeneratorData = TrajectoryDelivery
ToGeneratorData = Received
