"""The common arguments of rewards that ask a server, checked before a run starts."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.errors import RewardError, UserError
from asyncrl.secret_files import refuse_open_file
from asyncrl.suggestions import written


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of requests to a server; the arguments of these names."""

    concurrency: int
    """Most concurrent requests of a worker process."""
    attempts: int
    """Most attempts of one call."""
    attempt_seconds: float | None
    """Longest silence of the server in an attempt; None: the rest of the call's time."""
    breaker_failures: int
    """Failed calls in a row after which calls fail at once."""
    breaker_seconds: float
    """Time after which one call is tried again."""


_NUMBERS: dict[str, tuple[type, float, float]] = {
    "concurrency": (int, 1, 4096),
    "attempts": (int, 1, 100),
    "attempt_seconds": (float, 0.001, 86_400.0),
    "breaker_failures": (int, 1, 1_000_000),
    "breaker_seconds": (float, 0.0, 86_400.0),
}
_MAX_SECRET = 1 << 14


def check_numbers(name: str, args: dict[str, Any], more: dict[str, Any] | None = None) -> None:
    """Refuse numbers out of range; `more` has (type, lowest, highest). Raises RewardError."""
    for key, (kind, low, high) in (_NUMBERS | (more or {})).items():
        value = args.get(key)
        if value is None:
            continue
        right = isinstance(value, int if kind is int else int | float)
        if not right or isinstance(value, bool) or not low <= value <= high:
            wanted = f"{'a whole number' if kind is int else 'a number'} from {low:g} to {high:g}"
            raise RewardError(f"reward {name!r}: args.{key} must be {wanted}, got {written(value)}")


def check_url(name: str, key: str, url: Any) -> None:
    """Refuse anything but an http address without a password. Raises RewardError."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RewardError(
            f"reward {name!r}: args.{key} must be a URL such as http://127.0.0.1:8741, not {url!r}"
        )
    if parts.username or parts.password:
        raise RewardError(
            f"reward {name!r}: args.{key} holds a user name or a password; put the key into an "
            "environment variable or a file instead"
        )
    if port == 0:
        raise RewardError(f"reward {name!r}: args.{key} has port 0; give the server's port")


def read_secret(
    name: str, keys: tuple[str, str], variable: str | None, file: str | None
) -> str | None:
    """Return the key in an environment variable or a file; None if neither is named.

    `name` is that of the reward, `keys` are the names of the two settings. Raises RewardError if
    both are named, the variable is not set, or the file (mode 0600) cannot be used.
    """
    if variable and file:
        raise RewardError(f"reward {name!r}: give {keys[0]} or {keys[1]}, not both")
    if variable:
        secret = os.environ.get(variable, "").strip()
        if not secret:
            raise RewardError(
                f"reward {name!r}: the environment variable {variable} ({keys[0]}) is not "
                "set; export it in the shell that starts the run"
            )
        return _checked(name, f"the environment variable {variable}", secret)
    if not file:
        return None
    path, setting = Path(file), f"reward {name!r}: {keys[1]}"
    try:
        with path.open("rb") as opened:
            refuse_open_file(path, os.fstat(opened.fileno()), setting)
            secret = opened.read(_MAX_SECRET).decode("utf-8").strip()
    except OSError as error:
        raise RewardError(f"{setting}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise RewardError(f"{setting}: {path} is not UTF-8 text") from None
    except UserError as error:
        raise RewardError(str(error)) from error
    if not secret:
        raise RewardError(f"{setting}: {path} is empty")
    return _checked(name, str(path), secret)


def _checked(name: str, place: str, secret: str) -> str:
    """Refuse what no header can hold, without showing it."""
    if not secret.isascii() or not secret.isprintable():
        raise RewardError(f"reward {name!r}: {place} must hold a key of printable ASCII characters")
    return secret
