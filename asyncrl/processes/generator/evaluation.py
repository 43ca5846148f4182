"""Held-out samples: generated, rewarded, reported and forgotten."""

from __future__ import annotations

from asyncrl.processes.generator.controller_line import ControllerLine
from asyncrl.processes.generator.generation import SampleGeneration, SampleGenerator
from rollout.trajectory import SampleId
from wire.messages import from_generator, to_generator


class Evaluation:
    """Generates held-out samples with the weights that are installed."""

    def __init__(self, generator: SampleGenerator, controller: ControllerLine) -> None:
        self._generator = generator
        self._controller = controller
        self.running = 0
        """Held-out samples in generation or with a reward worker."""

    async def evaluate(self, command: to_generator.Evaluate) -> None:
        """Generate one held-out sample and report its reward.

        Raises:
            AsyncrlError: the reward failed.
            EngineError: the engine failed or cannot serve the sample.
        """
        sample = SampleId(group=command.round, sample=command.index)
        self.running += 1
        try:
            held = await self._generator.generate(
                SampleGeneration(sample, command.prompt, command.seed, purpose="eval")
            )
            reward = await held.reward
        finally:
            self.running -= 1
        await self._controller.send(
            from_generator.EvaluationSample(
                self._controller.generator,
                command.round,
                command.index,
                reward.value,
                held.trajectory.oldest_version,
            )
        )
