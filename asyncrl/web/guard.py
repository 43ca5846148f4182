"""Decides which requests are allowed: a pure function of a request's head.

- **Host**: on a loopback address, a name of this machine. A site whose name was made to point to
  127.0.0.1 (DNS rebinding) still sends its own name.
- **Sec-Fetch-Site and Origin**, which browsers set and pages cannot change: those of this page, for
  everything under /api.
- **The token**: needed for orders, and on any other than a loopback address for everything under
  /api. A form or an image of another site can send neither it nor JSON.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from asyncrl.monitoring.metrics.http_server import means_this_machine

MAX_BODY_BYTES = 4096

Headers = Sequence[tuple[bytes, bytes]]
_ONCE = b"host authorization origin sec-fetch-site content-length content-type".split()


@dataclass(frozen=True, slots=True)
class Policy:
    """The socket's reach, and the token."""

    is_loopback: bool
    """True if the socket can be reached from this machine only."""
    token: str | None
    """The token for orders; None: no run takes orders."""


@dataclass(frozen=True, slots=True)
class Denial:
    """The reason for refusing a request."""

    status: int
    reason: str


def denial(policy: Policy, method: str, path: str, headers: Headers) -> Denial | None:
    """Return the reason to refuse a request, or None."""
    single: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _ONCE and name in single:
            return Denial(400, f"the request has the header {name.decode('latin-1')} twice")
        single[name] = value
    if method not in ("GET", "HEAD", "POST"):
        return Denial(405, f"{method} is not supported; use GET, HEAD or POST")
    return (
        _wrong_host(policy, single)
        or (_other_site(single) if _is_api(path) or method == "POST" else None)
        or (_wrong_token(policy, single) if _needs_token(policy, method, path) else None)
        or (_odd_body(single) if method == "POST" else _unwanted_body(single))
    )


def _is_api(path: str) -> bool:
    return path == "/api" or path.startswith("/api/")


def _needs_token(policy: Policy, method: str, path: str) -> bool:
    if policy.is_loopback:
        return method == "POST" and policy.token is not None
    return method == "POST" or _is_api(path)


def _wrong_host(policy: Policy, headers: dict[bytes, bytes]) -> Denial | None:
    host = headers.get(b"host", b"").decode("latin-1")
    if not host:
        return Denial(400, "the request has no Host header")
    if policy.is_loopback and not means_this_machine(host):
        return Denial(
            403,
            "the Host header is not a name of this machine; open the page as 127.0.0.1 or "
            "localhost, also through an SSH tunnel",
        )
    return None


def _other_site(headers: dict[bytes, bytes]) -> Denial | None:
    site = headers.get(b"sec-fetch-site", b"none").decode("latin-1")
    origin = headers.get(b"origin")
    host = headers[b"host"].decode("latin-1").lower()
    is_ours = origin is None or _place_of(origin.decode("latin-1")) == host
    if site in ("same-origin", "none") and is_ours:
        return None
    return Denial(403, "requests from pages of other sites are refused")


def _place_of(origin: str) -> str:
    """Return name and port of an origin; "", which is not a host, for `null` and invalid ones."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return ""
    return parts.netloc.lower() if parts.scheme in ("http", "https") else ""


def _wrong_token(policy: Policy, headers: dict[bytes, bytes]) -> Denial | None:
    given = headers.get(b"authorization", b"")
    scheme, _, token = given.partition(b" ")
    wanted = (policy.token or "").encode()
    # The comparison takes as long for a wrong token as for the right one.
    same = hmac.compare_digest(token.strip(), wanted)
    if scheme.lower() == b"bearer" and same and wanted:
        return None
    if given:
        return Denial(401, "the token is wrong; `asyncrl web` prints a link with the right one")
    return Denial(401, "this needs the token; `asyncrl web` prints a link with it")


def _odd_body(headers: dict[bytes, bytes]) -> Denial | None:
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        return Denial(415, "the body has to be JSON (Content-Type: application/json)")
    length = headers.get(b"content-length", b"")
    if not length.isdigit() or b"transfer-encoding" in headers:
        return Denial(411, "the request does not state the length of its body (Content-Length)")
    if len(length) > 9 or int(length) > MAX_BODY_BYTES:
        return Denial(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    return None


def _unwanted_body(headers: dict[bytes, bytes]) -> Denial | None:
    if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
        return Denial(413, "a GET or HEAD request must not have a body")
    return None
