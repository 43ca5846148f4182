"""Findings that a run samples from another policy than it trains, for every output of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monitoring.metrics import ControllerMetrics
from wire.records import StepMetrics
from wire.wrong_policy import WrongPolicy


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

    @property
    def all(self) -> tuple[str, ...]:
        """Of the whole run."""
        return tuple(self._all)

    def add(self, wrong: WrongPolicy) -> None:
        """Note a finding."""
        self._all.append(wrong.text)
        self._metrics.wrong_policy.of(wrong.cause).inc()
        if (wrong.generator, wrong.cause) not in self._said:
            self._said.add((wrong.generator, wrong.cause))
            self._say(f"WRONG POLICY: {wrong.text}")

    def of_step(self) -> tuple[str, ...]:
        """The findings since the last call, for the record of a step."""
        since, self._recorded = self._all[self._recorded :], len(self._all)
        return tuple(since)

    def rewind(self, earlier: Sequence[StepMetrics] | None) -> None:
        """The run returned to the step after these; None: its records could not be brought back."""
        if earlier is not None:
            self._all = [text for step in earlier for text in step.wrong_policy]
            self._recorded = len(self._all)
