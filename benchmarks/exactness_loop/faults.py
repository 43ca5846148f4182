"""When the trainer or the whole run of the loop is lost, and which policies are lost with it."""

from __future__ import annotations

from benchmarks.exactness_loop.outcome import LoopSettings


class Faults:
    """Chooses versions after which a trainer trains other policies than the next one will."""

    def __init__(self, settings: LoopSettings, first_step: int, *, resumed: bool) -> None:
        self.kills_run = settings.kill_run_every > 0
        """Whether the run is lost with its trainer."""
        self.after: int | None = None
        """Later versions will be lost. None: none will."""
        self._every = settings.kill_run_every or settings.lose_trainer_every
        self._steps = settings.steps
        self._chosen = {first_step} if resumed else set[int]()

    def begins(self, version: int) -> bool:
        """Whether the versions after this one, which was published now, will be lost."""
        if self.after is not None or not self._every or version % self._every != 1:
            return False
        if version in self._chosen or version + self._every >= self._steps:
            return False
        self.after = version
        self._chosen.add(version)
        return True

    def will_be_lost(self, version: int) -> bool:
        """Whether the next trainer publishes another policy under this number."""
        return self.after is not None and version > self.after
