"""How a loop is run, and what its trainer gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from asyncrl.engine.protocol import SamplingParams
from asyncrl.rollout.trajectory import IntArray, Provenance, SampleId, VerifiableTrajectory
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.wire.messages.to_generator import Generate
from asyncrl.wire.messages.unfinished_samples import read_sample
from asyncrl.wire.records.step import TokenCounts


@dataclass(frozen=True)
class LoopSettings:
    scheduler: SchedulerConfig
    steps: int
    sampling: SamplingParams
    """`seed` is ignored: each sample has its own."""
    publish_delays: tuple[int, ...]
    """Engine steps between a complete batch and its new weights; one is drawn for each step."""
    message_delays: tuple[int, ...] = (0, 1, 2)
    """Engine steps that a message of the generator takes; one is drawn for each message."""
    lose_trainer_every: int = 0
    """In each so many steps the trainer once trains other policies than it should, for about a step
    or two, and is lost. Another one continues from the version before. 0: never."""
    kill_run_every: int = 0
    """The same, but the whole run is killed. Another run continues from the checkpoint of the
    version before, with the run-ahead that was saved with it. 0: never."""
    leave_every: int = 0
    """After each so many versions one of several generators is ordered to leave, and another one
    joins on its engine later. 0: never."""
    depth_by_tokens: bool = False
    """Each step changes how far the run goes ahead, to 0 to 3 steps, by the tokens that it trained
    on. What `auto` measures may depend on no more than all that was drawn before."""
    install_delay: int = 0
    """Additional engine steps of the message that new weights are installed. So many steps samples
    continue under the new weights before their verification is requested."""
    slots: int | None = None
    """Of each generator that are used; None: all."""
    seed: int = 0
    poll_seconds: float = 0.0003
    """Between looks at the engine's counters. Not 0: the torch engine steps in a thread, and
    polling without a pause holds the interpreter lock that it needs (10 times slower)."""


@dataclass(frozen=True)
class Delivered:
    """A trajectory that a step was trained on."""

    step: int
    prompt: int
    """Index of its prompt."""
    trajectory: VerifiableTrajectory
    """As the trainer received it, with the stored top-K that its generator had."""
    reward: float
    generator: str
    """That delivered it."""

    @cached_property
    def text(self) -> tuple[int, ...]:
        return tuple(map(int, self.trajectory.tokens))


@dataclass(repr=False)
class Outcome:
    delivered: list[Delivered] = field(default_factory=list)
    finished: dict[SampleId, int] = field(default_factory=dict)
    """Order in which samples were first reported finished (some were verified afterwards)."""
    verified: int = 0
    """Tokens of older versions that verification accepted."""
    rejected: int = 0
    """Tokens of older versions that verification rejected."""
    accepted: int = 0
    """Drafted tokens that were accepted."""
    rewinds: int = 0
    """How often the trainer was lost."""
    next_step: int = 0
    """The step with which the next run begins, if this one is not complete."""
    resumed: int = 0
    """How often the run was killed and another one continued it."""
    restored: set[SampleId] = field(default_factory=set)
    """Samples that a run continued from the tokens of the one before."""
    handed_over: set[SampleId] = field(default_factory=set)
    """Samples that a generator continued from the tokens of one that left."""
    cut: int = 0
    """Requests that were running when the installation of new weights was commanded, summed."""
    written_elsewhere: dict[SampleId, IntArray] = field(default_factory=dict)
    """Tokens of samples that one generator wrote ahead and another one of the next run continued
    from. (All of them are verified there, before anything else.)"""

    def count(self, tokens: TokenCounts) -> None:
        self.accepted += tokens.accepted
        self.verified += tokens.verified
        self.rejected += tokens.rejected

    def begins(self, generator: str, request: Generate) -> None:
        """A generator begins a sample, or continues one from before the run was resumed."""
        sample, unfinished = request.sample, request.unfinished
        self.restored.discard(sample)
        self.handed_over.discard(sample)
        self.written_elsewhere.pop(sample, None)
        if unfinished is None:
            return
        file = Path(unfinished.file)
        (self.handed_over if file.parent.name == "moved" else self.restored).add(sample)
        if file.stem != generator:
            kept = read_sample(file, unfinished.place, prompt_id=request.prompt.prompt_id)
            self.written_elsewhere[sample] = kept.tokens

    @property
    def moved(self) -> Moved:
        """What became of the tokens that one generator wrote and another one verified."""
        moved = [one for one in self.delivered if one.trajectory.id in self.written_elsewhere]
        accepted = changed = 0
        for one in moved:
            written = self.written_elsewhere[one.trajectory.id]
            both = min(len(written), len(one.text))
            same = written[:both] == one.trajectory.tokens[:both]
            verified = one.trajectory.provenance[:both] == Provenance.VERIFIED
            accepted += int(np.logical_and.accumulate(same & verified).sum())
            changed += not (same.all() and both == len(written))
        return Moved(moved, accepted, changed)


@dataclass(frozen=True)
class Moved:
    """Delivered samples that one generator wrote ahead and another one verified and continued."""

    delivered: list[Delivered]
    accepted: int
    """Their tokens that the second one accepted."""
    changed: int
    """Samples of which it rejected a token."""


def reward_of(tokens: Iterator[int] | Sequence[int]) -> float:
    """A reward that differs between nearly all texts, so that a reward of another text shows."""
    value = 0.0
    for token in tokens:
        value = (value * 31 + token + 1) % 65_521
    return value
