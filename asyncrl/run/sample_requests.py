"""The requests for samples that generators receive: which prompt, with which seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from asyncrl.tasks.prompts import Prompt, Task, prompt_order
from rollout.trajectory import SampleId
from wire.frames import encode_tokens
from wire.messages.to_generator import Evaluate, Generate, PromptPayload, Verify


class SampleRequests:
    """Makes the messages that ask a generator for samples.

    A request depends only on the run's seed and on what is asked for, so a sample that is requested
    again from its first token (after a generator or the trainer was lost) gets the same seed: no
    token that was drawn with it is left. A verification follows tokens that are left, so its seed
    must be new: the same version may come again after a rewind, hence `lineage`.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self._task = task
        self._seed = seed

    @property
    def evaluation_prompts(self) -> int:
        """How many held-out prompts the task has."""
        return len(self._task.evaluation)

    def prompt_index(self, group: int) -> int:
        """Index of the training prompt that a group answers."""
        return prompt_order(len(self._task.train), self._seed, group)

    def generate(self, sample: SampleId, priority: int) -> Generate:
        """Generate a training sample."""
        prompt = self._task.train[self.prompt_index(sample.group)]
        return Generate(sample, _payload(prompt), self._sample_seed("training", sample), priority)

    def verify(self, samples: Sequence[SampleId], min_version: int, *, lineage: int = 0) -> Verify:
        """Verify training samples, with seeds that differ for each policy verified under.

        Args:
            samples: to verify.
            min_version: lowest version that their tokens may have.
            lineage: of the trainer: after a rewind, policies of the same versions come again.
        """
        policy = (min_version, f"lineage {lineage}") if lineage else (min_version,)
        seeds = tuple(self._sample_seed("verify", sample, *policy) for sample in samples)
        return Verify(tuple(samples), seeds, min_version)

    def evaluate(self, round_number: int, index: int, *, prompt: int) -> Evaluate:
        """Generate the `index`-th sample of an evaluation round, for this held-out prompt."""
        seed = sample_seed(self._seed, "evaluation", round_number, index)
        return Evaluate(round_number, index, _payload(self._task.evaluation[prompt]), seed)

    def _sample_seed(self, purpose: str, sample: SampleId, *more: object) -> int:
        return sample_seed(self._seed, purpose, sample.group, sample.sample, *more)


def sample_seed(seed: int, *purpose: object) -> int:
    """A 63-bit seed that differs for every run seed, purpose and sample."""
    text = ":".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _payload(prompt: Prompt) -> PromptPayload:
    return PromptPayload(prompt.prompt_id, encode_tokens(prompt.tokens), prompt.example)
