"""Processes of SGLang's interpreter, forked from one of it that has imported SGLang.

Importing SGLang takes 5 to 12 s of CPU, and each engine of a run pays it. Those of a session of
tests share a server, which imports it once. It takes the place of `subprocess` where engines are
started. What a user starts is started by the tests of whole runs.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from forking_server import Forked, load_kernels, serve, shared

from asyncrl.engine.sglang.worker.plugin import CPU_VARIABLES, MARK_VARIABLE

DEVNULL, STDOUT, TimeoutExpired = subprocess.DEVNULL, subprocess.STDOUT, subprocess.TimeoutExpired
_MODULE = "-m"
_ROOT = Path(__file__).parents[2]


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
        with Path(os.devnull).open("r+b") as nothing:
            out = nothing if stdout == DEVNULL else stdout
            error = out if stderr == STDOUT else stderr
            files = [_fd(file) for file in (nothing, out, error)]
            self._forked = Forked(_address(arguments[0]), request, files)
        self.pid = self._forked.pid

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        try:
            return self.wait(0)
        except TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status."""
        if self.returncode is None:
            status = self._forked.status(None if timeout is None else max(0.0, timeout))
            if status is None:
                raise TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _fd(file: Any) -> int:
    return file if isinstance(file, int) else int(file.fileno())


@functools.cache
def _address(python: str) -> str:
    """Of the session's server in this interpreter."""
    variables = os.environ | {MARK_VARIABLE: "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(_ROOT), str(_ROOT / "tests" / "support")])
    command = [python, "-P", "-W", "ignore", __file__]
    address, _ = shared("sglang", command, variables, session=True)
    return address


def _serve(listener: socket.socket) -> None:
    gc.disable()  # until a fork starts its schedulers: what is imported is no garbage
    import torch

    if not torch.cuda.is_available():
        os.environ.update(CPU_VARIABLES)
        import_module("asyncrl.engine.sglang.worker.start")
        import_module("sglang.srt.models.registry")  # imports all models
        import_module("sglang_faults")
        load_kernels()
    gc.freeze()
    for pid in serve(listener, functools.partial(_become, listener)):
        os.killpg(pid, signal.SIGKILL)
    os._exit(0)  # an orderly end takes a second


def _become(listener: socket.socket, request: bytes, files: Sequence[int]) -> NoReturn:
    """Run the module of the request."""
    try:
        listener.close()
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
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
