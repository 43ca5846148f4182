"""Keys: who may connect to a hub, and under which name.

    run_key = RunKey.new()                                 # in the controller; never leaves it
    Hub(address, run_key.hub("control"), incoming)
    Line(address, run_key.line("control", "generator-0"), incoming)

All keys of a run are derived from 32 random bytes, and each process gets only the keys it needs.

- **The hub.** Its CURVE key pair is derived from the run key and the hub's name. A client must know
  the hub's public key to complete the handshake, and only children receive it, so it is treated as
  a secret too. A socket that was put in the hub's place cannot complete the handshake either.
- **The name.** A peer connects under its name followed by a *pass*, a keyed hash of the name. Only
  the holder of the key of passes can make one, so a process can take no name but its own. If the
  holder connects again, the new connection replaces the old one.
"""

import hashlib
import hmac
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec
import zmq
from zmq.utils import z85

from asyncrl.wire.errors import KeyUnusable

_KEY_BYTES = 32
_PASS_BYTES = 16


class HubKeys(msgspec.Struct, frozen=True):
    """The secrets of the end that binds. Its repr shows nothing."""

    secret: bytes
    """Z85."""
    passes: bytes

    @property
    def public(self) -> bytes:
        """The CURVE public key, as Z85."""
        public: bytes = zmq.curve_public(self.secret)
        return public

    def identity_of(self, name: str) -> bytes:
        """Return the routing id of a peer: its name and its pass."""
        return name.encode() + _hash(self.passes, name, _PASS_BYTES)

    def name_in(self, identity: bytes) -> str | None:
        """Return the name in a routing id; None unless the pass belongs to the name."""
        try:
            name = identity[:-_PASS_BYTES].decode()
        except UnicodeDecodeError:
            return None
        return name if hmac.compare_digest(identity, self.identity_of(name)) else None

    def __repr__(self) -> str:
        return "HubKeys()"


class LineKeys(msgspec.Struct, frozen=True):
    """The keys with which one peer connects to one hub. Its repr shows the name only."""

    name: str
    hub: bytes
    """Z85."""
    identity: bytes
    """The peer's routing id: its name and its pass."""

    def __repr__(self) -> str:
        return f"LineKeys({self.name!r})"


@dataclass(frozen=True, slots=True)
class RunKey:
    """32 random bytes from which the keys of all hubs and peers are derived."""

    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        """Draw a random key."""
        return cls(os.urandom(_KEY_BYTES))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the key in a file. Raises KeyUnusable if it is missing, broken or open to others."""
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                secret = file.read(_KEY_BYTES + 1)
        except OSError as error:
            raise KeyUnusable(f"{path} cannot be read: {error.strerror}") from error
        if mode & 0o077 or len(secret) != _KEY_BYTES:
            raise KeyUnusable(f"{path} is not a key that only its owner can read (mode 0600)")
        return cls(secret)

    def write(self, path: Path) -> None:
        """Write the key to a new file that only this user can read, in place of an old one."""
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(self.secret)

    def hub(self, hub: str) -> HubKeys:
        """Return the keys of the binding end of the hub of this name."""
        secret = z85.encode(_hash(self.secret, f"curve {hub}", _KEY_BYTES))
        return HubKeys(secret, _hash(self.secret, f"passes {hub}", _KEY_BYTES))

    def relayed_line(self, hub: str, relays: str, name: str) -> LineKeys:
        """Return a peer's keys for the hub of all relays, with its pass for the hub behind them."""
        return LineKeys(name, self.hub(relays).public, self.hub(hub).identity_of(name))

    def line(self, hub: str, name: str) -> LineKeys:
        """Return the keys with which the peer `name` connects to the hub of this name."""
        keys = self.hub(hub)
        return LineKeys(name, keys.public, keys.identity_of(name))


def _hash(key: bytes, text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), key=key, digest_size=size).digest()
