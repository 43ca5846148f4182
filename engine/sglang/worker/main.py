"""Starts SGLang's scheduler processes and watches them.

    python -m asyncrl.engine.sglang.worker.main

Runs in SGLang's interpreter. It does what SGLang's `Engine` does up to its schedulers (`start.py`);
our scheduler (`scheduler.py`) communicates with the generator directly.

    generator ── Popen, own session ──► this process ── fork ──► a scheduler for each rank

It ends with status 1 when a scheduler ends, with status 2 when SGLang does not take the settings,
and with the generator, however that ends. No process of its session outlives it: the schedulers
have SGLang's parent-death signal, and the generator kills the session when this process ends.
"""

import gc
import logging
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import connection
from types import FrameType
from typing import Any

import msgspec

from asyncrl.engine.process_config import ProcessConfig
from asyncrl.engine.sglang.messages import CPU_ATTENTION, ServerSettings
from asyncrl.engine.sglang.worker.plugin import CPU_VARIABLES

_LOG = logging.getLogger("asyncrl.sglang")
_FAILED, _REFUSED = 1, 2
_CPU_KV_GIB = 0.5
_PREFILL, _CPU_PREFILL = 4096, 512
"""Prompt tokens of a step; more than 512 exceed a CPU's caches."""
_GIB = 1 << 30


def main() -> None:
    """Run SGLang with the settings of the command line, until it or the generator ends."""
    settings = msgspec.json.decode(sys.argv[1], type=ServerSettings)
    end_with(int(sys.argv[2]), settings.folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's
    try:
        ranks = Ranks(*_start(settings), step_seconds=ProcessConfig.call_seconds)
        ranks.wait_for_ready()
    except (ValueError, RuntimeError, OSError, AssertionError, ImportError, KeyError) as error:
        _LOG.exception("SGLang did not start")
        _say(f"{type(error).__name__}: {error}")
        logging.shutdown()
        os._exit(_REFUSED)
    ranks.watch()


def _start(settings: ServerSettings) -> tuple[list[Any], Callable[[], None]]:
    """Start a scheduler process for each rank; return the processes and a wait for readiness."""
    gc.disable()  # imported objects are not garbage
    on_cpu = _prepare_device(settings.engine.device)
    from asyncrl.engine.sglang.worker.start import start_schedulers

    return start_schedulers(server_arguments(settings, on_cpu=on_cpu), settings.folder)


class Ranks:
    """The scheduler processes, by rank, which end together.

    A scheduler that fails or hangs sends SIGQUIT to this process (`managers/scheduler.py`:6373 and
    `utils/watchdog.py`:163 of sglang 0.5.23), also if a step takes longer than `step_seconds`.
    `wait_for_ready` returns when all take requests, and raises RuntimeError if one fails.
    """

    def __init__(
        self, processes: list[Any], wait_for_ready: Callable[[], None], *, step_seconds: float
    ) -> None:
        self._processes, self._step_seconds = processes, step_seconds
        self.wait_for_ready = wait_for_ready
        signal.signal(signal.SIGQUIT, self._on_failure)
        signal.signal(signal.SIGTERM, lambda number, _frame: self._end(128 + number))

    def watch(self) -> None:
        """Wait for the first process that ends, which is always a failure, and end with it."""
        connection.wait([process.sentinel for process in self._processes])
        self._on_failure(signal.SIGQUIT, None)

    def _on_failure(self, _number: int, _frame: FrameType | None) -> None:
        ended = 0
        for rank, process in enumerate(self._processes):
            process.join(timeout=0.2)  # it may just be ending
            code = process.exitcode
            if code is None:
                continue
            ended += 1
            how = f"ended with exit code {code}"
            if code < 0:
                how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
            _say(f"SGLang's scheduler process of rank {rank} {how}")
        if not ended:
            _say(
                f"SGLang's watchdog ended it: a step took longer than {self._step_seconds:.0f} s, "
                "or a scheduler process failed and hangs"
            )
        self._end(_FAILED)

    def _end(self, status: int) -> None:
        """Kill the remaining processes, and end without SGLang's clean-up."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        logging.shutdown()
        os._exit(status)


def _prepare_device(device: str) -> bool:
    """Choose the platform, before SGLang is imported and reads it; return True if it is a CPU."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    on_cpu = not torch.cuda.is_available()
    if device == "cuda" and on_cpu:
        raise ValueError(
            f"engine.device=cuda, but torch {torch.__version__} in {sys.executable} sees no GPU: "
            "install SGLang with CUDA there, or set engine.device=auto"
        )
    if on_cpu:
        os.environ.update(CPU_VARIABLES)
    return on_cpu


def server_arguments(settings: ServerSettings, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of SGLang's `ServerArgs`, or raise ValueError for invalid settings."""
    config = settings.engine
    ours = config.sglang
    if config.batch_invariant and on_cpu:
        raise ValueError(
            "engine.batch_invariant: true needs a GPU, and SGLang runs on the CPU here; leave it "
            "out"
        )
    dtype = config.weights_dtype(on_cpu=on_cpu)
    prefill = ours.max_prefill_tokens or (_CPU_PREFILL if on_cpu else _PREFILL)
    arguments: dict[str, Any] = {
        "model_path": settings.model_path,
        "skip_tokenizer_init": True,
        "device": "cpu" if on_cpu else "cuda",
        "dtype": dtype,
        "enable_fp32_lm_head": config.has_float32_logits(on_cpu=on_cpu),
        "enable_deterministic_inference": config.batch_invariant,
        "random_seed": settings.seed,
        "context_length": settings.max_model_len,
        "max_running_requests": config.slots,
        # A chunk of one prompt, and all prompts of a step together.
        "chunked_prefill_size": prefill,
        "max_prefill_tokens": prefill,
        "page_size": 1,
        "disable_radix_cache": not ours.enable_prefix_caching,
        "tp_size": ours.tensor_parallel_size,
        "enable_priority_scheduling": True,
        "schedule_low_priority_values_first": True,
        # A running request is not put back for a waiting one; when KV is full, the least urgent is.
        "disable_priority_preemption": True,
        "retraction_policy": "priority",
        "watchdog_timeout": ours.call_seconds,
        "log_level": ours.log_level.lower(),
        "mem_fraction_static": ours.share_of_gpu,
        # SGLang neither serves nor measures ours.
        "skip_server_warmup": True,
        "enable_metrics": False,
    }
    kv_gib = ours.kv_cache_gib or (_CPU_KV_GIB if on_cpu else None)
    if kv_gib is not None:
        arguments["max_total_tokens"] = _kv_tokens(settings, dtype, kv_gib)
    if on_cpu:
        arguments |= {
            "disable_overlap_schedule": True,
            "disable_cuda_graph": True,
            # Else SGLang takes `torch_native` before it asks the platform: its attention computes
            # the new tokens of a prompt as a square over all keys, known ones included.
            "attention_backend": CPU_ATTENTION,
        }
    if settings.draft_tokens:
        arguments |= {
            "speculative_algorithm": "ASYNCRL",
            "speculative_num_draft_tokens": settings.draft_tokens + 1,
        }
    return arguments


def _kv_tokens(settings: ServerSettings, dtype: str, kv_gib: float) -> int:
    """Return the number of tokens whose KV fits into this memory, on each rank."""
    from asyncrl.engine.sglang.worker.start import kv_bytes

    each = kv_bytes(settings.model_path, dtype, settings.engine.sglang.tensor_parallel_size)
    tokens = int(kv_gib * _GIB) // each
    # SGLang reserves two steps' tokens for each request that runs (docs/engines.md).
    needed = settings.max_model_len + settings.draft_tokens + 2
    if tokens < needed:
        raise ValueError(
            f"engine.sglang.kv_cache_gib: {kv_gib:g} holds the KV of {tokens} tokens, and one "
            f"request may need {needed}: it must be at least {needed * each / _GIB:.3g}"
        )
    return tokens


def end_with(parent: int, folder: str) -> None:
    """End this session, and remove its folder, when the generator has ended."""
    fd = os.pidfd_open(parent)

    def wait() -> None:
        select.select([fd], [], [])
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="asyncrl-parent-watch", daemon=True).start()


def _say(text: str) -> None:
    """Write a line to the log file, which SGLang's logging may not be set up for yet."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
