"""SGLang with our scheduler, which can be told to do something wrong (`sglang_faults`).

Runs in SGLang's interpreter, in the place of `asyncrl.engine.sglang.worker.main`. With `raw`,
arguments of `ServerArgs` and a folder it starts what these arguments say, for `raw_sglang`.
"""

from __future__ import annotations

import json
import sys

from asyncrl.engine.sglang.worker import main, plugin

_REGISTER = plugin._register


def _register() -> None:
    """What the plug-in registers, then the switch for faults."""
    _REGISTER()
    import sglang_faults

    sglang_faults.add_switch()


# Here, as a scheduler process that is spawned imports this module too.
plugin._register = _register


def _start(arguments: str, folder: str) -> None:
    from asyncrl.engine.sglang.worker.start import start_schedulers

    processes, wait_for_ready = start_schedulers(json.loads(arguments), folder)
    wait_for_ready()
    for process in processes:
        process.join()


if __name__ == "__main__":
    if sys.argv[1] == "raw":
        _start(*sys.argv[2:])
    else:
        main.main()
