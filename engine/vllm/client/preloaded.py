"""Imports what an engine core needs, for the server that cores are forked from (`fork_server`)."""

from __future__ import annotations

import contextlib
import gc
from importlib import import_module

from asyncrl.engine.vllm.remote import DRAFTER_PATH, EXTENSION_PATH, SCHEDULER_PATH

gc.disable()  # what is imported is no garbage
for _name in (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    *(path.rpartition(".")[0] for path in (SCHEDULER_PATH, EXTENSION_PATH, DRAFTER_PATH)),
):
    with contextlib.suppress(ImportError):  # a core says what is missing
        import_module(_name)
gc.freeze()
gc.enable()
