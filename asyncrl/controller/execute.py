"""Executes a prepared run, from its folder to result.json and report.html.

execute    create the folder, run, write the report, even after a failure
_run       open what the run needs, start the controller, end the processes in order
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console

from asyncrl.config.run_config import RunConfig
from asyncrl.controller.controller import Controller
from asyncrl.controller.group_traces import open_group_traces
from asyncrl.controller.inbox import Message
from asyncrl.controller.progress import Progress
from asyncrl.controller.web_page import open_page
from asyncrl.errors import (
    AsyncrlError,
    Interrupted,
    RunFailed,
    UserError,
    WaitTimeout,
    WrongPolicyError,
)
from asyncrl.evaluation.round import Accuracy
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.health import Health, beat_of
from asyncrl.launch.child_spec import GeneratorSpec, RelaySpec, SpecsOfRun, TrainerSpec, is_relay
from asyncrl.launch.records import ProcessRecords
from asyncrl.launch.shared_memory import local_run_id, owned, remove_stale_files
from asyncrl.monitoring.errors import MonitoringError, ReportError
from asyncrl.monitoring.metrics.discovery import Targets, targets_file
from asyncrl.monitoring.metrics.exporter import exporter_for, is_taken
from asyncrl.monitoring.metrics.metrics import ControllerMetrics, new_registry
from asyncrl.monitoring.records.metrics_log import MetricsLog, read_metrics
from asyncrl.monitoring.report.write import write_report
from asyncrl.monitoring.terminal.live import LiveView
from asyncrl.reward_server.keeping import open_reward_servers
from asyncrl.runs.directory import Ending, RunDirectory, read_state
from asyncrl.runs.folder_lock import UnlockableError
from asyncrl.runs.input_files import (
    TRAINING_ROWS,
    RunInputs,
    changes_since,
    inputs_of,
    refuse_changed_rows,
)
from asyncrl.runs.resuming import rewind
from asyncrl.runs.runtime_folders import Surroundings
from asyncrl.runs.sinks import Sinks
from asyncrl.startup.gpu_defaults import visits_of, with_drafts_that_pay
from asyncrl.startup.launching import Launching, open_launcher
from asyncrl.startup.machine_checks import refuse_taken_ports
from asyncrl.startup.prepare import Prepared
from asyncrl.steering.control_socket import control_key_file, serve_control, user_hub
from asyncrl.steering.interrupts import Interrupts
from asyncrl.suggestions import shortened
from asyncrl.tasks.model_tokenizer import tokenizer_digest
from asyncrl.wire import Hub, RunKey, RuntimeDirectory
from asyncrl.wire.errors import AddressTooLong
from asyncrl.wire.messages import control
from asyncrl.wire.records.step import RunResult
from asyncrl.wire.records.wrong_policy import TokenizerDigest, compare_tokenizers
from asyncrl.wire.transport.refusals import Refusals

TARGETS_SECONDS = 0.5


def execute(
    prepared: Prepared,
    *,
    resume: bool,
    clean: bool,
    console: Console,
    resume_from: int | None = None,
    accept_changes: bool = False,
    run_key: RunKey | None = None,
    health: Health | None = None,
) -> RunResult:
    """Run to the end and return the contents of result.json.

    `resume` continues the run of this name, `resume_from` from the checkpoint after this many steps
    (by default the newest intact one), `accept_changes` although the rows of the data have changed;
    `clean` deletes it first. `run_key` is for a caller that connects to the run's sockets.
    `health` reports whether the controller's loop is alive and the run has begun.

    Raises UserError for a run name in use or a user's mistake; AsyncrlError if the run failed.
    """
    config, registry = prepared.config, new_registry()
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    inputs = inputs_of(config, prepared.task)
    rows, code = _changes(config, inputs, say) if resume else ([], [])
    if not accept_changes:
        refuse_changed_rows(config.directory, rows)
    with contextlib.ExitStack() as closing:
        exporter = exporter_for(config.monitoring, registry, 0)
        if exporter is not None:
            closing.callback(exporter.close)
        try:
            directory = RunDirectory.create(
                config, resume=resume, clean=clean, resume_from=resume_from, say=say
            )
        except UnlockableError as error:
            raise UserError(f"run.directory: {error}") from error
        except OSError as error:
            raise UserError(
                f"run.directory: the run's folder {shortened(str(config.directory))} cannot be "
                f"written: {error.strerror}"
            ) from error
        closing.callback(directory.close)
        directory.begin_with(inputs, comparable=not code and set(rows) <= {TRAINING_ROWS})
        metrics = ControllerMetrics.register(registry, process="controller")
        metrics.watch_disk(directory.path)
        targets: Targets | None = None
        if exporter is not None:
            path, host = targets_file(directory.path), config.monitoring.host
            targets = Targets(path, config.run.name, host=host, port=exporter.port)
        wants_report = True
        try:
            refuse_taken_ports(config)
            with directory.folder.required():
                key = run_key or RunKey.new()
                run = _run(prepared, directory, targets, console, metrics, key, health)
                return asyncio.run(run)
        except UserError:
            if (kept := directory.undo()) is not None:
                say(f"logs of this start: {kept / 'logs'}")
            raise
        except Interrupted:
            wants_report = False  # it can take seconds
            raise
        finally:
            # Also for a run that failed: the report shows how far it came.
            if wants_report and not directory.folder.is_gone():
                _write_report(directory, say)


def _changes(
    config: RunConfig, inputs: RunInputs, say: Callable[[str], None]
) -> tuple[list[str], list[str]]:
    """Name and return rows, functions and sampling that changed since the last start."""
    state = read_state(config.directory)
    rows, code = changes_since(None if state is None else state.inputs, inputs)
    for what in (*rows, *code):
        say(f"changed since the run was started last: {what}")
    if code or set(rows) - {TRAINING_ROWS}:
        say(
            "so accuracies from now on do not compare with earlier ones, and the accuracy before "
            "training is left out"
        )
    return rows, code


def _write_report(directory: RunDirectory, say: Callable[[str], None]) -> None:
    try:
        write_report(directory.path)
    except ReportError:
        return  # the folder was removed, or holds nothing yet
    except (MonitoringError, OSError) as error:
        say(f"no report: {error}")


async def _run(
    prepared: Prepared,
    directory: RunDirectory,
    targets: Targets | None,
    console: Console,
    metrics: ControllerMetrics,
    run_key: RunKey,
    health: Health | None,
) -> RunResult:
    began, state, run = time.monotonic(), directory.state, directory.path
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    async with contextlib.AsyncExitStack() as closing:
        # The folder of sockets and the files in memory; then the launcher, which knows the devices.
        try:
            runtime = RuntimeDirectory()
        except AddressTooLong as error:
            raise UserError(str(error)) from error
        closing.enter_context(owned(local_run_id(prepared.config.run.name, os.getpid())))
        closing.callback(_clean_up, runtime, targets)
        records = ProcessRecords(run)
        directory.write_state()  # it is starting
        launching = await open_launcher(prepared, run, records, runtime, closing, say)
        prepared = _with_drafts(prepared, directory, launching, say)
        config = prepared.config

        # What the user sees, and the processes.
        control_key = RunKey.new()
        control_key.write(control_key_file(run))
        state.control_address = runtime.address("user")
        directory.write_state()
        progress = closing.enter_context(_open_progress(config, directory, console, metrics))
        await open_reward_servers(config.rewards, run, progress.say, closing)
        key, refusals = run_key.hub("control"), Refusals(metrics.count_refused)
        address = launching.control_address
        hub: Hub[Message] = Hub(address, key, Message, refusals, is_relay=is_relay)
        closing.callback(hub.close)
        metrics.watch_session(hub.sessions)
        tokenizer = _tokenizer(prepared, directory, progress)
        specs = _specs(prepared, directory, launching, hub.address, tokenizer)
        page = open_page(config, directory, records, progress.say, closing)
        sinks = Sinks(config, run, records, progress.say)
        closing.push_async_callback(sinks.close)
        fleet = Fleet(config.launcher, launching.launcher, specs, hub, run_key)
        if config.launcher.kind == "local":
            fleet.is_taken = partial(is_taken, config.monitoring)
        hub.refusals.on_cut_off = fleet.cut_off

        # The controller, and what runs beside it.
        user_socket = user_hub(state.control_address, control_key, Refusals(metrics.count_refused))
        controller = Controller(
            config,
            prepared.task,
            directory=directory,
            fleet=fleet,
            hub=hub,
            progress=progress,
            traces=open_group_traces(config, state.trace_key, metrics, closing),
            agents=launching.agents,
            shares_processors=launching.shares_processors,
        )
        launching.on_lost(partial(_tell, asyncio.get_running_loop(), controller, progress))
        user = asyncio.create_task(_serve_user(user_socket, controller))
        surroundings = Surroundings(directory.folder, runtime, [hub, user_socket], progress.say)
        beside = [
            asyncio.create_task(_list_processes(fleet, targets)),
            asyncio.create_task(surroundings.look_after(controller)),
        ]
        closing.callback(beat_of(health, lambda: controller.has_begun))
        kill, clean_up = partial(_kill, fleet, records), partial(_clean_up, runtime, targets)
        closing.enter_context(Interrupts(controller, kill, clean_up, progress.say).handled())

        # The run, then its end: the processes, what reads their files, and the user's socket last.
        ended: Ending = "failed"
        wrong: WrongPolicyError | None = None
        accuracies: tuple[Accuracy | None, Accuracy | None] = None, None
        try:
            accuracies = await controller.run()
            ended = "done" if controller.is_complete else "stopped"
        except WrongPolicyError as error:
            wrong = error  # a clean end: checkpoint, result.json and report as of any run
            accuracies = controller.accuracy_before, None
            progress.training_ends()
        except Interrupted:
            ended = "stopped"
            raise
        finally:
            for task in beside:
                task.cancel()
            try:
                await fleet.shut_down()
            except WaitTimeout as error:
                say(str(error), style="yellow")
            await sinks.close()
            await page.close()
            user.cancel()  # orders up to here are answered, with a refusal
            _end_escaped(records, say)
            unsaved = await controller.unsaved()
            _clean_up(runtime, targets)
            state.ended = "failed" if unsaved and ended == "done" else ended
            if not directory.folder.is_gone():
                directory.write_state()
    result = progress.result(*accuracies, total_seconds=time.monotonic() - began)
    directory.folder.refuse_gone()
    _write_result(directory, result, unsaved)
    if surroundings.error is not None and ended == "stopped":
        raise surroundings.error
    if wrong is not None:
        raise wrong
    return result


def _with_drafts(
    prepared: Prepared, directory: RunDirectory, launching: Launching, say: Callable[[str], None]
) -> Prepared:
    """Resolve `cache.max_draft_tokens: auto` where only the launcher knows the devices."""
    on_gpu = launching.engine_device == "cuda"
    visits = visits_of(prepared.config, len(prepared.task.train))
    config, line = with_drafts_that_pay(prepared.config, on_gpu=on_gpu, visits=visits)
    if config is prepared.config:
        return prepared
    directory.write_config(config)
    launching.use(config)
    if line:
        say(line)
    return replace(prepared, config=config)


def _tell(
    loop: asyncio.AbstractEventLoop, controller: Controller, progress: Progress, error: AsyncrlError
) -> None:
    """End the run with this error, from another thread. Print it first, as ending takes time."""

    def end() -> None:
        progress.say(f"the run ends: {error}")
        controller.fail(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended
        loop.call_soon_threadsafe(end)


def _kill(fleet: Fleet, records: ProcessRecords) -> None:
    fleet.kill_all()
    records.kill_all()


def _clean_up(runtime: RuntimeDirectory, targets: Targets | None) -> None:
    runtime.close()
    if targets is not None:
        targets.remove()
    remove_stale_files()


def _write_result(directory: RunDirectory, result: RunResult, unsaved: str | None) -> None:
    """Write result.json, then raise RunFailed if it or the run's last state is not on the disk."""
    lost = [] if unsaved is None else [unsaved]
    try:
        directory.write_result(result)
    except OSError as error:
        lost.insert(0, f"{directory.path / 'result.json'} cannot be written: {error.strerror}")
    if lost:
        raise RunFailed("; ".join(lost))


def _end_escaped(records: ProcessRecords, say: Callable[..., None]) -> None:
    try:
        left = records.end_all()
    except AsyncrlError as error:
        say(str(error), style="yellow")
        return
    if left:
        listed = ", ".join(str(process.pid) for process in left)
        say(f"killed processes that the run's processes had started and left behind: {listed}")


@contextlib.contextmanager
def _open_progress(
    config: RunConfig, directory: RunDirectory, console: Console, metrics: ControllerMetrics
) -> Iterator[Progress]:
    """Open the run's progress, with the steps before its resume point."""
    per_step, most = config.scheduler.groups_per_step, config.scheduler.max_groups_of_step
    point = directory.resume_point
    for sentence in rewind(directory.path, point, groups_per_step=per_step, max_groups=most):
        console.print(sentence, highlight=False, soft_wrap=True, markup=False)
    path = directory.path / "metrics.jsonl"
    earlier = read_metrics(path)
    with contextlib.ExitStack() as closing:
        log = MetricsLog(path)
        closing.callback(log.close)
        view = LiveView(config.monitoring, config.run.steps, config.run.name, console)
        closing.callback(view.close)
        yield Progress(config, view=view, log=log, metrics=metrics, earlier=earlier)


def _tokenizer(prepared: Prepared, directory: RunDirectory, progress: Progress) -> TokenizerDigest:
    """Return the run's tokenizer. Raises UserError if it changed, unless that only warns."""
    found, state = tokenizer_digest(prepared.task.tokenizer), directory.state
    if state.tokenizer is None:
        state.tokenizer = found
        directory.write_state()
    wrong = compare_tokenizers(prepared.model_path, expected=state.tokenizer, found=found)
    if wrong is not None:
        if prepared.config.run.on_wrong_policy == "stop":
            raise UserError(
                f"cannot resume {directory.path}: {wrong.text} when it began. Restore the "
                "tokenizer's files, or start a new run under another name "
                "(run.on_wrong_policy: warn resumes all the same)"
            )
        progress.found(wrong)
    return found


def _specs(
    prepared: Prepared,
    directory: RunDirectory,
    launching: Launching,
    control_address: str,
    tokenizer: TokenizerDigest,
) -> SpecsOfRun:
    point = directory.resume_point
    of_all: dict[str, Any] = {
        "run_directory": str(directory.path.resolve()),
        "control_address": control_address,
        "parent": os.getpid(),
        "threads": 1,
        "run_id": local_run_id(prepared.config.run.name, os.getpid()),
    }
    of_models = of_all | {
        "model_path": launching.model_path,
        "data_address": launching.data_address,
        "ranks": prepared.config.trainer.ranks,
        "tokenizer": tokenizer,
        "trace_key": directory.state.trace_key,
    }
    trainer = TrainerSpec(
        name="trainer",
        resume_from=None if point.directory is None else point.step,
        engine_device=launching.engine_device,
        fence=directory.fence,
        **of_models,
    )
    generator = GeneratorSpec(name="generator", stop_tokens=prepared.task.stop_tokens, **of_models)
    relay = RelaySpec(name="relay", **of_all)
    return SpecsOfRun(trainer, generator, relay)


async def _list_processes(fleet: Fleet, targets: Targets | None) -> None:
    while targets is not None:
        targets.update(fleet.metrics_targets())
        await asyncio.sleep(TARGETS_SECONDS)


async def _serve_user(hub: Hub[control.Request], controller: Controller) -> None:
    try:
        await serve_control(hub, controller.answer, controller.view)
    finally:
        hub.close()
