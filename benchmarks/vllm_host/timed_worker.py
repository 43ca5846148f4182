"""Worker extensions that time what runs inside vLLM's core process. They run there.

`TimedExtension` times every entry point of ours: the sampler, the drafter's hooks around a step,
and the part of the scheduler that is not vLLM's. `PlainExtension` times vLLM's own sampler.

Reading the clock of a thread is a system call, 1 to 3 us each. What the clocks add to what they
measure is measured at the start, with warm caches, and taken off.
"""

import time
from collections.abc import Callable
from typing import Any

from asyncrl.engine.vllm.worker import sampling, scheduler
from asyncrl.engine.vllm.worker.extension import WorkerExtension
from benchmarks.vllm_host.clocks import DRAW, SAMPLER


class _Nothing:
    CALLS = 2000

    def inner(self) -> None:
        """Take no time."""

    def outer(self) -> None:
        for _ in range(self.CALLS):
            self.inner()


class _Timed:
    """CPU seconds of the core's main thread by function, since the last reading."""

    model_runner: Any
    _seconds: dict[str, float]
    _inside: list[float]
    """Seconds of timed functions that the running ones have called, and of their clocks."""
    _own = _around = 0.0
    """What a clock adds to its function, and what it adds to the timed function around it."""

    def _attach_clocks(self) -> None:
        """Begin, and find out what a clock adds."""
        self._seconds, self._inside = {}, []
        nothing = _Nothing()
        self._time(nothing, "inner", "inner")
        self._time(nothing, "outer", "outer")
        for _ in range(2):  # the first time is not warm
            self._seconds = dict.fromkeys(self._seconds, 0.0)
            nothing.outer()
        self._own = self._seconds["inner"] / _Nothing.CALLS
        self._around = self._seconds["outer"] / _Nothing.CALLS
        self._seconds = {}

    def host_seconds(self) -> dict[str, float]:
        """What was spent since the last call."""
        spent, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return spent

    def _time(self, owner: Any, name: str, label: str) -> None:
        """Replace a function by one that is timed, without what it calls that is timed as well."""
        function: Callable[..., Any] = getattr(owner, name)
        self._seconds.setdefault(label, 0.0)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            self._inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - began
                self._seconds[label] += spent - self._inside.pop() - self._own
                if self._inside:
                    self._inside[-1] += spent + self._around

        setattr(owner, name, timed)


class TimedExtension(_Timed, WorkerExtension):
    def host_attach(self) -> None:
        """Put the clocks around everything that was installed."""
        self._attach_clocks()
        self._time(sampling, "draw_from_logits", DRAW)
        runner = self.model_runner
        self._time(runner, "_sample", SAMPLER)
        self._time(scheduler, "outputs_of", "table")
        drafter = getattr(runner, "drafter", None)
        if drafter is not None:
            self._time(drafter, "begin", "drafter, before the step")
            self._time(drafter, "propose", "drafter, after the step")


class PlainExtension(_Timed):
    def host_attach(self) -> None:
        self._attach_clocks()
        self._time(self.model_runner, "_sample", DRAW)
