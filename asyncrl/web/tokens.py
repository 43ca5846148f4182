"""The token of a run's web page: who has it may give orders."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.secret_files import refuse_open_file

MIN_LENGTH = 16
_TOKEN = re.compile(r"[!-~]+")
_MAX_BYTES = 4096


def token_path(run: Path, token_file: str | None) -> Path:
    """Where the token of a run is.

    Args:
        run: the run's folder.
        token_file: `monitoring.web.token_file`.
    """
    return run / "web.token" if token_file is None else Path(token_file)


def write_token(path: Path) -> None:
    """Make a new token, in a new file that only this user can read. Raises OSError."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        UserError: there is none, it is too short to be secret, or others can read it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(_MAX_BYTES + 1).decode("ascii", "replace").strip()
    except OSError as error:
        raise UserError(
            f"the token of the web page cannot be read from {path}: {error.strerror}"
        ) from error
    refuse_open_file(path, status, "the token of the web page (monitoring.web.token_file)")
    if len(text) < MIN_LENGTH or len(text) > _MAX_BYTES or not _TOKEN.fullmatch(text):
        raise UserError(
            f"{path} does not hold a token: it has to be one word of at least {MIN_LENGTH} "
            "letters, digits or signs of ASCII, for instance from `openssl rand -hex 32`"
        )
    return text
