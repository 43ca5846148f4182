"""Communication between processes: messages, sockets and weights."""

if __name__ == "wire":
    raise ImportError("asyncrl's package wire is imported as asyncrl.wire", name="wire")

from asyncrl.wire.errors import NoReply, Unreachable, WireError
from asyncrl.wire.sockets import Hub, Line
from asyncrl.wire.transport.addresses import RuntimeDirectory
from asyncrl.wire.transport.keys import RunKey

__all__ = ["Hub", "Line", "NoReply", "RunKey", "RuntimeDirectory", "Unreachable", "WireError"]
