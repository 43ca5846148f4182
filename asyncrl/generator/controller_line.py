"""A generator's connection to the controller."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from asyncrl.errors import UserError
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire import Line
from asyncrl.wire.messages import from_generator, to_generator

logger = logging.getLogger("asyncrl.generator")


@dataclass(frozen=True, slots=True)
class ControllerLine:
    """The socket to the controller, and the name under which this generator sends."""

    generator: str
    line: Line[to_generator.ToGenerator]

    async def send(
        self, message: from_generator.FromGenerator, *, urgent: bool | None = None
    ) -> None:
        """Queue a message, by default urgent by its type. Raises Unreachable if too many wait."""
        self.line.send_soon(message, urgent=urgent)

    async def receive(self) -> to_generator.ToGenerator:
        """Wait for the next command."""
        return await self.line.receive()

    async def report_failed_sample(self, sample: SampleId, error: Exception) -> None:
        """Report and log why a sample cannot be generated or rewarded."""
        logger.error("sample %s failed: %s", sample, error)
        by_user = isinstance(error, UserError)
        await self.send(from_generator.SampleFailed(self.generator, sample, str(error), by_user))
