"""`asyncrl set KEY=VALUE`: settings that change while a run trains.

A setting that affects training data becomes a line of `run.changes`: it holds from a step on, and a
run that is resumed from an earlier checkpoint applies it from the same step on.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.by_step import ConfigByStep
from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.config.yaml_text import parse_yaml
from asyncrl.controller.training import Training
from asyncrl.controller.unfinished_work import UnfinishedWork
from asyncrl.errors import UserError
from asyncrl.evaluation.fleet import FleetEvaluation
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.mutability import When
from asyncrl.runs.directory import RunDirectory
from asyncrl.steering.safe_settings import check_is_safe
from asyncrl.steering.user_commands import Effect
from asyncrl.wire.messages import to_generator, to_trainer
from asyncrl.wire.messages.control import SetRequest


@dataclass(eq=False)
class LiveSettings:
    """Changes the configuration of a live run, one setting at a time."""

    config: RunConfig
    """The configuration in force, with all changes to come."""
    _directory: RunDirectory
    """The run's folder with config.yaml, which processes read when they start."""
    _fleet: Fleet
    _training: Training
    _evaluation: FleetEvaluation
    _unfinished: UnfinishedWork

    def __post_init__(self) -> None:
        self._began_with = self.config
        self._one_at_a_time = asyncio.Lock()

    async def carry_out(self, order: SetRequest) -> Effect:
        """Change a setting. Raises UserError, with nothing changed, if it is not possible now."""
        async with self._one_at_a_time:
            key = order.key.strip()
            when = check_is_safe(key, self.config)
            value = parse_yaml(order.value, source=f"the value of {key}")
            return await self._change(key, value, when)

    async def _change(self, key: str, value: Any, when: When) -> Effect:
        before = _value(self.config, key)
        if when == "at once":
            config = _with(self.config, {key: value})
            await self._take_over(config)
            text = f"{key} is {_shown(config, key)} from now on"
            return Effect(text, self._training.trained_steps, before)
        if when == "next step":
            step = self._training.next_undeclared_step
            self.config = self._from_step(step, key, value)
        else:
            step = await self._training.configure(
                lambda step: self._from_step(step, key, value), self._note
            )
        await self._take_over(self.config)
        text = f"{key} is {_shown(self.config.at(step), key)} from step {step} on"
        return Effect(text + _until(self.config, key, step), step, before)

    def _note(self, config: RunConfig) -> None:
        self.config = config

    def _from_step(self, step: int, key: str, value: Any) -> RunConfig:
        steps = self.config.run.steps
        if step >= steps:
            raise UserError(
                f"{key} would change from step {step} on, and the run has {steps} steps: all of "
                "them are being generated or trained"
            )
        changed, before = {key: value}, self.config.at(step)
        if key == "scheduler.on_update":
            if value == "verify":
                self._refuse_late_verification()
            elif before.scheduler.max_runahead_groups != "auto":
                changed["scheduler.max_runahead_groups"] = "auto"  # has no meaning any more
        after = _with(before, changed)
        settings = self.config.run.changes
        changes = {at: dict(one) for at, one in settings.items()}
        changes[step] = changes.get(step, {}) | {one: _value(after, one) for one in changed}
        values = self.config.model_dump(mode="json")
        values["run"]["changes"] = changes
        return parse_config(values, source=f"the run with {key} changed")

    def _refuse_late_verification(self) -> None:
        if not ConfigByStep(self.config).verifies:
            raise UserError(
                "scheduler.on_update cannot become verify in a run that began without it: its "
                "generators do not measure the noise floor, without which a verified token cannot "
                "be called exact. Stop the run and continue it with `--resume --set "
                "scheduler.on_update=verify`"
            )

    async def _take_over(self, config: RunConfig) -> None:
        self.config = config
        self._fleet.configure(config.launcher)
        self._evaluation.configure(config)
        by_step = ConfigByStep(config)
        self._unfinished.config = by_step
        self._training.take_over(by_step)
        await self.tell_trainer()
        level = to_generator.SetLogLevel(config.monitoring.log_level)
        for worker in self._fleet.generators():
            await self._fleet.send(worker.name, level)
        self._directory.write_config(config)

    async def tell_generator(self, name: str) -> None:
        """Send a generator that was started with the first configuration what has changed."""
        level = self.config.monitoring.log_level
        if level != self._began_with.monitoring.log_level:
            await self._fleet.send(name, to_generator.SetLogLevel(level))

    async def tell_trainer(self) -> None:
        """Send the trainer all changes, before any further step."""
        settings = json.dumps(self.config.model_dump(mode="json"))
        await self._fleet.send_trainer(to_trainer.Configure(settings))


def _with(config: RunConfig, changed: Mapping[str, Any]) -> RunConfig:
    values = config.model_dump(mode="json")
    for key, value in changed.items():
        section, name = key.split(".")
        values[section][name] = value
    return parse_config(values, source=", ".join(f"{k}={v}" for k, v in changed.items()))


def _value(config: RunConfig, key: str) -> Any:
    section, name = key.split(".")
    return config.model_dump(mode="json")[section][name]


def _shown(config: RunConfig, key: str) -> str:
    value = _value(config, key)
    return "null" if value is None else str(value)


def _until(config: RunConfig, key: str, step: int) -> str:
    later = [at for at, settings in config.run.changes.items() if at > step and key in settings]
    if not later:
        return ""
    value = config.run.changes[min(later)][key]
    return f", until step {min(later)}, where run.changes has {value}"
