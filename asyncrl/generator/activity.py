"""Records a generator's activity on its timeline, and the use of its slots.

Each note gives the state from now on and ends the previous one. Call `note` every few hundredths of
a second and whenever something begins or ends; a call takes microseconds.
"""

from dataclasses import dataclass
from pathlib import Path

from asyncrl.monitoring.metrics.metrics import GeneratorMetrics
from asyncrl.monitoring.metrics.occupancy import SlotLog, SlotUse
from asyncrl.monitoring.records.spans import SpanKind
from asyncrl.monitoring.records.timeline import Timeline


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """The state of a generator at one moment.

    Counts of samples exclude those whose tokens are complete and that wait for a reward.
    """

    slots: int = 0
    running: int = 0
    primary: int = 0
    verifying: int = 0
    """Samples with tokens to verify, none of which has been accepted yet."""
    run_ahead: int = 0
    evaluating: int = 0
    rewarding: int = 0
    """Samples waiting for a reward worker or being scored (`SampleRewards.pending`)."""
    environment: int = 0
    """Samples that need no slot yet; not in the counts above."""
    installing: int | None = None
    """Policy version being swapped in, while the engine is stopped for it."""
    paused: bool = False
    held: int = 0
    delivered_step: int = -1
    policy_version: int = -1


def cause_of_waiting(state: GeneratorState) -> str:
    """Return what a generator waits for when its engine has nothing to generate or score.

    `resume`: the user has paused it. `new weights`: step b has its samples from here, and version
    b+1 is not installed. `other samples`: those held here are not needed yet, because their group
    or step is incomplete. `prompts`: none of these; the scheduler has admitted nothing.
    """
    if state.paused:
        return "resume"
    if state.environment:
        return "environment"
    if state.rewarding:
        return "rewards"
    if state.delivered_step >= 0 and state.delivered_step >= state.policy_version:
        return "new weights"
    return "other samples" if state.held else "prompts"


def kind_of(state: GeneratorState) -> SpanKind:
    """Return the activity that the timeline shows for a state, the most important first.

    Evaluation, being rare, comes before training samples; other samples may run while `VERIFYING`.
    """
    if state.installing is not None:
        return SpanKind.TRANSFERRING_WEIGHTS
    if state.running and not state.paused:
        if state.evaluating:
            return SpanKind.EVALUATING
        if state.verifying:
            return SpanKind.VERIFYING
        if state.run_ahead and not state.primary:
            return SpanKind.RUN_AHEAD
        return SpanKind.GENERATING
    return SpanKind.WAITING


def slots_of(state: GeneratorState) -> dict[str, int]:
    """Count slots by `SlotUse`, without idle ones.

    The engine reports how many requests hold a slot, not which. Slots are attributed by priority:
    verification, due samples, evaluation, run-ahead; the remainder (requests that have just ended)
    counts as due. For each sample that waits for its environment, an empty slot counts for it.
    """
    if state.installing is not None or state.paused:
        return {SlotUse.STOPPED.value: state.slots}
    left = min(state.running, state.slots)
    used: dict[str, int] = {}
    for use, wanted in (
        (SlotUse.VERIFYING, state.verifying),
        (SlotUse.PRIMARY, state.primary),
        (SlotUse.EVALUATING, state.evaluating),
        (SlotUse.RUN_AHEAD, state.run_ahead),
    ):
        used[use.value] = min(left, wanted)
        left -= used[use.value]
    used[SlotUse.PRIMARY.value] += left
    empty = state.slots - sum(used.values())
    used[SlotUse.ENVIRONMENT.value] = min(empty, state.environment)
    return {use: count for use, count in used.items() if count}


class Activity:
    """Records a generator's timeline, which its owner closes, and slot-seconds. Not thread-safe."""

    def __init__(
        self, timeline: Timeline, metrics: GeneratorMetrics, slots_file: Path | None = None
    ) -> None:
        self._timeline = timeline
        self._slots = SlotLog(slots_file, metrics.observe_slots)
        self._since = timeline.now()
        self._state: GeneratorState | None = None

    def note(self, state: GeneratorState) -> None:
        """Set the state from now on."""
        self._record()
        self._state = state

    def close(self) -> None:
        """End the last state and write everything. Idempotent."""
        self._record()
        self._state = None
        self._slots.close()

    def _record(self) -> None:
        now, state = self._timeline.now(), self._state
        if state is not None and now > self._since:
            kind = kind_of(state)
            about: dict[str, object] = {}
            if kind is SpanKind.WAITING:
                about["for"] = cause_of_waiting(state)
            elif kind is SpanKind.TRANSFERRING_WEIGHTS:
                about["version"] = state.installing
            self._timeline.record(kind, self._since, now, **about)
            if state.slots:
                unix = self._timeline.unix
                self._slots.add(unix(self._since), unix(now), state.slots, slots_of(state))
        self._since = now
