"""Runs, ranks and parts of benchmarks in processes forked from one that has imported torch.

The import of torch, transformers and numba takes 4 to 6 s of CPU, and a run's trainer and each of
its generators pays it. `Popen` takes the place of `subprocess.Popen`: a controller is forked from a
server, which has imported everything, and forks its own children. All else about these processes
is as usual: parents, sessions, signals, exit codes, files, command lines and environments. Other
commands, a run's reward workers among them, are started as ever.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import json
import logging
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import termios
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import forking_server
from forking_server import Forked, load_kernels, serve, shared

from asyncrl.launch.ray.actor import _AGENT
from asyncrl.user_code.process_tree import end_process
from benchmarks.machines.namespaces import die_with_parent, enter_namespace

CONTROLLERS = {
    "asyncrl run",
    "asyncrl agent",
    "asyncrl logs",
    "asyncrl watch",
    "asyncrl web",
    "benchmarks.hostile.victim",
    "benchmarks.paced.command run",
}
PARTS = {
    "asyncrl.reward_server.server",
    "asyncrl.gpu_check.two_ranks",
    "asyncrl.sft.training",
    "benchmarks.controller.peers",
    "benchmarks.pipeline.costs",
    "benchmarks.pipeline.overlap",
    "benchmarks.trainer.child",
    "benchmarks.watchers",
    "benchmarks.weights_nodes",
    "forked_states",
    "measured_memory",
    "ranked_learner",
    "ray.scripts.scripts",
    "ray_nodes",
    "sharded_learner",
    "starts_a_run",
}
TRIALS = {"asyncrl.startup.loading_trial", "asyncrl.trainer_process.custom_algorithm"}
FORKED = CONTROLLERS | PARTS | TRIALS
"""How the commands begin that the server forks."""
TEXTS = {_AGENT}
CHILDREN = {
    *("asyncrl", "asyncrl.child", "asyncrl.launch.ray.driver", "asyncrl.web.process"),
    "benchmarks.paced.child",
    *(TRIALS | TEXTS),
}
"""Modules, and texts for `-c`, of the processes that those fork."""
_IMPORTED = (
    "asyncrl.cli",
    "asyncrl.engine.torch.engine",
    "asyncrl.generator.setup",
    "asyncrl.trainer_process.setup",
    "asyncrl.controller.execute",
    "asyncrl.startup.prepare",
    "asyncrl.web.guard",
    "asyncrl.web.server",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
MACHINE = "FORKED_ON_MACHINE"
"""Environment variable: the first process of the machine, made of namespaces, to be on."""
_RAY = {"ray.scripts.scripts", "ray_nodes"}
"""Modules that start nodes of Ray; what they take for the interpreter has workers forked."""
_RAY_WORKER = "ray._private.workers.default_worker"
_ROOT = Path(__file__).parents[2]
_PYTHON = shlex.quote(sys.executable)
_ROOM = 1 << 15
"""Bytes for a command line, and for an environment."""
_FIRST_OF_MEMORY = 47
"""The field of /proc/PID/stat with the address of the command line, counted from 0."""


def _words_of(command: object) -> list[str]:
    """A module or a text and its arguments, if this interpreter is to run one; else nothing."""
    if not isinstance(command, (list, tuple)) or command[0] != sys.executable:
        return []
    for place in (1, 2):
        if command[place : place + 1] in (["-m"], ["-c"], ("-m",), ("-c",)):
            return list(map(os.fsdecode, command[place + 1 :]))
    return []


class Popen(subprocess.Popen[Any]):
    """What is `FORKED` is a child of the server; what else is started is this process's own."""

    _forked: Forked | None = None

    def _execute_child(self, args: object, *given: Any) -> None:
        words = _words_of(args)
        if FORKED.isdisjoint({words[0], " ".join(words[:2])} if words else ()):
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        pipes = given[9:15]
        read, _, _, out, _, error = pipes
        fds = [own if one == -1 else one for own, one in enumerate((read, out, error))]
        address, server = _server()
        # It ends with its parent, which is the server, which ends with this process.
        own = re.compile(rf'^{os.getpid()}$|(?<="parent":){os.getpid()}\b')
        words = [own.sub(str(server), word) for word in words]
        passed = {str(fd): str(place) for place, fd in enumerate(given[3], len(fds))}
        words, fds = [passed.get(word, word) for word in words], [*fds, *given[3]]
        leads, folder = given[-2], os.fspath(given[4] or Path.cwd())
        takes_terminal = given[1] is not None  # nothing else is done before
        request = json.dumps([words, folder, dict(given[5] or os.environ), leads, takes_terminal])
        self._forked = Forked(address, request.encode(errors="surrogateescape"), fds)
        self.pid = self._forked.pid
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._forked is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        status = self._forked.status(0 if wait_flags & os.WNOHANG else None)
        return (0, 0) if status is None else (self.pid, status)

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._forked is None:
            return super()._internal_poll(*given, **named)  # type: ignore[misc,no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def shell_command() -> str:
    """A program that shells find as `asyncrl`: forked, unless it may use a GPU."""
    import torch

    program = f"{_PYTHON} -m" if torch.cuda.is_available() else _client(_server()[0])
    return f'#!/bin/bash\nexec {program} asyncrl "$@"\n'


def _client(address: str) -> str:
    return f"{_PYTHON} -I -S {shlex.quote(forking_server.__file__)} {address}"


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Fork what is `FORKED`, unless it may use a GPU, which no fork may."""
    import torch

    own = subprocess.Popen if torch.cuda.is_available() else Popen
    with mock.patch.object(subprocess, "Popen", own):
        yield


class _ChildPopen(subprocess.Popen[Any]):
    """In a controller: its children are forked from itself."""

    def _execute_child(self, args: object, *given: Any) -> None:
        words = _words_of(args)
        if not words or words[0] not in CHILDREN:
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        pipes, leads = given[9:15], given[-2]
        read, _, _, out, _, error = pipes
        fds = [own if one == -1 else one for own, one in enumerate((read, out, error))]
        passed = {f"--socket={fd}": f"--socket={at}" for at, fd in enumerate(given[3], len(fds))}
        words, fds = [passed.get(word, word) for word in words], [*fds, *given[3]]
        self.pid = os.fork()
        if self.pid == 0:
            if leads:
                os.setsid()
            become(words, os.fspath(given[4] or "."), dict(given[5] or os.environ), fds)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


@functools.cache
def _server() -> tuple[str, int]:
    """Address and process id of the session's server."""
    path = os.pathsep.join([str(_ROOT), str(_ROOT / "tests" / "support")])
    variables = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}
    variables["FORKED_RUNS_ROOM"] = "." * _ROOM
    return shared("runs", [sys.executable, "-P", __file__], variables, "." * _ROOM)


def _serve(listener: socket.socket) -> None:
    gc.disable()
    address = listener.getsockname()
    client = f'exec {_client(address)} "$@"'
    program = Path(address).with_name("ray-python")
    program.write_text(
        f'#!/bin/sh\ncase "$1" in */default_worker.py) {client};; esac\nexec {_PYTHON} "$@"\n'
    )
    program.chmod(0o755)
    for name in _IMPORTED:
        import_module(name)
    load_kernels()
    conversions: Any = import_module("transformers.conversion_mapping")
    conversions.get_checkpoint_conversion_mapping("")  # makes that of every model
    gc.freeze()
    gc.enable()
    serve(
        listener, functools.partial(_become_controller, str(program))
    )  # when it ends, the kernel ends the controllers


def _become_controller(ray_python: str, request: bytes, fds: Sequence[int]) -> NoReturn:
    words, folder, variables, leads, takes_terminal = json.loads(request)
    if leads:
        os.setsid()
    if takes_terminal:
        fcntl.ioctl(fds[0], termios.TIOCSCTTY, 0)
    if (machine := variables.get(MACHINE)) is not None:
        _go_to(int(machine))
    if words[0].endswith("/default_worker.py"):
        words[0] = _RAY_WORKER
        os.setpgid(0, 0)  # Ray kills a worker's group
    if words[0] in _RAY:
        sys.executable = ray_python
    become(words, folder, variables, fds)


def _go_to(first: int) -> None:
    """Go to a machine. A process stays here, passes signals on, and ends as the one there does."""
    with contextlib.ExitStack() as files:
        pid, *others = [
            (files.enter_context(Path(f"/proc/{first}/ns/{kind}").open("rb")).fileno(), kind)
            for kind in ("pid", "net", "uts", "mnt")
        ]
        enter_namespace(*pid)
        if (there := os.fork()) == 0:
            die_with_parent()
            for one in others:
                enter_namespace(*one)
            return
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda one, _frame: os.kill(there, one))
    code = os.waitstatus_to_exitcode(os.waitpid(there, 0)[1])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def become(
    words: Sequence[str], folder: str, variables: Mapping[str, str], fds: Sequence[int]
) -> NoReturn:
    """Have this forked process be `python -m WORDS`, as far as it and others can tell.

    Or `python -c WORDS`. Its own children are forked from it.
    """
    code = 1
    try:
        subprocess.Popen = _ChildPopen  # type: ignore[misc]
        asyncio.set_event_loop_policy(None)  # a Ray worker's has uvloop
        gc.freeze()  # what the parent has thrown away would close this process's files
        signal.set_wakeup_fd(-1)
        logging.root.handlers.clear()
        for ends in (signal.SIGTERM, signal.SIGALRM, signal.SIGHUP):
            signal.signal(ends, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
        for number, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in fds]):
            os.dup2(fd, number)
        os.closerange(len(fds), os.sysconf("SC_OPEN_MAX"))
        sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        sys.argv = list(words)
        _show(["python", "-m", *words], [f"{name}={value}" for name, value in variables.items()])
        if words[0] == _RAY_WORKER:
            ray: Any = import_module("ray._raylet")  # it does not find where the command line is
            ray.setproctitle = lambda title: _show([title])
        if words[0] in TEXTS:
            sys.argv[0] = "-c"
            exec(words[0], {"__name__": "__main__"})  # noqa: S102 - of `TEXTS`
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - whatever it was, the process ends with it
        traceback.print_exc()
    end_process(code)


def _show(words: Sequence[str], variables: Sequence[str] | None = None) -> None:
    """Write the command line, and the environment if given, to where /proc shows them from."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    places = list(map(int, fields[_FIRST_OF_MEMORY - 2 : _FIRST_OF_MEMORY + 2]))
    for begin, end, texts in zip(places[::2], places[1::2], (words, variables), strict=True):
        if texts is None:
            continue
        data = b"".join(os.fsencode(one) + b"\0" for one in texts)
        assert len(data) < end - begin, "no room for a command line or an environment"
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, data, len(data))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # an orderly end takes a second
