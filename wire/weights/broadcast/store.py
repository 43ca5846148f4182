"""The check-in of members: a pure meeting, and a desk with keys in a TCPStore.

The sender's process serves the store. A member pushes a `CheckIn` to a queue, so a member that dies
leaves it complete or not at all. The answer is a separate key, which the member deletes after
reading it; the sender deletes those of dead members. Both are JSON.
"""

import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from asyncrl.wire.errors import GroupBroken
from asyncrl.wire.weights.broadcast.groups import Backend, breaking
from asyncrl.wire.weights.layout import BroadcastPlace


class CheckIn(msgspec.Struct, frozen=True):
    """A member asks for a version."""

    member: str
    number: int
    policy_version: int
    generation: int
    """Generation of the group that it is in; 0: none."""
    device: str
    """Device that receives: "cpu", or the unique name of a GPU."""


class BroadcastMeeting:
    """Gathers the members that ask for one version. No sockets, no clock.

    A broadcast begins when all members that received the previous version are there (at first
    `expected` members), or `window` seconds after the first came.
    """

    def __init__(self, window: float, expected: int) -> None:
        self._window = window
        self._expected = expected
        """Number of members, while their names are not known."""
        self._regulars: frozenset[str] | None = None
        """Members that received the previous version; None: not known."""
        self._served: set[str] = set()
        self._version = -1
        self._waiting: dict[str, CheckIn] = {}
        self._since = 0.0

    def arrive(self, check_in: CheckIn, now: float) -> None:
        """Add a member. An earlier unanswered check-in of it is replaced."""
        if not self._waiting:
            self._since = now
        self._waiting[check_in.member] = check_in

    def turn_away(self, policy_version: int) -> list[CheckIn]:
        """Remove and return those that ask for another version than the newest."""
        if policy_version != self._version:
            if self._served:
                self._regulars = frozenset(self._served)
            self._served, self._version = set(), policy_version
        wrong = [one for one in self._waiting.values() if one.policy_version != policy_version]
        for one in wrong:
            del self._waiting[one.member]
        return wrong

    def take(self, now: float) -> list[CheckIn]:
        """Return the members of the broadcast that begins now, by name; none: it is too early."""
        if not self._waiting or (self._is_anyone_missing() and now < self._since + self._window):
            return []
        members = [self._waiting[name] for name in sorted(self._waiting)]
        self._waiting.clear()
        return members

    def served(self, members: list[CheckIn]) -> None:
        """Note that these have received the version."""
        self._served.update(one.member for one in members)

    def broke(self, members: list[CheckIn]) -> None:
        """Note that a broadcast to these failed. It is not known which of them come again."""
        self._regulars, self._expected = None, len(members)

    def _is_anyone_missing(self) -> bool:
        known = self._waiting.keys() | self._served
        if self._regulars is None:
            return len(known) < self._expected
        return not self._regulars <= known


logger = logging.getLogger(__name__)

_QUEUE = "check-ins"
_STORE_SECONDS = 10.0
"""Time limit of one call to the store."""
_POLL_SECONDS = 0.005
_BACKLOG = 1024
_UNREACHABLE = "the sender of weights cannot be reached"


class Invitation(msgspec.Struct, frozen=True, tag="invitation"):
    """Take part in a broadcast."""

    generation: int
    rank: int
    size: int
    backend: Backend
    chunk_bytes: int


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """There will be no broadcast."""

    why: str


Answer = Invitation | Refusal


class BroadcastStore:
    """The sender's side, at any free port of `host`. Raises OSError if it cannot be bound."""

    def __init__(self, host: str, patience: float) -> None:
        self._patience = patience
        self._answered: deque[tuple[float, str]] = deque()
        """Time and key of each answer, oldest first."""
        family = socket.getaddrinfo(host, None)[0][0]
        with socket.socket(family) as listening:
            listening.bind((host, 0))
            listening.listen(_BACKLOG)
            port = listening.getsockname()[1]
            self.place = BroadcastPlace(host, port, secrets.token_hex(8))
            self._server: Any = TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=_STORE_SECONDS),
                master_listen_fd=listening.detach(),
            )
        self._store: Any = PrefixStore(self.place.sender, self._server)

    def arrivals(self) -> Iterator[CheckIn]:
        """Yield those that have checked in since the last call. Raises GroupBroken."""
        with breaking(_UNREACHABLE):
            for _ in range(self._store.queue_len(_QUEUE)):
                frame = self._store.queue_pop(_QUEUE, False)
                try:
                    yield msgspec.json.decode(frame, type=CheckIn)
                except msgspec.MsgspecError:
                    logger.warning("dropped %d bytes, which are not a check-in", len(frame))

    def answer(self, check_in: CheckIn, answer: Answer) -> None:
        """Answer a member. Raises GroupBroken."""
        now = time.monotonic()
        with breaking(_UNREACHABLE):
            while self._answered and self._answered[0][0] < now - self._patience:
                self._store.delete_key(self._answered.popleft()[1])
            self._store.set(_key(check_in), msgspec.json.encode(answer))
        self._answered.append((now, _key(check_in)))

    def group_store(self, generation: int) -> Any:
        """Return the store in which the members of a group find each other."""
        return PrefixStore(f"group-{generation}", self._store)

    def forget_groups_before(self, generation: int) -> None:
        """Delete earlier groups than this one. Raises GroupBroken."""
        with breaking(_UNREACHABLE):
            for key in self._store.list_keys():
                name, _, number = key.partition("/")[0].partition("-")
                if name == "group" and int(number) < generation:
                    self._store.delete_key(key)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._store = self._server = None


class Visitor:
    """A member's side; `place` is the sender's. Raises GroupBroken if nothing answers."""

    def __init__(self, place: BroadcastPlace) -> None:
        self.place = place
        at = f"{place.host}:{place.port}"
        try:  # TCPStore would try again and again, and print a stack for each
            with socket.create_connection((place.host, place.port), _STORE_SECONDS) as probe:
                self.host: str = probe.getsockname()[0]
                """This machine's address, as the sender sees it."""
        except OSError as error:
            raise GroupBroken(f"no sender of weights listens at {at}: {error}") from error
        with breaking(_UNREACHABLE):
            limit = timedelta(seconds=_STORE_SECONDS)
            store = TCPStore(place.host, place.port, wait_for_workers=False, timeout=limit)
        self._store: Any = PrefixStore(place.sender, store)

    def ask(self, check_in: CheckIn, seconds: float) -> Answer:
        """Check in and wait for the answer. Raises GroupBroken."""
        deadline = time.monotonic() + seconds
        with breaking(_UNREACHABLE):
            self._store.queue_push(_QUEUE, msgspec.json.encode(check_in))
            while not self._store.check([_key(check_in)]):
                if time.monotonic() > deadline:
                    raise GroupBroken(
                        f"the sender of weights did not answer a check-in for version "
                        f"{check_in.policy_version} within {seconds:g} s"
                    )
                time.sleep(_POLL_SECONDS)
            frame = self._store.get(_key(check_in))
            self._store.delete_key(_key(check_in))
        try:
            answer: Answer = msgspec.json.decode(frame, type=Invitation | Refusal)
        except msgspec.MsgspecError as error:
            raise GroupBroken(f"the sender's answer cannot be decoded: {error}") from error
        return answer

    def group_store(self, generation: int) -> Any:
        """Return the store in which the members of a group find each other."""
        return PrefixStore(f"group-{generation}", self._store)


def _key(check_in: CheckIn) -> str:
    return f"answer/{check_in.member}/{check_in.number}"
