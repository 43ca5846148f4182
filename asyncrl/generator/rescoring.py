"""Scores tokens again when the trainer cannot explain their log-probabilities."""

from __future__ import annotations

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import Engine, SamplingParams, ScoreRequest
from asyncrl.generator.controller_line import ControllerLine
from asyncrl.wire.messages import from_generator, to_generator
from asyncrl.wire.messages.frames import decode_tokens, encode_floats


class Rescoring:
    """Answers `Rescore`. The engine computes every position of these requests afresh.

    Args:
        engine: scores.
        sampling: the run's.
        controller: gets the answer.
    """

    def __init__(
        self, engine: Engine, sampling: SamplingParams, controller: ControllerLine
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._controller = controller

    async def answer(self, command: to_generator.Rescore) -> None:
        """Score the samples and report, or report why they cannot be scored."""
        name = self._controller.generator
        try:
            scores = await self._engine.score(
                [
                    ScoreRequest(
                        f"rescore-{command.number}.{index}",
                        decode_tokens(sample.prompt_tokens),
                        decode_tokens(sample.tokens),
                        self._sampling,
                    )
                    for index, sample in enumerate(command.samples)
                ]
            )
        except EngineError as error:
            answer = from_generator.Rescored(name, command.number, -1, reason=str(error))
        else:
            versions = {score.policy_version for score in scores}
            answer = from_generator.Rescored(
                name,
                command.number,
                max(versions, default=-1),
                tuple(encode_floats(score.logprobs) for score in scores),
            )
        await self._controller.send(answer)
