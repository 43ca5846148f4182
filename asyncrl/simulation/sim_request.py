"""A sample at a simulated generator, and what a generator counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.trajectory import UNKNOWN_VERSION, SampleId


@dataclass(slots=True)
class SimRequest:
    """A sample at a simulated generator, from its start to its delivery."""

    sample: SampleId
    length: int
    """Tokens of the finished answer; a rejection changes it."""
    priority: int = 0
    """As in `StartSample`: 0 if due, above 0 if it runs ahead."""
    segments: list[tuple[int, float]] = field(default_factory=list)
    """(policy version, tokens), in order."""
    drafted: float = 0.0
    """Tokens of its old continuation that are left to draft from."""
    scoring: float = 0.0
    """Progress until its verification is over, which takes a slot for one step."""
    speedup: float = 1.0
    """Its speed relative to other requests while it has tokens to draft from."""
    began: float = 0.0
    """The progress counter when its current attempt began."""
    attempt: int = 0
    """Number of its current attempt, an uninterrupted time in a slot; heap entries of earlier
    attempts are outdated."""
    decoding: bool = False
    """Whether it has a slot."""
    prefilled: bool = False
    """Whether its KV exists; if not, it is computed when the request gets a slot."""
    finishes: int = 0
    """How many times it finished; a report of an earlier time is outdated."""
    rewarded_at: float = 0.0
    """Time at which it has its reward; 0 if no reward was requested."""
    unknown: bool = False
    """Whether it has tokens of a policy that was lost with its trainer and that no verification
    has judged."""

    @property
    def generated(self) -> float:
        """Tokens of its closed attempts; those of the current attempt are not included."""
        segments = self.segments
        if len(segments) == 1:
            return segments[0][1]
        return sum(tokens for _, tokens in segments)

    @property
    def oldest_version(self) -> int:
        """Lowest policy version among its tokens, `UNKNOWN_VERSION` for a lost policy."""
        if self.unknown:
            return UNKNOWN_VERSION
        return min(version for version, _ in self.segments)

    def progress_left(self) -> float:
        """How far the progress counter has to grow until the request is done."""
        left = max(0.0, self.length - self.generated)
        drafted = min(left, self.drafted)
        return self.scoring + drafted / self.speedup + left - drafted

    def grow(self, progress: float, version: int) -> float:
        """Add the tokens of this much progress as a segment; returns their number."""
        scoring = min(progress, self.scoring)
        self.scoring -= scoring
        progress -= scoring
        drafting = min(progress, self.drafted / self.speedup)
        drafted = drafting * self.speedup
        tokens = min(self.length - self.generated, drafted + progress - drafting)
        self.drafted = max(0.0, self.drafted - drafted)
        if tokens > 0:
            self.segments.append((version, tokens))
        return tokens

    def rewind(self, version: int) -> None:
        """The policies after `version` are gone: tokens of theirs are those of an unknown policy.

        They are as far from `version` as they were, in another direction than later policies: a
        distance of n steps becomes one of n more steps.
        """
        if any(drawn > version for drawn, _ in self.segments):
            self.unknown = True
            self.segments = [
                (min(drawn, 2 * version - drawn), tokens) for drawn, tokens in self.segments
            ]


@dataclass(slots=True)
class Tally:
    """Counters of what a generator did."""

    busy: float = 0.0
    """Seconds of decoding and scoring."""
    useful: float = 0.0
    """Tokens decoded."""
    scored: float = 0.0
    """Tokens scored by verification."""
    rejected: float = 0.0
    """Tokens rejected by verification."""
    preempted: int = 0
    """Requests that lost their slot to due work."""

    def add(self, other: Tally) -> None:
        """Add what another generator did."""
        self.busy += other.busy
        self.useful += other.useful
        self.scored += other.scored
        self.rejected += other.rejected
        self.preempted += other.preempted
