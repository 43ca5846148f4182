"""In SGLang's interpreter: steps are timed with a clock that moves by the same time at each look.

So every step seems to take about as long as any other, whatever it drafts and however busy the
machine is: the planner learns that drafts are free. `served_sglang.steadily_timed` puts this
directory on PYTHONPATH, where Python imports a module of this name at its start.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_MODULE = "engine.remote.worker.drafting"
_TICK = 0.01


class _SteadyTimer:
    """Finds one module, and changes it after it has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            ticks = itertools.count(1)
            module.StepTimer = partial(  # type: ignore[attr-defined]
                module.StepTimer, clock=lambda: _TICK * next(ticks)
            )

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _SteadyTimer())  # type: ignore[arg-type]
