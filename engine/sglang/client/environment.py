"""The folder, the log and the environment of SGLang's processes. Does not import SGLang."""

from __future__ import annotations

import os
import sysconfig
from importlib.resources import files
from pathlib import Path

from asyncrl.engine.config import EngineConfig
from asyncrl.engine.remote.client.process import LogFolder
from asyncrl.engine.sglang.worker.plugin import MARK_VARIABLE

_LONGEST_FOLDER = 80
"""Bytes. A socket's path may have 107."""
_PACKAGES = Path(str(files("asyncrl"))).resolve().parent


class SglangFolder(LogFolder):
    """A private directory with SGLang's log and the sockets to it."""

    def __init__(self, level: str) -> None:
        super().__init__("sglang", _LONGEST_FOLDER)
        self.requests = f"ipc://{self.path / 'requests'}"
        self.outputs = f"ipc://{self.path / 'outputs'}"
        # Its stderr is the log file, its stdout the generator's stderr.
        terminal, file = {"stream": "ext://sys.stdout"}, {"stream": "ext://sys.stderr"}
        root = {"handlers": ["terminal", "file"], "level": "INFO"}
        self.configure(level, terminal, file, {"root": root})


def environment_of(config: EngineConfig, folder: SglangFolder) -> dict[str, str]:
    """Return the environment variables of SGLang's processes."""
    threads = str(config.rank_threads)
    variables = os.environ | {
        MARK_VARIABLE: "1",
        "SGLANG_LOGGING_CONFIG_PATH": str(folder.logging),
        # SGLang's own sockets, which nothing else uses, take msgpack (sglang 0.5.23, environ.py).
        "SGLANG_USE_PICKLE_IPC": "0",
        # Room for drafts beyond max_model_len, which no request may use.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "TQDM_DISABLE": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }
    # Threads that spin at barriers starve each other when cores are shared with a trainer.
    variables.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    variables.pop("PYTHONHOME", None)
    if Path(sysconfig.get_path("purelib")).resolve() != _PACKAGES:
        # A source tree: SGLang's interpreter takes our modules from it too. Installed packages are
        # not shared, because what lies next to them is not for that interpreter.
        before = [variables["PYTHONPATH"]] if variables.get("PYTHONPATH") else []
        variables["PYTHONPATH"] = os.pathsep.join([str(_PACKAGES), *before])
    return variables
