"""What all contestants train on: the prompts of every step in asyncrl's order, and the rewards."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.run_config import RunConfig
from asyncrl.rewards.functions import load_function
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.prompts import Prompt, Task, prompt_order
from asyncrl.tasks.sample_requests import RandomStreams
from asyncrl.wire.weights.fingerprint import fingerprint


@dataclass(frozen=True)
class Step:
    seconds: float
    """From the start of training to the end of the step."""
    reward: float
    """Mean reward of the step's samples."""
    tokens: int
    """Response tokens of the step's samples."""


class StepLog:
    """Writes each finished step as a line of JSON. The clock starts with `begin`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = 0.0
        path.write_text("", encoding="utf-8")

    def begin(self) -> None:
        """Training starts now: everything is loaded, nothing has been generated."""
        self._began = time.perf_counter()

    def add(self, reward: float, tokens: int) -> None:
        step = Step(time.perf_counter() - self._began, reward, tokens)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(step)) + "\n")


def read_steps(path: Path) -> list[Step]:
    """The steps of a log, in order."""
    return [Step(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def task_of(config: RunConfig) -> Task:
    """The task of a run whose `model.path` is a folder."""
    return load_task(config.task, config.model.path, config.run.seed)


def prompts_by_step(config: RunConfig, task: Task, model: Any) -> Iterator[list[Prompt]]:
    """The prompts of each step, one per group, as `asyncrl run` visits them."""
    state = model.state_dict(keep_vars=True)
    own = {id(tensor): (name, tensor.detach()) for name, tensor in reversed(state.items())}
    digest = fingerprint(reversed(own.values())).whole
    order = RandomStreams(config.run.seed, digest).order_seed
    groups, count = config.scheduler.groups_per_step, len(task.train)
    for step in range(config.run.steps):
        first = step * groups
        yield [task.train[prompt_order(count, order, at)] for at in range(first, first + groups)]


def reward_of(config: RunConfig) -> Callable[[Prompt, str], float]:
    """The run's reward of a response's text: the weighted sum of its functions."""
    terms = [(one, load_function(one.name, one.args)) for one in config.rewards.functions]

    def reward(prompt: Prompt, response: str) -> float:
        question = str(prompt.example["prompt"])
        return sum(
            one.weight * function(question, response, prompt.example, **one.args)
            for one, function in terms
        )

    return reward


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
