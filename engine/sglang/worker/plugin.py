"""SGLang's entry points (groups of sglang 0.5.23, `sglang/srt/plugins`).

Every process of SGLang in this environment loads them, so they do nothing unless the process was
started by a generator of ours.
"""

import os
import sys
import traceback

MARK_VARIABLE = "ASYNCRL_SGLANG"
"""Set in the environment of the processes that a generator of ours starts."""
CPU_VARIABLES = {"SGLANG_PLATFORM": "asyncrl_cpu", "TORCH_COMPILE_DISABLE": "1"}
"""The environment without a GPU, read when SGLang and torch's compiler are imported. SGLang would
compile a few helpers, such as the embedding's of several ranks. That takes longer than the start,
and the linker fails if torch's path has a space."""
_FAILED = 4
"""Exit status of a process whose plug-in could not be loaded."""


def cpu_platform() -> str | None:
    """Return the platform of machines without a GPU; None in processes that are not ours."""
    return (
        "asyncrl.engine.sglang.worker.platform.CpuPlatform" if MARK_VARIABLE in os.environ else None
    )


def register() -> None:
    """Register our scheduler and our drafting, or end: SGLang would run on without them."""
    if MARK_VARIABLE not in os.environ:
        return
    try:
        _register()
    except BaseException:  # noqa: BLE001 - whatever it was, the process ends with it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(_FAILED)


def _register() -> None:
    from asyncrl.engine.sglang.worker.api import SCHEDULER_NAME, HookRegistry, HookType
    from asyncrl.engine.sglang.worker.drafts import speculation
    from asyncrl.engine.sglang.worker.scheduler import ClientScheduler

    HookRegistry.register(SCHEDULER_NAME, ClientScheduler, HookType.REPLACE)
    speculation.register()
