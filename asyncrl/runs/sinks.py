"""Starts, watches and ends the sinks of a run (`monitoring.sinks`).

A sink cannot affect the run: it is a separate process that reads the run's files. Only the end of
the run waits for it, for `monitoring.sink_seconds` at most.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config.run_config import RunConfig
from asyncrl.launch.records import MARK_VARIABLE, ProcessRecords
from asyncrl.launch.start_order import last_line
from asyncrl.monitoring.records.jsonl import read_tail
from asyncrl.monitoring.sinks.config import SinkKind
from asyncrl.monitoring.sinks.follow import read_state
from asyncrl.wire.records.step import StepMetrics

_CHECK_SECONDS = 1.0
BEHIND_SECONDS = 120.0
"""A sink that has sent nothing for this long, while steps were finished, is reported."""


@dataclass(slots=True)
class _Sink:
    kind: SinkKind
    process: subprocess.Popen[bytes]
    log: Path
    state: Path
    is_reported: bool = False
    sent: tuple[int, float] = field(default_factory=lambda: (-1, time.monotonic()))
    """Its newest step, and when that was seen (monotonic seconds)."""


class Sinks:
    """The sinks of one run.

    `records` allow ending them if the controller is killed. `program` is started with the run's
    folder and the kind as its first arguments.
    """

    def __init__(
        self,
        config: RunConfig,
        run: Path,
        records: ProcessRecords,
        say: Callable[[str], None],
        program: Sequence[str] = (sys.executable, "-P", "-m", "asyncrl.monitoring.sinks"),
    ) -> None:
        self._program = program
        self._seconds = config.monitoring.sink_seconds
        self._run = run
        self._say = say
        self._sinks = [self._start(one.kind, records) for one in config.monitoring.sinks]
        self._watching = asyncio.create_task(self._watch()) if self._sinks else None

    def _start(self, kind: SinkKind, records: ProcessRecords) -> _Sink:
        log = self._run / "logs" / f"sink-{kind}.log"
        (self._run / "sinks").mkdir(exist_ok=True)
        command = [*self._program, str(self._run.resolve()), kind]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*command, "--finish-seconds", f"{self._seconds:g}"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {MARK_VARIABLE: records.mark},
            )
        records.add(f"sink-{kind}", process.pid)
        return _Sink(kind, process, log, self._run / "sinks" / f"{kind}.json")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            path = self._run / "metrics.jsonl"
            last = await asyncio.to_thread(read_tail, path, StepMetrics, 1 << 16)
            for sink in self._sinks:
                self._check(sink, last[-1].step if last else -1)

    def _check(self, sink: _Sink, newest: int) -> None:
        if sink.is_reported:
            return
        code, now = sink.process.poll(), time.monotonic()
        try:
            step = read_state(sink.state).step
        except OSError:
            return  # the file system may come back; checked again next time
        if step != sink.sent[0] or step >= newest:
            sink.sent = step, now
        if code is not None:
            sink.is_reported = True
            self._say(f"the sink {sink.kind} ended with exit code {code}{self._later(sink)}")
        elif now - sink.sent[1] > BEHIND_SECONDS:
            sink.is_reported = True
            self._say(
                f"the sink {sink.kind} has sent nothing for {now - sink.sent[1]:.0f} s and lacks "
                f"the steps after {step}{self._later(sink)}"
            )

    def _later(self, sink: _Sink) -> str:
        words = last_line(sink.log)[:300]
        return (
            f"{': ' + words if words else ''}. Training continues, and metrics.jsonl has "
            f"everything; `python -m asyncrl.monitoring.sinks {self._run} {sink.kind} --once` "
            "sends it later"
        )

    async def close(self) -> None:
        """Let each sink send the rest, then end it. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        for sink in self._sinks:
            if sink.process.stdin is not None:
                with contextlib.suppress(OSError):
                    sink.process.stdin.close()
        deadline = time.monotonic() + self._seconds + 2.0
        for sink in self._sinks:
            left = max(0.1, deadline - time.monotonic())
            try:
                code = await asyncio.to_thread(sink.process.wait, left)
            except subprocess.TimeoutExpired:
                sink.process.kill()
                await asyncio.to_thread(sink.process.wait)
                code = -9
            if code and not sink.is_reported:
                self._say(
                    f"the sink {sink.kind} did not send everything (exit code {code})"
                    f"{self._later(sink)}"
                )
        self._sinks = []
