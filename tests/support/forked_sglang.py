"""Processes of SGLang's interpreter, forked from one of it that has imported SGLang.

Importing SGLang takes 5 to 12 s of CPU, and each engine of a run pays it. Those of the tests that
one process runs share a server, which imports it once. It takes the place of `subprocess` where
engines are started. What a user starts is started by the tests of whole runs.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from asyncrl.engine.sglang.worker.plugin import CPU_VARIABLES, MARK_VARIABLE

DEVNULL, STDOUT, TimeoutExpired = subprocess.DEVNULL, subprocess.STDOUT, subprocess.TimeoutExpired
_NUMBER = struct.Struct("i")
_MODULE = "-m"
_ROOT = Path(__file__).parents[2]
_servers: list[subprocess.Popen[bytes]] = []
"""Kept: a server ends when the pipe to it is closed."""


class Popen:
    """As `subprocess.Popen` of `[python, ..., "-m", module, ...]`, in a session of its own."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: dict[str, str],
        stdout: Any,
        stderr: Any,
        stdin: Any = DEVNULL,
        start_new_session: bool = True,
    ) -> None:
        assert start_new_session
        assert stdin == DEVNULL
        self.args, self.returncode = arguments, None
        begin = arguments.index(_MODULE) + 1
        request = json.dumps([arguments[begin:], env]).encode()
        out = os.open(os.devnull, os.O_WRONLY) if stdout == DEVNULL else os.dup(_fd(stdout))
        error = out if stderr == STDOUT else _fd(stderr)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(_address(arguments[0]))
        try:
            socket.send_fds(self._server, [_NUMBER.pack(len(request))], [out, error])
            self._server.sendall(request)
        finally:
            os.close(out)
        self.pid = self._number()

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        try:
            return self.wait(0)
        except TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._server, selectors.EVENT_READ)
                if not selector.select(None if timeout is None else max(0.0, timeout)):
                    raise TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._number()
            self._server.close()
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _number(self) -> int:
        got = self._server.recv(_NUMBER.size, socket.MSG_WAITALL)
        assert len(got) == _NUMBER.size, "the server of SGLang's processes has died"
        return int(_NUMBER.unpack(got)[0])


def _fd(file: Any) -> int:
    return file if isinstance(file, int) else int(file.fileno())


@functools.cache
def _address(python: str) -> str:
    """Of a server in this interpreter, which is started once and ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="forked-sglang-"))
    address = str(folder / "socket")
    variables = os.environ | {MARK_VARIABLE: "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(_ROOT), str(_ROOT / "tests" / "support")])
    with socket.socket(socket.AF_UNIX) as listener, (folder / "log").open("wb") as log:
        listener.bind(address)
        listener.listen()
        _servers.append(
            subprocess.Popen(
                [python, "-P", "-W", "ignore", __file__, str(listener.fileno())],
                env=variables,
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )
    return address


def _serve(listener: socket.socket) -> None:
    """Import SGLang, then fork a process for each connection and send its id and its status."""
    gc.disable()  # until a fork starts its schedulers: what is imported is no garbage
    import torch

    if not torch.cuda.is_available():
        os.environ.update(CPU_VARIABLES)
        import_module("asyncrl.engine.sglang.worker.start")
        import_module("sglang_faults")
    gc.freeze()
    running: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    for pid, _client in running.values():
                        os.killpg(pid, signal.SIGKILL)
                    return
                if key.fileobj is listener:
                    client = listener.accept()[0]
                    pid = _fork(listener, client)
                    client.send(_NUMBER.pack(pid))
                    fd = os.pidfd_open(pid)
                    running[fd] = pid, client
                    selector.register(fd, selectors.EVENT_READ)
                else:
                    pid, client = running.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    with client:
                        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                        client.send(_NUMBER.pack(status), socket.MSG_NOSIGNAL)


def _fork(listener: socket.socket, client: socket.socket) -> int:
    """Fork a process that does what the client asks for; its id."""
    size, (out, error), _, _ = socket.recv_fds(client, _NUMBER.size, 2)
    request = client.recv(*_NUMBER.unpack(size), socket.MSG_WAITALL)
    pid = os.fork()
    if pid:
        os.close(out)
        os.close(error)
        return pid
    try:
        listener.close()
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, fd in enumerate((nothing, out, error)):
            os.dup2(fd, number)
        (module, *arguments), variables = json.loads(request)
        os.environ.clear()
        os.environ.update(variables)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - whatever it was, the process ends with it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
