"""The secret shared by a controller and its agents: 32 random bytes in a file.

A holder can take part in a run as an agent, or impersonate its controller. So the file must be
private: mode 0600. A secret that Kubernetes or Docker mounts belongs to root, and the process reads
it as a member of the file's group (mode 0440 or 0640); that is accepted, as root has chosen that
group. A file that other users can read is refused, regardless of its owner.
"""

import os
import re
import secrets
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.secret_files import refuse_open_file
from asyncrl.wire import RunKey

HUB = "agents"
"""Name, for `RunKey`, of the socket at which a controller waits for agents."""
_BYTES = 32
_HEX = re.compile(rb"[0-9a-fA-F]{64}\s*")


def read_secret(path: Path, setting: str) -> RunKey:
    """Read a secret of 32 bytes, or 64 hexadecimal digits. Raises UserError if not private."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(256)
    except OSError as error:
        raise UserError(
            f"{setting}: {path} cannot be read: {error.strerror}. `asyncrl agent-key FILE` writes "
            "a new secret, which the controller and all agents need"
        ) from error
    refuse_open_file(path, status, setting)
    if _HEX.fullmatch(text):
        return RunKey(bytes.fromhex(text.decode()))
    if len(text) != _BYTES:
        raise UserError(
            f"{setting}: {path} is not a secret: it has {len(text)} bytes instead of {_BYTES}, or "
            "64 hexadecimal digits. If it is not needed, remove it; `asyncrl agent-key FILE` writes"
            " a secret"
        )
    return RunKey(text)


def write_secret(path: Path) -> bool:
    """Write a secret unless there is one; return True if written. Raises UserError."""
    if path.exists():
        read_secret(path, "FILE")
        return False
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        RunKey.new().write(part)
        try:
            os.link(part, path)  # whole, or not at all; of two that write at once, one
        finally:
            part.unlink()
    except FileExistsError:
        read_secret(path, "FILE")
        return False
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    return True
