"""Starts SGLang's scheduler processes as its `Engine` does (`entrypoints/engine.py` of 0.5.23).

This repeats `Engine._launch_subprocesses` (line 1129) up to its call of
`_launch_scheduler_processes`, without tokenizer manager and detokenizer.

On a CPU the schedulers are forked from this process instead of spawned, as importing SGLang costs
9 s of CPU. This process computes nothing, so the fork loses no thread of torch's or of a BLAS
library.
"""

import gc
import multiprocessing
import signal
import tempfile
from collections.abc import Callable
from typing import Any

from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.entrypoints.engine import Engine, _set_envs_and_config
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.common import configure_logger

_BYTES = {"float32": 4, "bfloat16": 2}


def start_schedulers(
    arguments: dict[str, Any], folder: str
) -> tuple[list[Any], Callable[[], None]]:
    """Start a scheduler process for each rank, with arguments of `ServerArgs`.

    `folder` holds this SGLang's files; removed at its end. Returns the processes by rank, and a
    function that waits until all are ready or raises RuntimeError. Raises ValueError if SGLang does
    not take these arguments, or not this model.
    """
    load_plugins()  # ours registers what the arguments name
    server_args = ServerArgs(**arguments)
    configure_logger(server_args)
    server_args.resolve_once()
    # Environment variables and the start method of processes. Its handler of SIGQUIT is replaced.
    _set_envs_and_config(server_args)
    server_args.check_server_args()
    publish(server_args, role="tokenizer")
    if server_args.device == "cpu":
        multiprocessing.set_start_method("fork", force=True)  # `_set_envs_and_config` chose "spawn"
        gc.freeze()  # a collection in a scheduler does not copy the pages of imported objects
    gc.enable()  # `main` has imported this without
    started, processes = Engine._launch_scheduler_processes(  # noqa: SLF001 - see above
        server_args, _ports(server_args, folder), _run_scheduler
    )
    return processes, started.wait_for_ready


def _run_scheduler(*arguments: Any) -> None:
    """Run a scheduler process, without the handler of SIGQUIT that a fork inherits."""
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    run_scheduler_process(*arguments)


def _ports(server_args: ServerArgs, folder: str) -> PortArgs:
    """Make SGLang's sockets as temporary files in this folder: SGLang does not remove them."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        return PortArgs.init_new(server_args)
    finally:
        tempfile.tempdir = before


def kv_bytes(model_path: str, dtype: str, ranks: int) -> int:
    """Return the bytes of one token's KV in one of `ranks` ranks that share the heads.

    Raises ValueError if the model has other layers than attention.
    """
    config = ModelConfig(model_path, dtype=dtype)
    if config.attention_arch == AttentionArch.MHA:
        each = config.get_num_kv_heads(ranks) * (config.head_dim + config.v_head_dim)
    elif config.attention_arch == AttentionArch.MLA:
        each = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        raise ValueError(
            "engine.sglang.kv_cache_gib cannot be set for a model with layers other than attention"
        )
    return int(each * config.num_hidden_layers * _BYTES[dtype])
