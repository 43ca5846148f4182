"""Who takes part in the next broadcast, and when it begins. No sockets, no clock."""

from __future__ import annotations

import msgspec


class CheckIn(msgspec.Struct, frozen=True):
    """A member asks for a version."""

    member: str
    """Its name, the same each time."""
    number: int
    """Of its check-ins, from 1; the answer has it too."""
    policy_version: int
    generation: int
    """Of the group that it is in; 0: none."""
    device: str
    """Where it receives: "cpu", or the unique name of a GPU."""


class Meeting:
    """Gathers the members that ask for one version.

    A broadcast begins when everybody is there who is expected, or `window` seconds after the first
    one came. Expected are the members that received the version before.

    Args:
        window: seconds.
        expected: number of members that the first version is for.
    """

    def __init__(self, window: float, expected: int) -> None:
        self._window = window
        self._expected = expected
        """Number of members, while their names are not known."""
        self._regulars: frozenset[str] | None = None
        """Members that received the version before; None: not known."""
        self._served: set[str] = set()
        """Members that have received this version."""
        self._version = -1
        self._waiting: dict[str, CheckIn] = {}
        self._since = 0.0
        """When the first of those who wait came."""

    def arrive(self, check_in: CheckIn, now: float) -> None:
        """A member asks. If it asked before and got no answer, it no longer waits for that."""
        if not self._waiting:
            self._since = now
        self._waiting[check_in.member] = check_in

    def turn_away(self, policy_version: int) -> list[CheckIn]:
        """Forget those who ask for another version than the newest, and return them."""
        if policy_version != self._version:
            if self._served:
                self._regulars = frozenset(self._served)
            self._served, self._version = set(), policy_version
        wrong = [one for one in self._waiting.values() if one.policy_version != policy_version]
        for one in wrong:
            del self._waiting[one.member]
        return wrong

    def take(self, now: float) -> list[CheckIn]:
        """The members of the broadcast that begins now, by name; none: it is too early."""
        if not self._waiting or (self._is_anyone_missing() and now < self._since + self._window):
            return []
        members = [self._waiting[name] for name in sorted(self._waiting)]
        self._waiting.clear()
        return members

    def served(self, members: list[CheckIn]) -> None:
        """These have received the version."""
        self._served.update(one.member for one in members)

    def broke(self, members: list[CheckIn]) -> None:
        """A broadcast to these failed. It is not known which of them come again."""
        self._regulars, self._expected = None, len(members)

    def _is_anyone_missing(self) -> bool:
        if self._regulars is None:
            return len(self._waiting.keys() | self._served) < self._expected
        return not self._regulars <= self._waiting.keys() | self._served
