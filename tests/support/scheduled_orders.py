"""Orders of the user to a scheduler in a fake world: other bounds, and to drain."""

from asyncrl.scheduler import events
from asyncrl.scheduler.config import SchedulerConfig


class Orders:
    """Part of `scheduled_world.World`: what was ordered, and what is therefore allowed."""

    def __init__(self):
        self.begun: set[int] | None = None
        """After an order to drain: the groups that were begun. No other one may be."""
        self.changes: dict[int, SchedulerConfig] = {}
        """Bounds that were ordered, by the first step that has them."""

    def change(self, config):
        """The user changes bounds: of the steps that nothing was ever begun of."""
        first = self.scheduler.state.first_free_step
        assert max(self.placed, default=-1) < first * self.config.groups_per_step
        self.changes[first] = config
        self.tell(events.BoundsChanged({first: config}))

    def drain(self):
        """The user asks to train what is begun; nothing else is begun from now on."""
        state = self.scheduler.state
        self.begun = set(self.placed) if state.finished is None and not state.stopping else None
        self.tell(events.DrainRequested())

    def of_step(self, step):
        """The configuration with the bounds of a step."""
        past = [first for first in self.changes if first <= step]
        return self.changes[max(past)] if past else self.config

    @property
    def verifies(self):
        return any(one.on_update == "verify" for one in (self.config, *self.changes.values()))
