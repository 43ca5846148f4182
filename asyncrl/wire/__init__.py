"""ZeroMQ sockets that carry the messages of `scheduler.messages`, and nothing else."""

from asyncrl.wire.addresses import RuntimeDirectory
from asyncrl.wire.sockets import Hub, Line, Unreachable

__all__ = ["Hub", "Line", "RuntimeDirectory", "Unreachable"]
