"""Where members check in and are answered: keys in a TCPStore, which the sender's process serves.

A member pushes a `CheckIn` to a queue, which is one operation, so a member that dies leaves it
whole or not at all. The answer is a key of the member's own, which it deletes when it has read it.
Both are JSON. What dead members left is deleted by the sender.
"""

from __future__ import annotations

import contextlib
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
from asyncrl.wire.weights.broadcast.groups import Backend
from asyncrl.wire.weights.broadcast.membership import CheckIn
from asyncrl.wire.weights.layout import BroadcastPlace

logger = logging.getLogger(__name__)

_QUEUE = "check-ins"
_STORE_SECONDS = 10.0
"""For one question to the store."""
_POLL_SECONDS = 0.005
_BACKLOG = 1024


class Invitation(msgspec.Struct, frozen=True, tag="invitation"):
    """Take part in a broadcast."""

    generation: int
    """Of the group: the one that the member is in, or a new one."""
    rank: int
    size: int
    backend: Backend
    chunk_bytes: int


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """There will be no broadcast."""

    why: str


Answer = Invitation | Refusal


class Desk:
    """The sender's side. It listens at one address only.

    Args:
        host: address of this machine to listen at; the port is any that is free.
        patience: seconds after which nobody waits for an answer any more.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, host: str, patience: float) -> None:
        self._patience = patience
        self._answered: deque[tuple[float, str]] = deque()
        """When each answer was given, oldest first, and its key."""
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
        """Those who have checked in since the last call. Raises GroupBroken."""
        with _store_works():
            for _ in range(self._store.queue_len(_QUEUE)):
                frame = self._store.queue_pop(_QUEUE, False)
                try:
                    yield msgspec.json.decode(frame, type=CheckIn)
                except msgspec.MsgspecError:
                    logger.warning("%d bytes that are no check-in were dropped", len(frame))

    def answer(self, check_in: CheckIn, answer: Answer) -> None:
        """Tell a member what follows. Raises GroupBroken."""
        now = time.monotonic()
        with _store_works():
            while self._answered and self._answered[0][0] < now - self._patience:
                self._store.delete_key(self._answered.popleft()[1])
            self._store.set(_key(check_in), msgspec.json.encode(answer))
        self._answered.append((now, _key(check_in)))

    def group_store(self, generation: int) -> Any:
        """Where the members of a group find each other."""
        return PrefixStore(f"group-{generation}", self._store)

    def forget_groups_before(self, generation: int) -> None:
        """Nobody joins earlier groups than this one any more. Raises GroupBroken."""
        with _store_works():
            for key in self._store.list_keys():
                name, _, number = key.partition("/")[0].partition("-")
                if name == "group" and int(number) < generation:
                    self._store.delete_key(key)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._store = self._server = None


class Visitor:
    """A member's side.

    Args:
        place: of the sender.

    Raises:
        GroupBroken: nobody answers there.
    """

    def __init__(self, place: BroadcastPlace) -> None:
        self.place = place
        at = f"{place.host}:{place.port}"
        try:  # TCPStore would try again and again, and print a stack for each
            with socket.create_connection((place.host, place.port), _STORE_SECONDS) as probe:
                self.host: str = probe.getsockname()[0]
                """This machine's address, as the sender sees it."""
        except OSError as error:
            raise GroupBroken(f"no sender of weights listens at {at}: {error}") from error
        with _store_works():
            store = TCPStore(
                place.host,
                place.port,
                wait_for_workers=False,
                timeout=timedelta(seconds=_STORE_SECONDS),
            )
        self._store: Any = PrefixStore(place.sender, store)

    def ask(self, check_in: CheckIn, seconds: float) -> Answer:
        """Check in and wait for the answer. Raises GroupBroken."""
        deadline = time.monotonic() + seconds
        with _store_works():
            self._store.queue_push(_QUEUE, msgspec.json.encode(check_in))
            while not self._store.check([_key(check_in)]):
                if time.monotonic() > deadline:
                    raise GroupBroken(
                        f"the sender of weights did not answer version {check_in.policy_version} "
                        f"within {seconds:g} s"
                    )
                time.sleep(_POLL_SECONDS)
            frame = self._store.get(_key(check_in))
            self._store.delete_key(_key(check_in))
        try:
            answer: Answer = msgspec.json.decode(frame, type=Invitation | Refusal)
        except msgspec.MsgspecError as error:
            raise GroupBroken(f"the sender's answer makes no sense: {error}") from error
        return answer

    def group_store(self, generation: int) -> Any:
        """Where the members of a group find each other."""
        return PrefixStore(f"group-{generation}", self._store)


def _key(check_in: CheckIn) -> str:
    return f"answer/{check_in.member}/{check_in.number}"


@contextlib.contextmanager
def _store_works() -> Iterator[None]:
    """Raise GroupBroken for errors of the store."""
    try:
        yield
    except RuntimeError as error:  # DistError
        first = next(iter(str(error).splitlines()), "")
        raise GroupBroken(f"the sender of weights cannot be reached: {first}") from error
