"""The one place where bytes from another process become messages.

A body is a message of the expected union, or an array of such messages (`wire.transport.outbox`),
or it is refused as a whole: both methods raise only `FrameRefused`, for any bytes.
"""

import sys
from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from asyncrl.wire.errors import WireError

In = TypeVar("In")

T = TypeVar("T")

_ARRAY = b"\xdc"
"""First byte of a body of several messages: a MessagePack array with a length of two bytes."""
_LARGEST = sys.float_info.max
Finite = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
"""A field of a message that is neither infinite nor NaN."""
Amount = Annotated[float, msgspec.Meta(ge=0, le=_LARGEST)]
"""A finite field that is not negative."""
Count = Annotated[int, msgspec.Meta(ge=0)]

_QUOTED = 200
"""Characters of a refusal's text; the rest could be the peer's own megabytes."""


class Reason(StrEnum):
    """Reasons for refusing a frame; the label of `asyncrl_frames_refused_total`."""

    PARTS = "parts"
    """It does not consist of the ZeroMQ parts that a message has."""
    UNAUTHENTICATED = "unauthenticated"
    """A connection that failed to authenticate, so that no frame of it was read."""
    UNKNOWN_PEER = "unknown_peer"
    """Its sender's name does not match its key (`asyncrl.wire.transport.keys`)."""
    TOO_LONG = "too_long"
    """It is longer than any message of its socket."""
    NOT_TEXT = "not_text"
    TOO_DEEP = "too_deep"
    MALFORMED = "malformed"
    UNEXPECTED = "unexpected"
    """It is not a message of its socket: an unknown tag, a missing field, a wrong type or range."""
    IMPOSSIBLE_EVENT = "impossible_event"
    """It decodes, but is impossible in any state of the run."""
    TRAJECTORY = "trajectory"
    """A trajectory that was not ordered, differs from its report, or cannot be trained on."""
    CUT_OFF = "cut_off"
    """It was dropped undecoded, since too many frames of its sender were refused before."""


class FrameRefused(WireError):  # noqa: N818 - says what happened
    """A frame is not accepted; its sender or the connection is faulty. `text` is shortened."""

    def __init__(self, reason: Reason, text: str) -> None:
        shown = text if len(text) <= _QUOTED else text[:_QUOTED] + "..."
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown))
        self.reason = reason


class FrameDecoder(Generic[In]):
    """Decodes the messages of one direction: `incoming`, of at most `max_bytes` each."""

    def __init__(self, incoming: Any, *, max_bytes: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._several: msgspec.msgpack.Decoder[list[In]] = msgspec.msgpack.Decoder(list[incoming])
        self._max_bytes = max_bytes

    def decode(self, body: bytes) -> In:
        """Decode the message in `body`. Raises FrameRefused if it is not an accepted message."""
        return self._decode(self._decoder, body)

    def decode_all(self, body: bytes) -> list[In]:
        """Decode the messages in `body`, in order; at least one. Raises FrameRefused."""
        if body[:1] != _ARRAY:
            return [self.decode(body)]
        messages = self._decode(self._several, body)
        if not messages:
            raise FrameRefused(Reason.UNEXPECTED, "an array of no messages")
        return messages

    def _decode(self, decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
        if len(body) > self._max_bytes:
            raise FrameRefused(
                Reason.TOO_LONG, f"{len(body)} bytes; at most {self._max_bytes} are accepted"
            )
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            raise FrameRefused(Reason.UNEXPECTED, str(error)) from error
        except UnicodeDecodeError as error:
            raise FrameRefused(Reason.NOT_TEXT, str(error)) from error
        except RecursionError as error:
            raise FrameRefused(Reason.TOO_DEEP, "its values are nested too deeply") from error
        except Exception as error:
            raise FrameRefused(Reason.MALFORMED, f"{type(error).__name__}: {error}") from error
