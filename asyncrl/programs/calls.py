"""Makes calls of a program inside the sandbox, one process each. `python -I -c THIS`.

    standard input     {"program": text, "seconds": most of one call, "until_failure": bool,
                        "calls": [[function, arguments] or [expression]]}
    standard output    a line for each call: a JSON text, which holds what the call's process
                       wrote, itself JSON; or null if it wrote nothing, too much, or too late

The program never runs in this process, and its processes have neither its descriptors nor files of
an earlier call. So a call cannot change the result of another one, except by ending this process:
then no further line follows. Only the standard library is imported: asyncrl cannot be seen from
inside.
"""

import ast
import contextlib
import json
import os
import select
import signal
import sys
import time
import types
from typing import Any, NoReturn

MAX_BYTES = 256 * 1024
_LOOK_SECONDS = 0.05
_FOLDER = "/tmp"  # noqa: S108 - inside
_FILE = "solution.py"


def main() -> None:
    """Read the order and make the calls."""
    order = json.load(sys.stdin)
    theirs = set(os.listdir(_FOLDER))  # noqa: PTH208 - folders of Python that lie below /tmp
    for number, call in enumerate(order["calls"]):
        if number:
            _clean(theirs)
        _write(order["program"])
        said = _one(order["program"], call, order["seconds"])
        print(json.dumps(said), flush=True)
        if said is None and order["until_failure"]:
            return


def _one(program: str, call: list[str], seconds: float) -> str | None:
    """Return the output of one call's process; None if it is invalid."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _make(program, call, writing)
    os.close(writing)
    said = _read(reading, pid, time.monotonic() + seconds)
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # all that is left of it; not this process, nor the first one
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return said


def _read(reading: int, pid: int, deadline: float) -> str | None:
    parts: list[bytes] = []
    ended = False
    while not ended:
        left = deadline - time.monotonic()
        if left <= 0 or sum(map(len, parts)) > MAX_BYTES:
            return None
        # A process that the call has started may hold the pipe open.
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        while select.select([reading], [], [], 0.0 if ended else min(left, _LOOK_SECONDS))[0]:
            part = os.read(reading, 1 << 16)
            if not part:
                ended = True
                break
            parts.append(part)
            if sum(map(len, parts)) > MAX_BYTES:
                return None
    return b"".join(parts).decode(errors="replace") or None


def _make(program: str, call: list[str], writing: int) -> NoReturn:
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.closerange(3, writing)
    os.closerange(writing + 1, 1 << 16)
    try:
        solution = types.ModuleType("solution")
        sys.modules["solution"] = solution
        scope = solution.__dict__
        exec(compile(program, _FILE, "exec"), scope)  # noqa: S102
        found = eval(call[0], scope)  # noqa: S307
        found = bool(found) if len(call) == 1 else found(*ast.literal_eval(call[1]))
        said = json.dumps({"value": found}, default=_plain)
    except BaseException as raised:  # noqa: BLE001 - told, whatever it is
        said = json.dumps({"error": type(raised).__name__})
    left = said.encode()
    while left:
        left = left[os.write(writing, left) :]
    os._exit(0)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else float(value)


def _write(program: str) -> None:
    with open(f"{_FOLDER}/{_FILE}", "w", errors="replace") as file:  # noqa: PTH123
        file.write(program)


def _clean(theirs: set[str]) -> None:
    """Remove files of earlier calls, except `theirs`. Raises OSError, which ends this process."""
    emptied: list[str] = []
    for folder, folders, files in os.walk(_FOLDER):
        if folder == _FOLDER:
            folders[:] = set(folders) - theirs
            files[:] = set(files) - theirs
        for name in files:
            os.remove(f"{folder}/{name}")  # noqa: PTH107
        for name in folders:
            path = f"{folder}/{name}"
            if os.path.islink(path):  # noqa: PTH114
                os.remove(path)  # noqa: PTH107
            else:
                emptied.append(path)
    for path in reversed(emptied):
        os.rmdir(path)  # noqa: PTH106


if __name__ == "__main__":
    main()
