"""The configuration of each step of a run, with `run.changes`."""

from bisect import bisect_right

from asyncrl.config.run_config import RunConfig
from asyncrl.scheduler.admission import Admission
from asyncrl.scheduler.config import SchedulerConfig


class ConfigByStep:
    """Looks up the configuration of a step quickly."""

    def __init__(self, config: RunConfig) -> None:
        self.whole = config
        """The configuration with all changes as they are written."""
        self._first_steps = sorted({0, *config.run.changes})
        self._configs = [config.at(step) for step in self._first_steps]

    def at(self, step: int) -> RunConfig:
        """Return the configuration of a step, from 0."""
        return self._configs[bisect_right(self._first_steps, step) - 1]

    @property
    def _changed(self) -> dict[int, RunConfig]:
        found = zip(self._first_steps, self._configs, strict=True)
        return {step: config for step, config in found if step in self.whole.run.changes}

    @property
    def scheduler_changes(self) -> dict[int, SchedulerConfig]:
        """The scheduler's settings after each change, by its step."""
        return {step: config.scheduler for step, config in self._changed.items()}

    @property
    def admission(self) -> Admission:
        """The rule of when groups may start, and how old their tokens may be."""
        return Admission.of(self.whole.scheduler, self.scheduler_changes)

    @property
    def verifies(self) -> bool:
        """True if generators must be able to verify tokens: any step has `on_update: verify`."""
        configs = [self.whole, *self._configs]
        return any(config.scheduler.on_update == "verify" for config in configs)

    @property
    def peak_rates(self) -> dict[int, float]:
        """Peak learning rates that replace the configured one, by the first step with each."""
        return {step: config.trainer.learning_rate for step, config in self._changed.items()}
