"""What the controller costs per sample: CPU time of its process, with two generators of 256 rows.

    python -m benchmarks.controller [--quick] [--json FILE]

The controller is the real one (hub, decoding, inbox, scheduler, commands), without the live view.
Generators and trainer are on real sockets in another process and compute nothing
(`benchmarks.controller.peers`). Mode `verify`: each sample is started, finished, verified once,
finished again, delivered and acknowledged. Measured is the CPU time of all threads of the
controller's process, ZeroMQ's thread with its encryption included, from the first step to the last.

`ending together` is the number of samples that end at one step of an engine: 1 where answers are
long, whole groups where many answers are short. `alone`: every message in a frame of its own, as
before frames could carry several (`wire.outbox`). Both are measured in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import wire.outbox
from asyncrl.config import parse_config
from asyncrl.processes.spec import ChildSpec
from asyncrl.run.controller import Controller, Message
from asyncrl.run.directory import RunDirectory
from asyncrl.run.fleet import Fleet
from asyncrl.tasks.prompts import LoadedTask, Prompt
from benchmarks.controller.peers import SLOTS
from benchmarks.report import write_json
from wire import Hub, RunKey, RuntimeDirectory

GENERATORS = 2
GROUP_SIZE = 8
TICK_SECONDS = 0.004
"""Between two steps of a fake engine: the controller is not saturated, so it does not gather more
than its peers send together."""


class Process:
    """A process that the fleet believes in; the peers share another one."""

    def cause(self) -> str:
        """Empty: its exit code says it."""
        return ""

    def exit_code(self) -> int | None:
        """It never ends."""
        return None

    def end(self, *, by_force: bool) -> None:
        """Nothing happens."""

    def log_tail(self, lines: int = 12) -> str:  # noqa: ARG002 - as the protocol has it
        """It has no log."""
        return ""


class Launcher:
    """Starts nothing."""

    threads = 1

    def start(self, _spec: ChildSpec, _keys: Any) -> Process:
        """A process that is started already."""
        return Process()


class Silence:
    """Takes what the user would be told."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_named: None


@dataclass(frozen=True)
class Cost:
    """Of one run."""

    together: int
    batched: bool
    samples: int
    cpu_seconds: float
    seconds: float

    @property
    def us_per_sample(self) -> float:
        """Microseconds of CPU per sample that was trained on."""
        return 1e6 * self.cpu_seconds / self.samples


def measure(together: int, *, batched: bool, steps: int) -> Cost:
    """Train so many steps of as many samples as there are rows."""
    limit, wire.outbox.MAX_MESSAGES = wire.outbox.MAX_MESSAGES, 1024 if batched else 1
    try:
        with tempfile.TemporaryDirectory() as folder:
            return asyncio.run(_measure(Path(folder), together, batched=batched, steps=steps))
    finally:
        wire.outbox.MAX_MESSAGES = limit


async def _measure(folder: Path, together: int, *, batched: bool, steps: int) -> Cost:
    groups = GENERATORS * SLOTS // GROUP_SIZE
    sections = {
        "run": {"name": "measured", "directory": str(folder), "steps": steps},
        "scheduler": {"group_size": GROUP_SIZE, "groups_per_step": groups},
        "evaluation": {"prompts": 1},
        "launcher": {"generators": GENERATORS},
    }
    config = parse_config(sections, source="benchmarks.controller")
    directory = RunDirectory.create(config, resume=False, clean=False)
    directory.state.accuracy_before, directory.state.evaluation_samples = 1.0, 1
    prompts = [Prompt(f"p{i}", np.arange(200, dtype=np.int32), "", {}) for i in range(1024)]
    runtime, key = RuntimeDirectory(), RunKey.new()
    key.write(folder / "key")
    hub: Hub[Message] = Hub(runtime.address("control"), key.hub("control"), Message)
    spec = ChildSpec("trainer", "trainer", str(folder), "model", "ipc://a", "ipc://b", 1, 1)
    fleet = Fleet(config.launcher, Launcher(), spec, hub, key)  # type: ignore[arg-type]
    controller = Controller(
        config,
        LoadedTask(prompts, prompts[:1], (0,), None),
        directory=directory,
        fleet=fleet,
        hub=hub,
        progress=Silence(),  # type: ignore[arg-type]
    )
    options = {
        "key": str(folder / "key"),
        "address": runtime.address("control"),
        "generators": GENERATORS,
        "together": together,
        "tick": TICK_SECONDS,
        "max_messages": wire.outbox.MAX_MESSAGES,
    }
    command = [sys.executable, "-m", "benchmarks.controller.peers", json.dumps(options)]
    running = asyncio.create_task(controller.run())
    await asyncio.sleep(0)
    peers = subprocess.Popen(command, env=os.environ)  # noqa: ASYNC220 - it starts at once
    try:
        while not fleet.all_ready:  # noqa: ASYNC110 - before anything is measured
            await asyncio.sleep(0.01)
        began, cpu = time.monotonic(), time.process_time()
        await running
        used, seconds = time.process_time() - cpu, time.monotonic() - began
    finally:
        peers.kill()
        peers.wait()
        hub.close()
        runtime.close()
    return Cost(together, batched, steps * groups * GROUP_SIZE, used, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and repeats")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, raw and ratios")
    args = parser.parse_args()
    steps, repeats = (4, 1) if args.quick else (10, 3)
    costs = [
        measure(together, batched=batched, steps=steps)
        for _ in range(repeats)
        for together in (1, 8, 32)
        for batched in (False, True)
    ]
    table = Table(title=f"controller: {GENERATORS} generators of {SLOTS} rows, µs of CPU / sample")
    for title in ("ending together", "alone", "in frames of several", "samples/s measured at"):
        table.add_column(title, justify="right")
    ratios: dict[str, float] = {}
    for together in (1, 8, 32):
        per, rate = {}, 0.0
        for batched in (False, True):
            of = [c for c in costs if (c.together, c.batched) == (together, batched)]
            per[batched] = statistics.median(c.us_per_sample for c in of)
            rate = statistics.median(c.samples / c.seconds for c in of)
        table.add_row(str(together), f"{per[False]:.0f}", f"{per[True]:.0f}", f"{rate:.0f}")
        ratios[f"controller_us_per_sample_{together}"] = per[True]
        ratios[f"controller_alone_over_together_{together}"] = per[False] / per[True]
    console = Console()
    console.print(table)
    console.print({name: round(value, 2) for name, value in ratios.items()})
    if args.json:
        raw = {"runs": [vars(c) | {"us_per_sample": c.us_per_sample} for c in costs]}
        write_json(args.json, "controller", raw, ratios)
