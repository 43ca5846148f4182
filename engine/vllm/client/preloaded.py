"""Imports what an engine core needs, for the server that cores and ranks are forked from."""

import contextlib
import gc
import sys
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from typing import Any

from asyncrl.engine.vllm.client.fork_server import ForkContext
from asyncrl.engine.vllm.remote import DRAFTER_PATH, EXTENSION_PATH, SCHEDULER_PATH

_EXECUTOR = "vllm.v1.executor.multiproc_executor"

gc.disable()  # imported objects are not garbage
for _name in (
    "vllm.v1.engine.core",
    _EXECUTOR,
    "vllm.v1.worker.cpu_worker",
    *(path.rpartition(".")[0] for path in (SCHEDULER_PATH, EXTENSION_PATH, DRAFTER_PATH)),
):
    with contextlib.suppress(ImportError):  # a core reports what is missing
        import_module(_name)
import_module("asyncrl.engine.remote.worker.drafting").warm_up()  # starts numba, once for all cores
gc.freeze()
gc.unfreeze = lambda: None  # vLLM would collect garbage among imported objects at a core's end
gc.enable()

# A core forks its ranks from the same server. `multiprocessing` would start another one, as the
# server is not a child of the core.
if _EXECUTOR in sys.modules:
    _executor: Any = sys.modules[_EXECUTOR]
    _executor.get_mp_context = ForkContext
_server: Any = forkserver._forkserver  # noqa: SLF001 - there is no other way
_server.ensure_running = resource_tracker.ensure_running
