"""Findings that a run samples from another policy than it trains, for every output of the run.

Other weights and another tokenizer are found once, and last until the process installs the right
ones or ends: until then no step is exactly on-policy. The trainer finds the other causes by the
tokens of a step, and flags every such step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from asyncrl.monitoring.metrics.metrics import ControllerMetrics
from asyncrl.wire.records.step import StepMetrics
from asyncrl.wire.records.wrong_policy import Cause, WrongPolicy

_LASTING: tuple[Cause, ...] = ("weights", "tokenizer")
_IN_STEP = 16
"""Sentences in the record of a step."""
_IN_RUN = 200
"""Sentences of the run that are kept."""


class _Sentences:
    """Keeps the first so many sentences and counts the others.

    With `run.on_wrong_policy: warn` there may be one of each generator in each step.
    """

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
    """Says, counts and keeps findings.

    Args:
        earlier: the steps that the run did before it was resumed.
        say: shows a message. A generator's cause is said once, however often it is found.
        metrics: the controller's.
    """

    def __init__(
        self, earlier: Sequence[StepMetrics], say: Callable[[str], None], metrics: ControllerMetrics
    ) -> None:
        self._say = say
        self._metrics = metrics
        self._all, self._of_step = _recorded(earlier), _Sentences(_IN_STEP)
        self._said: set[tuple[str, str]] = set()
        self._lasting: dict[tuple[str, Cause], WrongPolicy] = {}
        """The newest finding of each process and cause that lasts."""

    @property
    def all(self) -> tuple[str, ...]:
        """Of the whole run; the last sentence may say how many more there were."""
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
        """The findings since the last call, for the record of a step."""
        since, self._of_step = tuple(self._of_step), _Sentences(_IN_STEP)
        return since

    @property
    def last(self) -> bool:
        """Whether a process still has other weights or another tokenizer."""
        return bool(self._lasting)

    def installed(self, generator: str, version: int) -> None:
        """A generator decodes with the weights of this version, and a finding would be noted."""
        found = self._lasting.get((generator, "weights"))
        if found is not None and found.policy_version < version:
            del self._lasting[generator, "weights"]

    def died(self, process: str) -> None:
        """A process has ended."""
        for cause in _LASTING:
            self._lasting.pop((process, cause), None)

    def rewind(self, earlier: Sequence[StepMetrics] | None) -> None:
        """The run returned to the step after these; None: its records could not be brought back."""
        if earlier is not None:
            self._all, self._of_step = _recorded(earlier), _Sentences(_IN_STEP)
            # What lasts may have been found in a step that is trained again.
            known = set(self._all)
            for one in self._lasting.values():
                if one.text not in known:
                    self._all.add(one.text)
                    self._of_step.add(one.text)


def _recorded(steps: Sequence[StepMetrics]) -> _Sentences:
    """The findings in the records of steps."""
    found = _Sentences(_IN_RUN)
    for step in steps:
        for text in step.wrong_policy:
            found.add(text)
    return found
