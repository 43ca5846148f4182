"""Carry out one run: from a resolved configuration to result.json and report.html.

prepare    everything that can be the user's mistake is found here, before a folder is made
run        processes up, evaluate, train, evaluate (asyncrl.run.controller)
finish     processes down in order, result and report written, also after a failure
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress as ProgressBar

from asyncrl.config import RunConfig
from asyncrl.errors import DataError, UserError, WaitTimeout
from asyncrl.evaluation.round import Accuracy
from asyncrl.launch import LocalLauncher
from asyncrl.processes.shared_memory import remove_stale_files
from asyncrl.rewards.loading import check_name
from asyncrl.run.control import serve_control
from asyncrl.run.controller import Controller
from asyncrl.run.directory import RunDirectory, RunState
from asyncrl.run.fleet import Fleet
from asyncrl.run.progress import Progress
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import resolve_model
from asyncrl.tasks.prompts import Task
from monitoring.errors import MonitoringError
from monitoring.exporter import exporter_for
from monitoring.live import LiveView
from monitoring.metrics import ControllerMetrics, new_registry
from monitoring.metrics_log import MetricsLog, read_metrics
from monitoring.report.write import write_report
from monitoring.timeline import Timeline
from trainer.checkpoint_files import latest, version_of
from wire import Hub, RuntimeDirectory, Unreachable
from wire.messages import control, from_generator, from_trainer, to_generator, to_trainer


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run needs and what cannot go wrong any more."""

    config: RunConfig
    model_path: str
    task: Task


def prepare(config: RunConfig, console: Console) -> Prepared:
    """Make or find the model, load the data, check the rewards.

    Raises:
        UserError: what was wrong with the model, the data or the rewards.
    """
    for function in config.rewards.functions:
        check_name(function.name)
    console.print(f"model: {config.model.path}", highlight=False, soft_wrap=True)
    with ProgressBar(console=console, transient=True, disable=not console.is_terminal) as bar:
        model_path = resolve_model(config.model, bar)
    task = load_task(config.task, model_path, config.run.seed)
    _refuse_impossible_prompts(config, task)
    return Prepared(config, model_path, task)


def _refuse_impossible_prompts(config: RunConfig, task: Task) -> None:
    """Find before the start what would fail in the middle: lengths, rows that cannot travel."""
    encoder = msgspec.msgpack.Encoder()
    room = config.engine.max_model_len - config.sampling.max_tokens
    for prompt in itertools.chain(task.train, task.evaluation):
        if len(prompt.tokens) > room:
            raise DataError(
                f"prompt {prompt.prompt_id} has {len(prompt.tokens)} tokens; with "
                f"sampling.max_tokens {config.sampling.max_tokens} that is more than "
                f"engine.max_model_len {config.engine.max_model_len}. Raise the latter, or leave "
                "long prompts out with task.max_prompt_tokens and task.too_long: filter"
            )
        try:
            encoder.encode(prompt.example)
        except (OverflowError, TypeError, ValueError) as error:
            raise DataError(
                f"the example of prompt {prompt.prompt_id} holds a value that cannot be handed to "
                f"a reward: {error}. Numbers must fit 64 bits and texts be valid Unicode"
            ) from error


def execute(prepared: Prepared, *, resume: bool, clean: bool, console: Console) -> dict[str, Any]:
    """Run to the end and return what is in result.json.

    Raises:
        UserError: the run name is in use, or the user's part failed during the run.
        AsyncrlError: the run failed; its folder holds what it did.
    """
    registry = new_registry()
    with contextlib.ExitStack() as closing:
        exporter = exporter_for(prepared.config.monitoring, registry, 0)
        if exporter is not None:
            closing.callback(exporter.close)
            console.print(f"metrics: {exporter.url}", highlight=False)
        directory = RunDirectory.create(prepared.config, resume=resume, clean=clean)
        closing.callback(directory.close)
        metrics = ControllerMetrics.register(registry, process="controller")
        run = _Run(prepared, directory, resume=resume, console=console, metrics=metrics)
        try:
            return asyncio.run(run.execute())
        except UserError:
            directory.undo()
            raise
        finally:
            # Also of a run that failed: its report says how far it came.
            with contextlib.suppress(MonitoringError):
                write_report(directory.path)


class _Run:
    """One execution: owns what must be closed at its end."""

    def __init__(
        self,
        prepared: Prepared,
        directory: RunDirectory,
        *,
        resume: bool,
        console: Console,
        metrics: ControllerMetrics,
    ) -> None:
        self._metrics = metrics
        self._config = prepared.config
        self._task = prepared.task
        self._directory = directory
        self._console = console
        self._closing = contextlib.ExitStack()
        self._runtime = RuntimeDirectory()
        self._closing.callback(self._runtime.close)
        self._earlier = directory.read_state() if resume else None
        self._fleet = Fleet(
            prepared.config,
            LocalLauncher(
                directory.path / "logs",
                generators=prepared.config.launcher.generators,
                threads=prepared.config.launcher.threads,
                pin_cores=prepared.config.launcher.pin_cores,
            ),
            directory,
            self._runtime,
            model_path=prepared.model_path,
            stop_tokens=prepared.task.stop_tokens,
            resume=resume,
        )

    async def execute(self) -> dict[str, Any]:
        """Everything between the making of the folder and the report."""
        began = time.monotonic()
        ended = "failed"
        with self._closing:
            state = self._new_state()
            progress = self._progress()
            hub: Hub[Any] = Hub(
                self._runtime.address("control"),
                from_generator.FromGenerator | from_trainer.FromTrainer,
            )
            self._closing.callback(hub.close)
            timeline = Timeline(
                self._directory.path / "timeline" / "controller.jsonl", "controller"
            )
            self._closing.callback(timeline.close)
            controller = Controller(
                self._config,
                task=self._task,
                directory=self._directory,
                state=state,
                fleet=self._fleet,
                hub=hub,
                progress=progress,
                timeline=timeline,
            )
            background = [asyncio.create_task(self._serve_user(state, controller))]
            self._stop_on_signals(controller)
            try:
                before, after = await controller.run()
                ended = "done" if controller.trained_steps >= self._config.run.steps else "stopped"
            finally:
                for task in background:
                    task.cancel()
                await self._end_processes(hub)
                remove_stale_files()
                state.ended = ended
                self._directory.write_state(state)
            result = self._result(progress, before, after, seconds=time.monotonic() - began)
        self._directory.write_result(result)
        return result

    def _new_state(self) -> RunState:
        earlier = self._earlier
        state = RunState(
            pid=os.getpid(),
            control_address=self._runtime.address("user"),
            accuracy_before=None if earlier is None else earlier.accuracy_before,
            evaluation_samples=0 if earlier is None else earlier.evaluation_samples,
        )
        self._directory.write_state(state)
        return state

    def _progress(self) -> Progress:
        config = self._config
        newest = latest(self._directory.path / "checkpoints")
        self._directory.cut_records(before_step=0 if newest is None else version_of(newest))
        rows = read_metrics(self._directory.path / "metrics.jsonl")
        log = MetricsLog(self._directory.path / "metrics.jsonl")
        self._closing.callback(log.close)
        view = LiveView(config.monitoring, config.run.steps, config.run.name, self._console)
        self._closing.callback(view.close)
        return Progress(config, view=view, log=log, metrics=self._metrics, rows=rows)

    async def _serve_user(self, state: RunState, controller: Controller) -> None:
        hub: Hub[control.Request] = Hub(state.control_address, control.Request)
        try:
            await serve_control(hub, controller.answer)
        finally:
            hub.close()

    def _stop_on_signals(self, controller: Controller) -> None:
        """Ctrl-C ends in order; a second one ends at once."""
        loop = asyncio.get_running_loop()
        waiting: set[asyncio.Task[None]] = set()

        def stop() -> None:
            if waiting:
                self._fleet.end_all(by_force=True)
                return
            self._console.print(
                "stopping: the step in hand is finished and a checkpoint written "
                "(once more to end at once)"
            )
            waiting.add(asyncio.ensure_future(controller.stop()))

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop)
            self._closing.callback(loop.remove_signal_handler, number)

    async def _end_processes(self, hub: Hub[Any]) -> None:
        """Have all processes end; a trainer that works writes a checkpoint, whatever failed."""
        for worker in self._fleet.alive:
            try:
                if not worker.is_ready:
                    worker.handle.end(by_force=False)
                elif worker.is_trainer:
                    await hub.send(worker.name, to_trainer.Shutdown(checkpoint=True))
                else:
                    await hub.send(worker.name, to_generator.Shutdown())
            except Unreachable:
                worker.handle.end(by_force=False)
        try:
            await asyncio.to_thread(self._fleet.wait_for_end)
        except WaitTimeout as error:
            self._console.print(f"[yellow]{error}[/]")

    def _result(
        self,
        progress: Progress,
        before: Accuracy | None,
        after: Accuracy | None,
        *,
        seconds: float,
    ) -> dict[str, Any]:
        return {
            "run": self._config.run.name,
            "engine": self._config.engine.kind,
            "accuracy_before": None if before is None else before.value,
            "accuracy_after": None if after is None else after.value,
            "evaluation_samples": 0 if before is None else before.samples,
            **progress.result(),
            "total_seconds": seconds,
        }
