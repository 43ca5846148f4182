"""Communication between processes: messages, sockets and weights.

messages/   every message, one module per direction, and their frames
records/    the numbers of engines and steps, typed once for every process
sockets     a `Hub` that many peers connect to, and a `Line` to one hub
transport/  keys, addresses, decoding, and several messages in one frame
sessions/   what travels through relays of other nodes, each frame exactly once
weights/    the layout of one version of the weights in shared memory
"""

if __name__ == "wire":
    raise ImportError("asyncrl's package wire is imported as asyncrl.wire", name="wire")

from asyncrl.wire.errors import NoReply, Unreachable, WireError
from asyncrl.wire.sockets import Hub, Line
from asyncrl.wire.transport.addresses import RuntimeDirectory
from asyncrl.wire.transport.keys import RunKey

__all__ = ["Hub", "Line", "NoReply", "RunKey", "RuntimeDirectory", "Unreachable", "WireError"]
