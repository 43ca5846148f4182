"""Samples at simulated generators, and the generators' counters."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from asyncrl.rollout.trajectory import UNKNOWN_VERSION, SampleId


@dataclass(slots=True)
class SimRequest:
    """A sample at a simulated generator, from its start to its delivery."""

    sample: SampleId
    length: int
    """Tokens of the finished answer; a rejection changes it."""
    priority: int = 0
    """0 if due, above 0 if it runs ahead, as in `StartSample`."""
    segments: list[tuple[int, float]] = field(default_factory=list, init=False)
    """(policy version, tokens), in order, of its closed attempts."""
    generated: float = field(init=False, default=0.0)
    """Sum of the tokens of `segments`, without the current attempt."""
    drafted: float = 0.0
    """Remaining tokens of its old continuation to draft from."""
    scoring: float = 0.0
    """Progress until its verification is over, which takes a slot for one step."""
    speedup: float = 1.0
    """Relative speed while it has tokens to draft from."""
    began: float = 0.0
    attempt: int = 0
    """Number of its current attempt in a slot; heap entries of earlier attempts are outdated."""
    decoding: bool = False
    prefilled: bool = False
    """True if its KV exists; otherwise the KV is computed when the request gets a slot."""
    finishes: int = 0
    """Number of times it finished; a report of an earlier time is outdated."""
    rewarded_at: float = 0.0
    """Time of its reward; 0 if no reward was requested."""
    observed: float = 0.0
    unknown: bool = False
    """True if it has unverified tokens of a policy that was lost with its trainer."""

    @property
    def oldest_version(self) -> int:
        """Lowest policy version among its tokens, `UNKNOWN_VERSION` for a lost policy."""
        if self.unknown:
            return UNKNOWN_VERSION
        return min(self.segments)[0]

    @property
    def goal(self) -> int:
        """Number of generated tokens at which it leaves its slot."""
        return self.length

    def progress_left(self) -> float:
        """Progress that is left until this number."""
        left = max(0.0, self.goal - self.generated)
        if not self.drafted:
            return self.scoring + left
        drafted = min(left, self.drafted)
        return self.scoring + drafted / self.speedup + left - drafted

    def grow(self, progress: float, version: int) -> float:
        """Add the tokens of this much progress as a segment; return their number."""
        scoring = min(progress, self.scoring)
        self.scoring -= scoring
        tokens = progress = progress - scoring
        if self.drafted:
            drafting = min(progress, self.drafted / self.speedup)
            drafted = drafting * self.speedup
            tokens = drafted + progress - drafting
            self.drafted = max(0.0, self.drafted - drafted)
        tokens = min(self.goal - self.generated, tokens)
        if tokens > 0:
            self.segments.append((version, tokens))
            self.generated += tokens
        return tokens

    def replace(self, version: int, tokens: float) -> None:
        """Replace all tokens by this number of tokens of one version."""
        self.segments = [(version, tokens)]
        self.generated = tokens

    def round_off(self) -> None:
        """Set the token count to exactly `goal`, since sums of fractions only come close."""
        missing = self.goal - self.generated
        if missing:
            version, tokens = self.segments[-1]
            self.segments[-1] = (version, tokens + missing)
            self.generated = sum(tokens for _, tokens in self.segments)

    def rewind(self, version: int) -> None:
        """Assign the tokens of policies after `version` to an unknown policy."""
        if any(drawn > version for drawn, _ in self.segments):
            self.unknown = True
            self.segments = [(min(v, 2 * version - v), tokens) for v, tokens in self.segments]


@dataclass(slots=True)
class Tally:
    """Counters of a generator's work."""

    busy: float = 0.0
    """Seconds of decoding and scoring."""
    useful: float = 0.0
    rejected: float = 0.0
    preempted: int = 0
    rows: float = 0.0
    """Slot-seconds in which requests decoded; counted with environments only, like all below."""
    environment: float = 0.0
    """Seconds in which nothing decoded while samples waited for their environment."""
    turns: int = 0
    turns_discarded: int = 0
    """Number of `turns` that were behind a rejection."""
    prefilled_again: int = 0
    """Samples that came back from their environment and had lost their KV."""

    def add(self, other: Tally) -> None:
        """Add the counters of another generator."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))
