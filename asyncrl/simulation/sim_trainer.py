"""The simulated trainer: one queue of groups, and one step after the other."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SimTrainer:
    """Processes the groups of its current step as they arrive."""

    free_at: float = 0.0
    """Time at which the groups that it has are processed."""
    busy: float = 0.0
    """Seconds spent on groups."""
    groups: dict[int, float] = field(default_factory=dict)
    """Time at which each delivered group of the current step is processed."""
    declared: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Groups of the declared steps that are not trained yet."""
    step: int = 0
    """The current step; groups of later steps wait."""
    waiting: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """By step: (group, seconds) of the groups that wait for it."""
    lineage: int = 0
    """How many trainers were lost before it; what those sent counts no more."""

    def take(self, group: int, step: int, seconds: float, now: float) -> None:
        """Take a group that arrives at the time `now`."""
        if step != self.step:
            self.waiting.setdefault(step, []).append((group, seconds))
            return
        self.free_at = max(self.free_at, now) + seconds
        self.busy += seconds
        self.groups[group] = self.free_at

    def end_of_step(self, now: float) -> tuple[float, tuple[int, ...]] | None:
        """(time, groups) of the last group of the current step; None while it is not declared."""
        groups = self.declared.pop(self.step, None)
        if groups is None:
            return None
        return max(now, *(self.groups.pop(group) for group in groups)), groups

    def finish(self, step: int, now: float) -> None:
        """Finish a step, and take the groups that wait for the next one."""
        self.step = step + 1
        for group, seconds in self.waiting.pop(self.step, []):
            self.take(group, self.step, seconds, now)

    def lose(self, now: float, checkpoint_every: int) -> None:
        """It is lost; the next one has nothing but the newest checkpoint."""
        self.lineage += 1
        self.step = self.step // checkpoint_every * checkpoint_every
        self.busy -= max(0.0, self.free_at - now)
        self.free_at = now
        self.groups.clear()
        self.declared.clear()
        self.waiting.clear()
