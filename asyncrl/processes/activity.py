"""What a generator does, noted on its time line, and what its slots are used for.

    activity = Activity(timeline, metrics, slots_file=run / "slots" / "generator-0.jsonl")
    activity.note(Doing(slots=64, running=9, primary=3, verifying=2, run_ahead=4))
    activity.note(Doing(slots=64, running=64, installing=7))  # as the swap begins
    activity.note(Doing(slots=64, delivered_step=6, policy_version=6))  # waits for "new weights"

Each note says what is the case from now on, and closes what the note before had said. Call it
often (it costs microseconds): every few hundredths of a second, and where something begins or ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from monitoring.metrics import GeneratorMetrics
from monitoring.occupancy import SlotLog, SlotUse
from monitoring.timeline import SpanKind, Timeline


@dataclass(frozen=True, slots=True)
class Doing:
    """The state of a generator at one moment.

    Numbers of samples leave out those whose tokens are all there and that wait for a reward.
    """

    slots: int = 0
    """Requests that the engine can run at once."""
    running: int = 0
    """Requests that hold a slot now (`EngineStats.running`)."""
    primary: int = 0
    """Samples being written for a step that is due."""
    verifying: int = 0
    """Samples of which something was kept that is not verified yet: no chunk has come."""
    run_ahead: int = 0
    """Samples being written for later steps."""
    evaluating: int = 0
    """Held-out samples being written."""
    rewarding: int = 0
    """Samples that wait for a reward worker or are with one: `RewardPool.waiting + running`."""
    installing: int | None = None
    """Policy version whose weights are being swapped in; set it only while the engine stands."""
    paused: bool = False
    """A person has stopped the run."""
    held: int = 0
    """Finished samples that are not delivered."""
    delivered_step: int = -1
    """Newest step for which something was delivered from here."""
    policy_version: int = -1
    """Version of the weights installed here."""
    awaited: str = ""
    """What it waits for, where the caller knows better than `cause_of_waiting`. Few and constant
    words: they become label values."""


def cause_of_waiting(doing: Doing) -> str:
    """What a generator waits for whose engine has nothing to write or to score.

    `resume`: a person paused it. `rewards`: reward workers have samples of this generator; its
    engine stands, so this is idleness too. `new weights`: step b has its samples from here, and
    version b+1 is not installed. `other samples`: what it holds is not asked for yet, as its group
    or its step is not complete. `prompts`: none of these; the scheduler has admitted nothing.
    """
    if doing.paused:
        return "resume"
    if doing.rewarding:
        return "rewards"
    if doing.awaited:
        return doing.awaited
    if doing.delivered_step >= 0 and doing.delivered_step >= doing.policy_version:
        return "new weights"
    return "other samples" if doing.held else "prompts"


def kind_of(doing: Doing) -> SpanKind:
    """The one thing that is said of a generator at a moment, the most important first.

    Held-out samples come before others, as they are written at times of their own.
    `VERIFYING` means that some kept tokens wait for their score; others may be written beside it.
    """
    if doing.installing is not None:
        return SpanKind.TRANSFERRING_WEIGHTS
    if doing.running and not doing.paused:
        if doing.evaluating:
            return SpanKind.EVALUATING
        if doing.verifying:
            return SpanKind.VERIFYING
        if doing.run_ahead and not doing.primary:
            return SpanKind.RUN_AHEAD
        return SpanKind.GENERATING
    return SpanKind.WAITING


def slots_of(doing: Doing) -> dict[str, int]:
    """Number of slots by `SlotUse`, idle ones left out.

    The engine says how many requests hold a slot, not which. They are attributed in the order of
    their priority: verification, due samples, evaluation, run-ahead; what nothing explains (a
    request that has just ended) counts as due.
    """
    if doing.installing is not None or doing.paused:
        return {SlotUse.STOPPED.value: doing.slots}
    left = min(doing.running, doing.slots)
    used: dict[str, int] = {}
    for use, wanted in (
        (SlotUse.VERIFYING, doing.verifying),
        (SlotUse.PRIMARY, doing.primary),
        (SlotUse.EVALUATING, doing.evaluating),
        (SlotUse.RUN_AHEAD, doing.run_ahead),
    ):
        used[use.value] = min(left, wanted)
        left -= used[use.value]
    used[SlotUse.PRIMARY.value] += left
    return {use: count for use, count in used.items() if count}


class Activity:
    """Keeps a generator's time line and the account of its slots. One event loop calls it.

    Args:
        timeline: where spans go; its owner flushes and closes it.
        metrics: gets the slot-seconds.
        slots_file: where the use of slots is written, None for nowhere.
    """

    def __init__(
        self, timeline: Timeline, metrics: GeneratorMetrics, slots_file: Path | None = None
    ) -> None:
        self._timeline = timeline
        self._slots = SlotLog(slots_file, metrics.observe_slots)
        self._since = timeline.now()
        self._doing: Doing | None = None

    def note(self, doing: Doing) -> None:
        """This is the case from now on."""
        self._settle()
        self._doing = doing

    def close(self) -> None:
        """Nothing is done from now on; write everything. Idempotent."""
        self._settle()
        self._doing = None
        self._slots.close()

    def _settle(self) -> None:
        """Record what was the case until now."""
        now, doing = self._timeline.now(), self._doing
        if doing is not None and now > self._since:
            kind = kind_of(doing)
            about: dict[str, object] = {}
            if kind is SpanKind.WAITING:
                about["for"] = cause_of_waiting(doing)
            elif kind is SpanKind.TRANSFERRING_WEIGHTS:
                about["version"] = doing.installing
            self._timeline.record(kind, self._since, now, **about)
            if doing.slots:
                unix = self._timeline.unix
                self._slots.add(unix(self._since), unix(now), doing.slots, slots_of(doing))
        self._since = now
