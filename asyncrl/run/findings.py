"""Findings that a run samples from another policy than it trains, for every output of the run.

Other weights and another tokenizer are found once, and last until the process installs the right
ones or ends: until then no step is exactly on-policy. The trainer finds the other causes by the
tokens of a step, and flags every such step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monitoring.metrics import ControllerMetrics
from wire.records import StepMetrics
from wire.wrong_policy import Cause, WrongPolicy

_LASTING: tuple[Cause, ...] = ("weights", "tokenizer")


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
        self._all = [text for step in earlier for text in step.wrong_policy]
        self._recorded = len(self._all)
        self._said: set[tuple[str, str]] = set()
        self._lasting: dict[tuple[str, Cause], WrongPolicy] = {}
        """The newest finding of each process and cause that lasts."""

    @property
    def all(self) -> tuple[str, ...]:
        """Of the whole run."""
        return tuple(self._all)

    def add(self, wrong: WrongPolicy) -> None:
        """Note a finding."""
        self._all.append(wrong.text)
        self._metrics.wrong_policy.of(wrong.cause).inc()
        if wrong.cause in _LASTING:
            self._lasting[wrong.generator, wrong.cause] = wrong
        if (wrong.generator, wrong.cause) not in self._said:
            self._said.add((wrong.generator, wrong.cause))
            self._say(f"WRONG POLICY: {wrong.text}")

    def of_step(self) -> tuple[str, ...]:
        """The findings since the last call, for the record of a step."""
        since, self._recorded = self._all[self._recorded :], len(self._all)
        return tuple(since)

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
            self._all = [text for step in earlier for text in step.wrong_policy]
            self._recorded = len(self._all)
            # What lasts may have been found in a step that is trained again.
            self._all += [one.text for one in self._lasting.values() if one.text not in self._all]
