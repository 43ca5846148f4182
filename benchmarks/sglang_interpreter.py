"""Where the benchmarks find the interpreter that SGLang runs in."""

from __future__ import annotations

import os

from asyncrl.engine.sglang.config import SglangConfig
from asyncrl.engine.sglang.interpreter import check_interpreter, path_of

VARIABLE = "ASYNCRL_SGLANG_PYTHON"


def sglang_python() -> str:
    """That of the environment variable, or else what a run would take by default."""
    config = SglangConfig(python=os.environ.get(VARIABLE) or None)
    check_interpreter(config)
    return path_of(config)
