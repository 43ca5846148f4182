"""The requests for samples that generators receive: which prompt, with which seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from asyncrl.tasks.prompts import Prompt, Task, prompt_order
from rollout.trajectory import SampleId
from wire.frames import encode_tokens
from wire.messages.to_generator import Evaluate, Generate, PromptPayload, Unfinished, Verify
from wire.unfinished import Place


class SampleRequests:
    """Makes the messages that ask a generator for samples.

    A request depends only on the run's seed and on what is asked for, so a sample that is requested
    again from its first token (after a generator or the trainer was lost) gets the same seed: no
    token that was drawn with it is left. A verification follows tokens that are left, so its seed
    must be new: the same version may come again after a rewind, hence `lineage`, and after the run
    is resumed with tokens of before, hence `start`.

    Args:
        task: the prompts.
        seed: of the run.
        start: differs for every start of the run; 0 for the first one.
    """

    def __init__(self, task: Task, seed: int, start: int = 0) -> None:
        self._task = task
        self._seed = seed
        self._start = start
        self._unfinished: dict[SampleId, tuple[str, Place]] = {}

    @property
    def evaluation_prompts(self) -> int:
        """How many held-out prompts the task has."""
        return len(self._task.evaluation)

    def prompt_index(self, group: int) -> int:
        """Index of the training prompt that a group answers."""
        return prompt_order(len(self._task.train), self._seed, group)

    def add_unfinished(self, file: str, places: Sequence[Place]) -> None:
        """These samples have tokens from before the run was resumed, in this file."""
        self._unfinished |= {place.sample: (file, place) for place in places}

    def generate(self, sample: SampleId, priority: int) -> Generate:
        """Generate a training sample; the first time, from its unfinished tokens."""
        prompt = self._task.train[self.prompt_index(sample.group)]
        found = self._unfinished.pop(sample, None)
        unfinished = None
        if found is not None:
            unfinished = Unfinished(*found, self._sample_seed("restored", sample, self._start))
        seed = self._sample_seed("training", sample)
        return Generate(sample, _payload(prompt), seed, priority, unfinished)

    def verify(self, samples: Sequence[SampleId], min_version: int, *, lineage: int = 0) -> Verify:
        """Verify training samples, with seeds that differ for each policy verified under.

        Args:
            samples: to verify.
            min_version: lowest version that their tokens may have.
            lineage: of the trainer: after a rewind, policies of the same versions come again.
        """
        policy: tuple[object, ...] = (min_version,)
        if lineage:
            policy += (f"lineage {lineage}",)
        if self._start:
            policy += (f"start {self._start}",)
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
