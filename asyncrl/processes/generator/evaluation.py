"""Held-out samples: generated, rewarded, reported and forgotten."""

from __future__ import annotations

import asyncio

from asyncrl.processes.generator.background import BackgroundTasks
from asyncrl.processes.generator.controller_line import ControllerLine
from asyncrl.processes.generator.generation import SampleGeneration, SampleGenerator
from rollout.trajectory import SampleId
from wire.messages import from_generator, to_generator


class Evaluation:
    """Generates held-out samples with the weights that are installed."""

    def __init__(self, generator: SampleGenerator, controller: ControllerLine) -> None:
        self._generator = generator
        self._controller = controller
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Held-out samples in generation or with a reward worker."""
        return len(self._tasks)

    def start(self, command: to_generator.Evaluate, tasks: BackgroundTasks) -> None:
        """Generate one held-out sample and report its reward, concurrently."""
        task = tasks.start(self._evaluate(command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def abandon(self) -> None:
        """Forget every held-out sample that is not reported."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _evaluate(self, command: to_generator.Evaluate) -> None:
        """Generate one held-out sample and report its reward.

        Raises:
            AsyncrlError: the reward failed.
            EngineError: the engine failed or cannot serve the sample.
        """
        sample = SampleId(group=command.round, sample=command.index)
        held = await self._generator.generate(
            SampleGeneration(sample, command.prompt, command.seed, purpose="eval")
        )
        reward = await held.reward
        await self._controller.send(
            from_generator.EvaluationSample(
                self._controller.generator,
                command.round,
                command.index,
                reward.value,
                held.trajectory.oldest_version,
            )
        )
