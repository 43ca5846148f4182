"""Whether a request means this machine by the name that it gives.

A site whose name was made to point to 127.0.0.1 (DNS rebinding) reaches servers on loopback, and
still sends its own name as `Host`.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from asyncrl.monitoring.config import is_loopback


def means_this_machine(host: str) -> bool:
    """Whether a Host header is a loopback address or `localhost`, with any port.

    Example:
        >>> means_this_machine("localhost:9100"), means_this_machine("127.0.0.1.example.org")
        (True, False)
    """
    try:
        return is_loopback((urlsplit(f"//{host}").hostname or "").lower())
    except ValueError:
        return False
