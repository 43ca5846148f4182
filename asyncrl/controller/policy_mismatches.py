"""Findings that a run samples from another policy than it trains, for every output of the run.

Other weights or another tokenizer last until the process installs the right ones or ends: no step
is exactly on-policy before. The trainer finds other causes in a step's tokens and flags the step.
"""

from collections.abc import Callable, Iterator, Sequence

from asyncrl.monitoring.metrics.metrics import ControllerMetrics
from asyncrl.wire.records.step import StepMetrics
from asyncrl.wire.records.wrong_policy import Cause, WrongPolicy

_LASTING: tuple[Cause, ...] = ("weights", "tokenizer")
_IN_STEP = 16
"""Limit of sentences in a step's record."""
_IN_RUN = 200
"""Limit of sentences kept of the run."""


class _Sentences:
    """Keeps the first sentences, up to a limit, and counts the others."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: list[str] = []
        self._more = 0

    def add(self, text: str) -> None:
        if len(self._kept) < self._room:
            self._kept.append(text)
        else:
            self._more += 1

    def __iter__(self) -> Iterator[str]:
        yield from self._kept
        if self._more:
            yield f"and {self._more} more findings"


class Findings:
    """Prints, counts and keeps findings; prints a generator's cause once."""

    def __init__(
        self, earlier: Sequence[StepMetrics], say: Callable[[str], None], metrics: ControllerMetrics
    ) -> None:
        self._say = say
        self._metrics = metrics
        self._all, self._of_step = _recorded(earlier), _Sentences(_IN_STEP)
        self._said: set[tuple[str, str]] = set()
        self._lasting: dict[tuple[str, Cause], WrongPolicy] = {}

    @property
    def all(self) -> tuple[str, ...]:
        """Findings of the whole run; the last sentence may count further ones."""
        return tuple(self._all)

    def add(self, wrong: WrongPolicy) -> None:
        """Note a finding."""
        self._all.add(wrong.text)
        self._of_step.add(wrong.text)
        self._metrics.wrong_policy.of(wrong.cause).inc()
        if wrong.cause in _LASTING:
            self._lasting[wrong.generator, wrong.cause] = wrong
        if (wrong.generator, wrong.cause) not in self._said:
            self._said.add((wrong.generator, wrong.cause))
            self._say(f"WRONG POLICY: {wrong.text}")

    def of_step(self) -> tuple[str, ...]:
        """Return the findings since the last call, for the record of a step."""
        since, self._of_step = tuple(self._of_step), _Sentences(_IN_STEP)
        return since

    @property
    def last(self) -> bool:
        """True while a process has other weights or another tokenizer."""
        return bool(self._lasting)

    def installed(self, generator: str, version: int) -> None:
        """Note that a generator decodes with this version, whose weights have been checked."""
        found = self._lasting.get((generator, "weights"))
        if found is not None and found.policy_version < version:
            del self._lasting[generator, "weights"]

    def died(self, process: str) -> None:
        """Forget lasting findings of a process that ended."""
        for cause in _LASTING:
            self._lasting.pop((process, cause), None)

    def rewind(self, earlier: Sequence[StepMetrics] | None) -> None:
        """Return to the step after these; None if its records could not be restored."""
        if earlier is not None:
            self._all, self._of_step = _recorded(earlier), _Sentences(_IN_STEP)
            # A lasting finding may be of a step that is trained again.
            known = set(self._all)
            for one in self._lasting.values():
                if one.text not in known:
                    self._all.add(one.text)
                    self._of_step.add(one.text)


def _recorded(steps: Sequence[StepMetrics]) -> _Sentences:
    found = _Sentences(_IN_RUN)
    for step in steps:
        for text in step.wrong_policy:
            found.add(text)
    return found
