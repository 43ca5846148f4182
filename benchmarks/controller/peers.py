"""Generators and a trainer that compute nothing, in a process of their own, on real sockets.

They answer every command as the real ones do, at once: a sample is finished in the order in which
it was started, `together` at a tick; a verification passes; a group that is delivered is
acknowledged as a whole; a step is trained when its plan comes.
"""

import asyncio
import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

from asyncrl.generator.background import ControllerLine
from asyncrl.relay.control import ControlRelay
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire import Line, RunKey
from asyncrl.wire.messages import from_generator, from_trainer, to_generator, to_trainer
from asyncrl.wire.records.step import EngineStats, LearnerMetrics, TrainerTimes
from asyncrl.wire.transport import outbox
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest
from benchmarks.plain_sockets import without_curve

SLOTS = 256
LENGTH = 1000
DIGEST = b"d" * 16
REPORT_SECONDS = 0.5


def weights(version: int) -> WeightManifest:
    """Weights that exist and are never read."""
    return WeightManifest(version, "/dev/null", 0, ())


class Generator:
    def __init__(self, controller: ControllerLine, slots: int, together: int, tick: float) -> None:
        self._controller = controller
        self._slots = slots
        self._together = together
        self._tick = tick
        self._version = 0
        self._running: OrderedDict[SampleId, int] = OrderedDict()
        self._verifying: list[SampleId] = []

    async def run(self) -> None:
        name, send = self._controller.generator, self._controller.send
        await send(from_generator.GeneratorReady(name, self._slots, 0, Fingerprint({}, ""), None))
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._serve())
            loops.create_task(self._finish())
            loops.create_task(self._report())

    async def _serve(self) -> None:
        name, send = self._controller.generator, self._controller.send
        while True:
            match await self._controller.receive():
                case to_generator.Generate() as command:
                    self._running[command.sample] = self._version
                case to_generator.InstallWeights() as command:
                    self._version = command.manifest.policy_version
                    for due in command.verify:
                        self._verify(due)
                    await send(from_generator.WeightsInstalled(name, self._version))
                case to_generator.Verify() as command:
                    self._verify(command)
                case to_generator.Deliver() as command:
                    for sample in command.samples:
                        await send(from_generator.SampleDelivered(name, sample))
                case to_generator.Evaluate() as command:
                    scored = from_generator.EvaluationSample(
                        name, command.round, command.index, 1.0, self._version
                    )
                    await send(scored)

    def _verify(self, command: to_generator.Verify) -> None:
        for sample in command.samples:
            if sample in self._running:
                self._running[sample] = self._version
            else:
                self._verifying.append(sample)

    async def _finish(self) -> None:
        while True:
            await asyncio.sleep(self._tick)
            for sample in self._verifying:
                await self._tell(sample, self._version)
            self._verifying.clear()
            for _ in range(min(self._together, len(self._running))):
                await self._tell(*self._running.popitem(last=False))

    async def _tell(self, sample: SampleId, version: int) -> None:
        await self._controller.send(
            from_generator.SampleFinished(
                self._controller.generator, sample, LENGTH, version, "length", DIGEST
            )
        )

    async def _report(self) -> None:
        while True:
            stats = EngineStats(slots=self._slots, policy_version=self._version)
            report = from_generator.GeneratorReport(
                self._controller.generator, stats, held=0, rewards_waiting=0
            )
            await self._controller.send(report)
            await asyncio.sleep(REPORT_SECONDS)


async def train(line: Line[Any]) -> None:
    await line.send(from_trainer.TrainerReady(0, weights(0)))
    while True:
        match await line.receive():
            case to_trainer.StepPlan(step=step, groups=groups):
                await line.send(
                    from_trainer.StepFinished(
                        step, groups, weights(step + 1), LearnerMetrics(), TrainerTimes()
                    )
                )


async def report(line: Line[Any]) -> None:
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        await line.send(from_trainer.TrainerReport(0, 0, 0.0))


def lines_of(options: dict[str, Any], key: RunKey, tasks: asyncio.TaskGroup) -> list[Line[Any]]:
    """A line for each generator: its own connection, or one of a relay in this process."""
    names = [f"generator-{index}" for index in range(options["generators"])]
    commands, address, per_relay = (
        to_generator.ToGenerator,
        options["address"],
        options["per_relay"],
    )
    if not per_relay:
        return [Line(address, key.line("control", name), commands) for name in names]
    lines: list[Any] = []
    for number, first in enumerate(range(0, len(names), per_relay)):
        relay = ControlRelay(
            f"ipc://{options['folder']}/relay-{number}",
            key.hub("relays").secret,
            address,
            key.line("control", f"relay-{number}"),
            to_generator.ToGenerator,
        )
        tasks.create_task(relay.run())
        lines += [
            relay.line_of(key.line("control", name), commands)
            for name in names[first : first + per_relay]
        ]
    return lines


async def serve(options: dict[str, Any]) -> None:
    key = RunKey.read(Path(options["key"]))
    async with asyncio.TaskGroup() as peers:
        trainer: Line[Any] = Line(
            options["address"], key.line("control", "trainer"), to_trainer.ToTrainer
        )
        peers.create_task(train(trainer))
        peers.create_task(report(trainer))
        for index, line in enumerate(lines_of(options, key, peers)):
            controller = ControllerLine(f"generator-{index}", line)
            generator = Generator(
                controller, options["slots"], options["together"], options["tick"]
            )
            peers.create_task(generator.run())


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    outbox.MAX_MESSAGES = given["max_messages"]
    with without_curve(enabled=not given["curve"]):
        asyncio.run(serve(given))
