"""Requests for samples, as generators receive them: prompt and seed."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from asyncrl.rollout.trajectory import SampleId
from asyncrl.tasks.prompts import Prompt, Task, held_out_sets, prompt_order
from asyncrl.wire.messages import to_generator
from asyncrl.wire.messages.data import encode_tokens
from asyncrl.wire.messages.to_generator import Evaluate, FixedVersion, Generate, Verify
from asyncrl.wire.messages.unfinished_samples import Place


@dataclass(frozen=True, slots=True)
class RandomStreams:
    """The seeds of a run's training samples, and the order of its prompts.

    The initial weights are part of the key: if the model was trained on text that a run with the
    same `run.seed` drew, the same random numbers would repeat that text (docs/exactness.md).
    """

    seed: int
    initial_weights: str
    """Digest of the run's initial weights. Empty for a run begun before digests were recorded: its
    streams stay keyed by its seed alone."""

    def seed_of(self, *purpose: object) -> int:
        """Return the seed for this purpose."""
        weights = (self.initial_weights,) if self.initial_weights else ()
        return sample_seed(self.seed, *weights, *purpose)

    @property
    def order_seed(self) -> int:
        """Return the seed of `prompt_order`."""
        return self.seed_of("prompts") if self.initial_weights else self.seed


class SampleRequests:
    """Makes the messages that request samples from a generator.

    A training request depends only on the run's seed, its initial weights and the sample. So a
    sample that starts over (after a generator or the trainer was lost) gets the same seed, of which
    no token is left. A verification follows tokens that are left, so its seed must be new. The same
    version may come again after a rewind, hence `lineage`; after a resume with earlier tokens,
    hence `start`, the number of the run's start; and at another generator, hence the number of
    moves. Evaluation is keyed by the seed alone, so that models are compared on the same random
    numbers.
    """

    def __init__(self, task: Task, seed: int, start: int = 0) -> None:
        self._task = task
        self._seed = seed
        self._start = start
        self._streams: RandomStreams | None = None
        self._moves = 0
        """Files of moved samples since this start."""
        self._unfinished: dict[SampleId, tuple[str, Place, tuple[object, ...]]] = {}
        """File, place in it, and purpose of the seed."""

    def starts_from(self, initial_weights: str) -> None:
        """Set the initial weights' digest. Raises ValueError if another one was set."""
        streams = RandomStreams(self._seed, initial_weights)
        if self._streams is not None and self._streams != streams:
            known = self._streams.initial_weights
            raise ValueError(f"the run starts from the weights {known!r}, not {initial_weights!r}")
        self._streams = streams

    @property
    def held_out(self) -> dict[str, Sequence[Prompt]]:
        """Return all held-out prompts by the name of their set, the task's own first."""
        return held_out_sets(self._task)

    def prompt_index(self, group: int) -> int:
        """Return the index of the training prompt that a group answers."""
        return prompt_order(len(self._task.train), self._known_streams.order_seed, group)

    def add_unfinished(self, file: str, places: Sequence[Place]) -> None:
        """Register samples with tokens in this file, drawn before the run was resumed."""
        self._add(file, places, ("restored", self._start))

    def add_moved(self, file: str, places: Sequence[Place]) -> None:
        """Register samples with tokens in this file, from a generator that leaves."""
        self._moves += 1
        self._add(file, places, ("moved", self._start, self._moves))

    def forget_before(self, group: int) -> None:
        """Forget unfinished samples of groups before this one, which are settled."""
        kept = {one: found for one, found in self._unfinished.items() if one.group >= group}
        self._unfinished = kept

    def _add(self, file: str, places: Sequence[Place], seed: tuple[object, ...]) -> None:
        self._unfinished |= {place.sample: (file, place, seed) for place in places}

    def generate(self, sample: SampleId, priority: int) -> Generate:
        """Request a training sample; the first time, from its unfinished tokens."""
        prompt = self._task.train[self.prompt_index(sample.group)]
        unfinished = None
        if (found := self._unfinished.pop(sample, None)) is not None:
            file, place, (purpose, *more) = found
            again = self._sample_seed(str(purpose), sample, *more)
            unfinished = to_generator.Unfinished(file, place, again)
        seed = self._sample_seed("training", sample)
        return Generate(sample, payload_of(prompt), seed, priority, unfinished)

    def verify(self, samples: Sequence[SampleId], min_version: int, *, lineage: int = 0) -> Verify:
        """Request verification; seeds differ by policy, also after a rewind (`lineage`)."""
        policy: tuple[object, ...] = (min_version,)
        if lineage:
            policy += (f"lineage {lineage}",)
        if self._start:
            policy += (f"start {self._start}",)
        if self._moves:
            policy += (f"moves {self._moves}",)
        seeds = tuple(self._sample_seed("verify", sample, *policy) for sample in samples)
        return Verify(tuple(samples), seeds, min_version)

    def evaluate(
        self,
        number: int,
        index: int,
        prompt: Prompt,
        purpose: tuple[object, ...],
        fixed: FixedVersion | None = None,
        *,
        shown_of: str = "",
    ) -> Evaluate:
        """Request the `index`-th sample of evaluation round `number`.

        `purpose`, with the run's seed, determines the random numbers. `fixed` is the version to
        evaluate while the run trains; None means the current weights. `shown_of` is the sample's
        set, if it is to be recorded.
        """
        seed = sample_seed(self._seed, "evaluation", *purpose, index)
        if fixed is not None:
            if self._start:
                seed = sample_seed(seed, "start", self._start)
            fixed = msgspec.structs.replace(fixed, verify_seed=sample_seed(seed, "verify"))
        return Evaluate(number, index, payload_of(prompt), seed, fixed, shown_of)

    def _sample_seed(self, purpose: str, sample: SampleId, *more: object) -> int:
        return self._known_streams.seed_of(purpose, sample.group, sample.sample, *more)

    @property
    def _known_streams(self) -> RandomStreams:
        if self._streams is None:
            raise RuntimeError("the weights that the run starts from are not known yet")
        return self._streams


def sample_seed(seed: int, *purpose: object) -> int:
    """Return a 63-bit seed that differs for every run seed, purpose and sample."""
    text = ":".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def payload_of(prompt: Prompt) -> to_generator.PromptPayload:
    """Convert a prompt for the request."""
    tokens = encode_tokens(prompt.tokens)
    return to_generator.PromptPayload(prompt.prompt_id, tokens, prompt.example)
