"""What the controller costs: CPU time of its process, per sample and per event of a sample.

    python -m benchmarks.controller [--part samples|relays] [--quick] [--json FILE]

The controller is the real one (hub, decoding, inbox, scheduler, commands), without the live view.
Generators and trainer are on real sockets in another process and compute nothing
(`benchmarks.controller.peers`). Mode `verify`: each sample is started, finished, verified once,
finished again, delivered and acknowledged. Measured is the CPU time of all threads of the
controller's process, ZeroMQ's thread with its encryption included, from the first step to the last.

`--part samples`: two generators of 256 rows. `ending together` is the number of samples that end at
one step of an engine: 1 where answers are long, whole groups where many answers are short. `alone`:
every message in a frame of its own, as before frames could carry several (`wire.transport.outbox`).
Both are measured in turns.

`--part relays`: 64 generators of 64 rows, whose samples end one by one, connected over loopback TCP
themselves or through relays of eight, with CURVE and, in this benchmark only, without. The peers
share the other core and send as fast as they can. An event is a finished or delivered sample; the
commands that follow from it are part of its cost. `control_messages_per_s` is how many events one
core carries, all threads together. `_paced`: the same at some 1,200 events a second, when the
process wakes up for each frame.
"""

import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from asyncrl.config.run_config import parse_config
from asyncrl.controller.controller import Controller, Message
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.launch.child_spec import (
    ChildSpec,
    GeneratorSpec,
    RelaySpec,
    SpecsOfRun,
    TrainerSpec,
    is_relay,
)
from asyncrl.runs.directory import RunDirectory
from asyncrl.tasks.prompts import Prompt, Task
from asyncrl.wire import Hub, RunKey, RuntimeDirectory
from asyncrl.wire.transport import outbox
from benchmarks.controller.peers import SLOTS
from benchmarks.harness import parser_of, pick, report, table
from benchmarks.plain_sockets import without_curve

GROUP_SIZE = 8


class Process:
    """A process that the fleet believes in; the peers share another one."""

    node = ""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec

    lost_with_machine = False

    def cause(self) -> str:
        return ""

    def exit_code(self) -> int | None:
        return None

    def end(self, *, by_force: bool) -> None:
        """Nothing happens."""

    def log_tail(self, lines: int = 12) -> str:  # noqa: ARG002 - as the protocol has it
        return ""


class Launcher:
    threads = 1
    uses_relays = False

    def start(self, spec: ChildSpec, _keys: Any) -> Process:
        return Process(spec)


class Progress:
    """Counts what the scheduler is told, and takes what the user would be told."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.scheduler_seconds = 0.0

    def decided(self, event: str, seconds: float) -> None:
        """The scheduler handled one event of this type."""
        self.events[event] += 1
        self.scheduler_seconds += seconds

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_named: None


@dataclass(frozen=True)
class Load:
    """Who speaks to the controller, and how."""

    generators: int = 2
    slots: int = 256
    together: int = 1
    """Samples of a generator that end at one step of its engine."""
    tick: float = 0.004
    """Seconds between two steps of a fake engine."""
    batched: bool = True
    """False: each message in a frame of its own."""
    per_relay: int = 0
    """Generators behind one relay; 0: each is connected itself."""
    tcp: bool = False
    """Over loopback TCP; otherwise over ipc."""
    curve: bool = True


@dataclass(frozen=True)
class Cost:
    """Of one run, from the first step to the last."""

    load: Load
    samples: int
    events: int
    """Of samples, that the scheduler was told: finished (again after a verification), delivered."""
    cpu_seconds: float
    """Of all threads of the controller's process."""
    main_seconds: float
    """Of its main thread; the rest is ZeroMQ's."""
    scheduler_seconds: float
    seconds: float

    @property
    def us_per_sample(self) -> float:
        """Microseconds of CPU per sample that was trained on."""
        return 1e6 * self.cpu_seconds / self.samples

    @property
    def us_per_event(self) -> float:
        """Microseconds of CPU per event of a sample, with the commands that follow from it."""
        return 1e6 * self.cpu_seconds / self.events

    @property
    def events_per_s(self) -> float:
        """Events of samples that one core carries."""
        return self.events / self.cpu_seconds

    def record(self) -> dict[str, Any]:
        numbers = {name: value for name, value in asdict(self).items() if name != "load"}
        return asdict(self.load) | numbers | {
            "us_per_sample": self.us_per_sample, "us_per_event": self.us_per_event,
        }  # fmt: skip


def measure(load: Load, *, steps: int) -> Cost:
    """Train so many steps of as many samples as there are rows."""
    limit, outbox.MAX_MESSAGES = outbox.MAX_MESSAGES, 1024 if load.batched else 1
    try:
        with without_curve(enabled=not load.curve), tempfile.TemporaryDirectory() as folder:
            return asyncio.run(_measure(Path(folder), load, steps=steps))
    finally:
        outbox.MAX_MESSAGES = limit


def _specs(folder: str) -> SpecsOfRun:
    trainer = TrainerSpec(
        name="trainer", run_directory=folder, model_path="model", control_address="ipc://a",
        data_address="ipc://b", parent=1, threads=1,
    )  # fmt: skip
    generator = GeneratorSpec(
        name="generator", run_directory=folder, model_path="model", control_address="ipc://a",
        data_address="ipc://b", parent=1, threads=1,
    )  # fmt: skip
    relay = RelaySpec(
        name="relay", run_directory=folder, control_address="ipc://a", parent=1, threads=1
    )
    return SpecsOfRun(trainer, generator, relay)


async def _measure(folder: Path, load: Load, *, steps: int) -> Cost:
    groups = load.generators * load.slots // GROUP_SIZE
    sections = {
        "run": {"name": "measured", "directory": str(folder), "steps": steps},
        "scheduler": {"group_size": GROUP_SIZE, "groups_per_step": groups},
        "evaluation": {"prompts": 1},
        "launcher": {"generators": load.generators},
    }
    config = parse_config(sections, source="benchmarks.controller")
    directory = RunDirectory.create(config, resume=False, clean=False)
    directory.state.accuracy_before, directory.state.evaluation_samples = 1.0, 1
    prompts = [Prompt(f"p{i}", np.arange(200, dtype=np.int32), "", {}) for i in range(1024)]
    runtime, key = RuntimeDirectory(), RunKey.new()
    key.write(folder / "key")
    address = "tcp://127.0.0.1:*" if load.tcp else runtime.address("control")
    hub: Hub[Message] = Hub(address, key.hub("control"), Message, is_relay=is_relay)
    fleet = Fleet(config.launcher, Launcher(), _specs(str(folder)), hub, key)  # type: ignore[arg-type]
    progress = Progress()
    controller = Controller(
        config,
        Task(prompts, prompts[:1], (0,), None),
        directory=directory,
        fleet=fleet,
        hub=hub,
        progress=progress,  # type: ignore[arg-type]
    )
    options = asdict(load) | {
        "key": str(folder / "key"),
        "address": hub.address,
        "folder": str(runtime.path),
        "max_messages": outbox.MAX_MESSAGES,
    }
    command = [sys.executable, "-m", "benchmarks.controller.peers", json.dumps(options)]
    running = asyncio.create_task(controller.run())
    await asyncio.sleep(0)
    peers = subprocess.Popen(command, env=os.environ)  # noqa: ASYNC220 - it starts at once
    try:
        async with asyncio.timeout(120):
            while not fleet.all_ready:
                if running.done():
                    running.result()
                await asyncio.sleep(0.01)
        gc.collect()
        began, cpu, main = time.monotonic(), time.process_time(), time.thread_time()
        await running
        spent = time.process_time() - cpu, time.thread_time() - main, time.monotonic() - began
    finally:
        running.cancel()
        peers.kill()
        peers.wait()
        hub.close()
        runtime.close()
    told = progress.events["SampleFinished"] + progress.events["SampleDelivered"]
    samples = steps * groups * GROUP_SIZE
    used, main_used, seconds = spent
    return Cost(load, samples, told, used, main_used, progress.scheduler_seconds, seconds)


GENERATORS = 2
TARGET = 25_000
"""Events a second on one core."""
PACED_TICK = 0.1
"""Seconds between two samples of a generator, where the controller has little to do."""

Measured = tuple[Table, list[Cost], dict[str, float]]


class Effort(NamedTuple):
    samples: tuple[int, int]
    """Steps and repeats of this part."""
    relays: tuple[int, int]
    rows: int = SLOTS
    many: int = 64
    """Generators, and rows of each, of the part with relays."""


QUICK, FULL = Effort((4, 1), (2, 1)), Effort((10, 3), (4, 3))
SMOKE = Effort((1, 1), (1, 1), rows=32, many=8)


def samples_part(effort: Effort) -> Measured:
    """Two generators, in frames of one message and of several."""
    steps, repeats = effort.samples
    costs = [
        measure(Load(GENERATORS, effort.rows, together, batched=batched), steps=steps)
        for _ in range(repeats)
        for together in (1, 8, 32)
        for batched in (False, True)
    ]
    rows, ratios = [], dict[str, float]()
    for together in (1, 8, 32):
        of = {
            batched: [c for c in costs if (c.load.together, c.load.batched) == (together, batched)]
            for batched in (False, True)
        }
        alone, per = (statistics.median(c.us_per_sample for c in each) for each in of.values())
        rows.append(
            (together, alone, per, statistics.median(c.samples / c.seconds for c in of[True]))
        )
        ratios[f"controller_us_per_sample_{together}"] = per
        ratios[f"controller_alone_over_together_{together}"] = alone / per
    shown = table(
        f"controller: {GENERATORS} generators of {effort.rows} rows, µs of CPU / sample",
        "ending together,alone,in frames of several,samples/s measured at",
        rows,
    )
    return shown, costs, ratios


def relays_part(effort: Effort) -> Measured:
    """Many generators, connected themselves and through relays."""
    (steps, repeats), many = effort.relays, effort.many
    fast = {
        (relayed, curve): Load(many, many, per_relay=8 if relayed else 0, tcp=True, curve=curve)
        for relayed in (False, True)
        for curve in (True, False)
    }
    paced = [replace(fast[relayed, True], tick=PACED_TICK) for relayed in (False, True)]
    costs = [measure(load, steps=steps) for _ in range(repeats) for load in fast.values()]
    costs += [measure(load, steps=1) for load in paced]
    rows, ratios = [], dict[str, float]()
    for load in (*fast.values(), *paced):
        of = [cost for cost in costs if cost.load == load]
        rate = statistics.median(cost.events_per_s for cost in of)
        rows.append((
            "through relays of 8" if load.per_relay else "themselves", load.curve,
            statistics.median(cost.us_per_event for cost in of),
            statistics.median(1e6 * cost.main_seconds / cost.events for cost in of), rate,
            statistics.median(cost.events / cost.seconds for cost in of),
        ))  # fmt: skip
        name = "control_messages_per_s" + ("" if load.per_relay else "_direct")
        name += ("" if load.curve else "_plain") + ("_paced" if load in paced else "")
        ratios[name] = rate
    shown = table(
        f"controller: {many} generators of {many} rows over TCP, µs of CPU / event",
        "connected,CURVE,all,main thread,events/s on one core,events/s measured at",
        rows,
    )
    return shown, costs, ratios


PARTS = {"samples": samples_part, "relays": relays_part}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "fewer steps and repeats")
    parser.add_argument("--part", choices=PARTS, help="only this part")
    options = parser.parse_args(arguments)
    effort = pick(options, FULL, QUICK, SMOKE)
    shown, runs, ratios = list[Table](), list[Cost](), dict[str, float]()
    for part in (options.part,) if options.part else PARTS:
        made, costs, found = PARTS[part](effort)
        shown.append(made)
        runs += costs
        ratios |= found
    raw: dict[str, Any] = {"runs": [cost.record() for cost in runs], "target": TARGET}
    report(options, "controller", raw, ratios, *shown)
    return 0
