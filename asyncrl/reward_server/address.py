"""Where a reward server listens."""

from __future__ import annotations

import socket

from asyncrl.errors import UserError
from asyncrl.monitoring.config import is_loopback

_BACKLOG = 1024


def listen(host: str, port: int, *, has_token: bool) -> socket.socket:
    """Open the socket.

    Raises:
        UserError: the address cannot be used, or others could reach it without a token.
    """
    if not has_token and not is_loopback(host):
        raise UserError(
            f"--host {host}: others could reach the server, so it needs a token: name an "
            "environment variable that holds one with --token-env, or a file with --token-file "
            "(and the same in the reward's args: token_env, token_file)"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise UserError(
            f"--host {host} --port {port}: the reward server cannot listen there "
            f"({error.strerror or error}); choose a free port (0: any) of an address of this "
            "machine"
        ) from error
    return listening


def url_of(listening: socket.socket) -> str:
    """The address of a socket, as args.url takes it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
