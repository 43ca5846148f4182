"""A server that has imported what is slow to import and forks a process for each connection.

Client and server share one connection for each process: the request and its files go one way, the
process id and later its status (as `os.waitpid` gives it) the other.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

FOLDER = "FORKING_SERVERS"
"""Environment variable: the folder of the servers that a session of tests shares."""
_SESSION = "session"
"""A pipe in it, which the session holds open. A server's standard input is its other end."""
_NUMBER = struct.Struct("i")
_FILES = 4
"""Most of one process: standard input, output and error, and a socket."""


class Forked:
    """A process that a server has forked for this client."""

    def __init__(self, address: str, request: bytes, files: Sequence[int]) -> None:
        self._address = address
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(address)
        socket.send_fds(self._server, [_NUMBER.pack(len(request))], files)
        self._server.sendall(request)
        self.pid = self._number()

    def status(self, timeout: float | None = None) -> int | None:
        """Its status, as `os.waitpid` gives it; None if it has not ended in this time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            if not selector.select(timeout):
                return None
        with self._server:
            return self._number()

    def _number(self) -> int:
        got = self._server.recv(_NUMBER.size, socket.MSG_WAITALL)
        if len(got) != _NUMBER.size:
            said = _log_of(self._address).read_text(errors="replace")[-2000:]
            raise AssertionError(f"the server of forked processes has died: {said}")
        return int(_NUMBER.unpack(got)[0])


def begin_session() -> Callable[[], None]:
    """Have this process and its children share servers; return what ends these.

    They end with this process, too. In a child this does nothing.
    """
    if FOLDER in os.environ:
        return lambda: None
    folder = tempfile.mkdtemp(prefix="forking-servers-")
    os.mkfifo(f"{folder}/{_SESSION}")
    session = os.open(f"{folder}/{_SESSION}", os.O_RDWR)  # until all who hold it have ended
    os.environ[FOLDER] = folder

    def end() -> None:
        os.close(session)
        del os.environ[FOLDER]
        shutil.rmtree(folder, ignore_errors=True)

    return end


def shared(
    name: str,
    command: Sequence[str],
    variables: Mapping[str, str],
    *arguments: str,
    session: bool = False,
) -> tuple[str, int]:
    """Address and process id of a server, which the first process that asks for it starts.

    Its command gets the number of the listening socket and then `arguments`. With `session` it
    leads one, and no Ctrl-C of a terminal ends it before.
    """
    if FOLDER not in os.environ:
        atexit.register(begin_session())
    folder = Path(os.environ[FOLDER])
    address = folder / name
    with (folder / f"{name}.pid").open("a+", encoding="ascii") as pid:
        fcntl.flock(pid, fcntl.LOCK_EX)
        pid.seek(0)
        if number := pid.read():
            return str(address), int(number)
        with (
            socket.socket(socket.AF_UNIX) as listener,
            _log_of(str(address)).open("wb") as log,
            open(os.open(folder / _SESSION, os.O_RDONLY), "rb") as its_end,  # noqa: PTH123
        ):
            listener.bind(str(address))
            listener.listen()
            server = subprocess.Popen(
                [*command, str(listener.fileno()), *arguments],
                env=variables,
                pass_fds=[listener.fileno()],
                stdin=its_end,
                stdout=log,
                stderr=log,
                start_new_session=session,
            )
        server.returncode = 0  # nobody waits for it
        pid.write(str(server.pid))
    return str(address), server.pid


def _log_of(address: str) -> Path:
    return Path(f"{address}.log")


def stand_for(address: str, words: Sequence[str]) -> NoReturn:
    """Be a process that a server forks, for a shell: signals and the exit code are passed on."""
    request = json.dumps([words, os.getcwd(), dict(os.environ), False, False])  # noqa: PTH109 - light
    forked = Forked(address, request.encode(errors="surrogateescape"), (0, 1, 2))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda one, _frame: os.kill(forked.pid, one))
    code = os.waitstatus_to_exitcode(forked.status() or 0)
    sys.exit(128 - code if code < 0 else code)


def serve(listener: socket.socket, become: Callable[[bytes, list[int]], NoReturn]) -> list[int]:
    """Fork a process for each connection until standard input is closed.

    Args:
        listener: where clients connect.
        become: what a forked process does with the request and its files.

    Returns:
        The ids of the processes that have not ended.
    """
    running: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    folder = Path(listener.getsockname()).parent  # the session may be killed
                    shutil.rmtree(folder, ignore_errors=True)
                    return [pid for pid, _client in running.values()]
                if key.fileobj is listener:
                    client = listener.accept()[0]
                    if (pid := _fork(client, become)) is None:
                        continue
                    with contextlib.suppress(OSError):
                        client.send(_NUMBER.pack(pid), socket.MSG_NOSIGNAL)
                    descriptor = os.pidfd_open(pid)
                    running[descriptor] = pid, client
                    selector.register(descriptor, selectors.EVENT_READ)
                else:
                    pid, client = running.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    status = os.waitpid(pid, 0)[1]
                    with client, contextlib.suppress(OSError):  # the client may have been killed
                        client.send(_NUMBER.pack(status), socket.MSG_NOSIGNAL)


def _fork(client: socket.socket, become: Callable[[bytes, list[int]], NoReturn]) -> int | None:
    """Its process id; None if the client was killed before it said what it wants."""
    size, files, _, _ = socket.recv_fds(client, _NUMBER.size, _FILES)
    length = _NUMBER.unpack(size)[0] if size else 1
    request = client.recv(length, socket.MSG_WAITALL)
    pid = os.fork() if len(request) == length else None
    if pid == 0:
        become(request, files)
    for file in files:
        os.close(file)
    return pid


def load_kernels() -> None:
    """Load what numba keeps of ours: a process would start its compiler for that, for 0.7 s."""
    from numba.core.dispatcher import Dispatcher

    for one in gc.get_objects():
        if isinstance(one, Dispatcher) and hasattr(one._cache, "_cache_file"):
            for signature, *_ in one._cache._cache_file._load_index():
                one.compile(signature)


if __name__ == "__main__":
    stand_for(sys.argv[1], sys.argv[2:])
