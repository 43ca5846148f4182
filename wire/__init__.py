"""What travels between processes: messages, the sockets that carry them, weights.

messages/   every message, one module per direction
records     the numbers of engines and steps, typed once for every process
sockets     a `Hub` that many peers connect to, and a `Line` to one hub
addresses   where the sockets of a run lie
weights/    one version of the weights in shared memory: its layout, its writer, its reader
"""

from wire.addresses import RuntimeDirectory
from wire.errors import NoReply, Unreachable, WireError
from wire.sockets import Hub, Line

__all__ = ["Hub", "Line", "NoReply", "RuntimeDirectory", "Unreachable", "WireError"]
