"""The process of one part: `python -m asyncrl.gpu_check.child` with a task as JSON."""

import importlib
import json
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from asyncrl.gpu_check.parts import Context, LeftOut, PartFailed


def main() -> None:
    """Run a function of `{function, result, folder, gpus, small}`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what a part holds is given back
    task = json.loads(sys.argv[1])
    context = Context(Path(task["folder"]), task["gpus"], task["small"])
    said = _said(task["function"], context)
    Path(task["result"]).write_text(json.dumps(said), encoding="utf-8")


def _said(function: str, context: Context) -> dict[str, Any]:
    module, _, name = function.partition(":")
    try:
        sentence, numbers = getattr(importlib.import_module(module), name)(context)
    except LeftOut as reason:
        return {"verdict": "left out", "sentence": str(reason)}
    except PartFailed as failure:
        return {"verdict": "failed", "sentence": str(failure), "numbers": failure.numbers}
    except Exception as error:  # noqa: BLE001 - the edge of the process: it becomes the verdict
        traceback.print_exc()
        first = next(iter(str(error).splitlines()), "")
        return {"verdict": "failed", "sentence": f"{type(error).__name__}: {first}"}
    return {"verdict": "ok", "sentence": sentence, "numbers": dict(numbers)}


if __name__ == "__main__":
    main()
