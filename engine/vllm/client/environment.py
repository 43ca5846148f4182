"""The environment variables that vLLM is started with, and its log.

vLLM reads many settings from environment variables when it is imported, and again in its core
process, so they are set before the first import. Does not import vLLM.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging.config
import math
import os
import shutil
import tempfile
from pathlib import Path

from asyncrl.engine.config import EngineConfig

_QUOTED_LINES = 15
_LONGEST_FOLDER = 70
"""Bytes. A socket's path may have 107, and vLLM names its sockets with 36."""


class VllmLog:
    """A private directory with vLLM's log; `tail` is what an error message quotes."""

    def __init__(self, level: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="asyncrl-vllm-"))
        self.path = self.directory / "vllm.log"
        self.path.touch()
        self.config_path = self.directory / "logging.json"
        self.config_path.write_text(json.dumps(_logging(str(self.path), level)))

    def tail(self) -> str:
        """The last lines, "" when nothing was written."""
        if not self.path.exists():
            return ""
        lines = self.path.read_text(errors="replace").splitlines()[-_QUOTED_LINES:]
        return "\n".join(lines)

    def remove(self) -> None:
        """Delete the directory. Idempotent."""
        shutil.rmtree(self.directory, ignore_errors=True)


@functools.cache
def process_log(level: str) -> VllmLog:
    """The log of all engines of this process, removed when the process ends.

    vLLM reads the path of its logging configuration once per process and passes it to the core of
    every later engine, so the log must outlive the engine that it was made for.
    """
    log = VllmLog(level)
    atexit.register(log.remove)
    return log


def folder_for_sockets() -> dict[str, str]:
    """The variable that keeps vLLM's sockets out of a TMPDIR whose path is too long for them."""
    if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_FOLDER:
        return {}
    return {"VLLM_RPC_BASE_PATH": "/tmp"}  # noqa: S108


def prepare(config: EngineConfig, log: VllmLog) -> None:
    """Set the environment variables that vLLM reads here and, inherited, in its core process."""
    os.environ.update(
        {
            "VLLM_LOGGING_CONFIG_PATH": str(log.config_path),
            "VLLM_CONFIGURE_LOGGING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "DO_NOT_TRACK": "1",
            # AsyncLLM's core is a process of its own already. This has it run the model itself;
            # vLLM would start another process, to bind its threads, for half the start's time.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(config.vllm.start_limit)),
            # vLLM's output task takes a step's message in whole: ours needs no time for it.
            "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": str(config.slots + 1),
            # The drafting hook and our scoring are written for the first model runner.
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            # vLLM gets room for drafts beyond max_model_len, which no request may use.
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            # Cores are shared with the trainer and other generators: the kernel places threads.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(config.rank_threads),
        }
        | ({"VLLM_BATCH_INVARIANT": "1"} if config.batch_invariant else {})
        | folder_for_sockets()
    )
    # vLLM configures its logging when it is started, but it logs when it is imported.
    logging.config.dictConfig(json.loads(log.config_path.read_text()))
    # Threads that spin at barriers starve each other when cores are shared with a trainer:
    # 180 tokens/s instead of 5,500 (2 threads, 2 cores, a 3M model, one other busy process).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _logging(path: str, level: str) -> dict[str, object]:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "line": {"format": "%(asctime)s %(levelname)s vllm[%(process)d] %(message)s"}
        },
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": "line", "level": level},
            "file": {
                "class": "logging.FileHandler",
                "formatter": "line",
                "level": "INFO",
                "filename": path,
                "delay": True,
            },
        },
        "loggers": {"vllm": {"handlers": ["stderr", "file"], "level": "DEBUG", "propagate": False}},
    }
