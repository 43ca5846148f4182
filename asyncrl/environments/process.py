"""A worker process of environments from the pool's side."""

from __future__ import annotations

from pathlib import Path

from asyncrl.environments import interpreter
from asyncrl.environments.config import EnvironmentConfig
from asyncrl.environments.messages import FromWorker, Ready, Setup
from asyncrl.errors import RewardError
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.process import Program, UserProcess, WorkerLost
from asyncrl.rewards.protocol import Refused
from asyncrl.user_code.streams import MAX_FRAME, pack
from asyncrl.wire.transport.decoding import FrameDecoder

_DECODER: FrameDecoder[FromWorker] = FrameDecoder(FromWorker, max_bytes=MAX_FRAME)


class EnvironmentProcess(UserProcess[FromWorker]):
    """A worker of environments.

    Args:
        config: of the environment, with a name.
        rewards: `startup_seconds` and `max_processes` hold here too.
    """

    def __init__(self, config: EnvironmentConfig, rewards: RewardConfig) -> None:
        setup = Setup(
            config.name or "",
            config.args,
            str(Path.cwd()),
            config.reset_timeout_seconds,
            config.step_timeout_seconds,
        )
        super().__init__(
            Program(
                interpreter.command("asyncrl.environments.worker", config.python),
                "environment",
                f"the environment ({config.name})",
                "was",
                pack(setup),
                rewards.startup_seconds,
                rewards.max_processes,
            ),
            _DECODER,
        )
        self.notes: list[str] = []
        """What a user should know of the environment, a sentence each."""

    def check_answer(self, answer: FromWorker) -> None:
        """See the base class."""
        if isinstance(answer, Refused):
            raise RewardError(answer.message)
        if not isinstance(answer, Ready):
            raise WorkerLost(f"sent {type(answer).__name__} before it was ready")
        self.notes = answer.notes
