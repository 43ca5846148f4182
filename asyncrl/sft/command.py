"""Implements `asyncrl sft`: checks, the run's folder, the other ranks, and what is printed."""

import asyncio
import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Self

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress as ProgressBar

from asyncrl.config.effects import OF_RL, without_effect
from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.cores import usable_cores
from asyncrl.engine.config import SamplingConfig
from asyncrl.errors import Interrupted, RunFailed, UserError
from asyncrl.launch.child_spec import MEETINGS, make_place, remove_meetings
from asyncrl.launch.records import ProcessRecords
from asyncrl.launch.start_order import child_environment, last_lines, open_log
from asyncrl.monitoring.records.metrics_log import (
    EvaluationsLog,
    MetricsLog,
    read_evaluations,
    read_metrics,
)
from asyncrl.runs.directory import Ending, RunDirectory, may_be_resumed, read_state, refuse_unfit
from asyncrl.runs.resuming import rewind
from asyncrl.runs.sinks import Sinks
from asyncrl.scheduler.config import DynamicSamplingConfig
from asyncrl.sft.training import Rank, SftTraining, Watcher, join_ranks, prepare_memory
from asyncrl.startup import startup_summary
from asyncrl.startup.gpu_defaults import with_date, with_recorded_date, with_recorded_dtype
from asyncrl.startup.lora_check import check_peft, with_adapter
from asyncrl.startup.memory import device_here, memory_of, refuse_too_large, shape_of
from asyncrl.startup.model_check import check_files, check_numbers, check_vocabulary, description_of
from asyncrl.startup.model_checks import check_positions
from asyncrl.tasks.examples import Examples, load_examples
from asyncrl.tasks.model import resolve_model
from asyncrl.tasks.model_files import parameters
from asyncrl.tasks.model_tokenizer import load_tokenizer
from asyncrl.tasks.sft_config import ALGORITHM
from asyncrl.tasks.templates.variables import names_the_date
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import CheckpointUnwritable, RankLost
from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.trainer.ranks.world import ALONE, World
from asyncrl.wire.records.evaluations import HELD_OUT, EvaluationRecord, SetEvaluation, When
from asyncrl.wire.records.step import LearnerMetrics, StepMetrics, TrainerTimes

_LOOK_SECONDS = 0.5
SUFFIX = "-sft"
"""Ending of the run's name: one file can describe both this run and the one that follows it."""


class SftResult(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a supervised run's result.json; losses are in nats per learned token."""

    run: str
    steps: int
    examples: int
    wall_seconds: float
    """Time of the steps, those before a resume included."""
    loss_before: float | None
    """Held-out loss of the initial model; None without held-out examples."""
    loss_after: float | None


def with_settings(config: RunConfig, steps: int) -> RunConfig:
    """Return the configuration that the learner, the run's folder and a resume see."""
    sft = config.sft
    neutral = TrainerConfig(algorithm=ALGORITHM, correction="none", advantage_normalization="none")
    unread = [key.removeprefix("trainer.") for key in OF_RL if key.startswith("trainer.")]
    trainer = {
        **{name: getattr(neutral, name) for name in unread},
        "learning_rate": sft.learning_rate,
        "learning_rate_schedule": sft.learning_rate_schedule,
        "warmup_steps": sft.warmup_steps,
    }
    updates = {
        "run": {"name": _named(config).run.name, "steps": steps, "epochs": None, "changes": {}},
        "trainer": trainer,
        "sampling": {**dict(SamplingConfig()), "max_tokens": config.sampling.max_tokens},
        "scheduler": {
            "group_size": 1,
            "groups_per_step": sft.batch_size,
            "dynamic_sampling": DynamicSamplingConfig(),
        },
    }
    changed = config.model_copy(
        update={key: getattr(config, key).model_copy(update=one) for key, one in updates.items()}
    )
    return parse_config(changed.model_dump(mode="json"), source="the supervised run of this file")


def _named(config: RunConfig) -> RunConfig:
    name = config.run.name.removesuffix(SUFFIX) + SUFFIX
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def train(
    config: RunConfig, console: Console, *, resume: bool, clean: bool, dry_run: bool, command: str
) -> None:
    """Train and print; `command` is what the user would give to continue.

    Raises UserError for the data, the model or the folder; the learner's errors.
    """
    began = time.monotonic()
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    check_peft(config)
    idle = [place for place, one in without_effect(config, "sft").items() if one.is_set]
    unread = dict.fromkeys(one[0] if one[0] in OF_RL else ".".join(one) for one in idle)
    if unread and not resume:
        say(f"{'not read':<10} {', '.join(unread)}: without effect in `asyncrl sft`")
    if config.trainer.ranks > config.sft.batch_size:
        raise UserError(
            f"sft.batch_size ({config.sft.batch_size}) leaves some of trainer.ranks "
            f"({config.trainer.ranks}) without an example; raise it, or lower the ranks"
        )
    config = _named(config)
    with contextlib.suppress(OSError):  # `create` says what cannot be read
        if not resume:
            refuse_unfit(config, resume=False, clean=clean)
        elif may_be_resumed(config):
            config = with_recorded_dtype(with_recorded_date(config))
    with ProgressBar(console=console, transient=True, disable=not console.is_terminal) as bar:
        model_path = resolve_model(config.model, bar)
    model = Path(model_path)
    loaded = check_files(model)
    check_numbers(model)
    config = with_adapter(config, model)
    say(startup_summary.model_line(config, model_path))
    described, tokenizer = description_of(model), load_tokenizer(model_path)
    most_tokens, dated = described.get("max_position_embeddings"), with_date(config)
    examples = load_examples(dated.task, config.sft, tokenizer, config.run.seed, most_tokens)
    check_vocabulary(model, tokenizer, examples.named())
    config = with_settings(
        dated if names_the_date(tokenizer) else config, config.sft.steps_of(len(examples.train))
    )
    if config.sft.warmup_steps >= config.run.steps:
        raise UserError(
            f"sft.warmup_steps: {config.sft.warmup_steps:,} covers all {config.run.steps:,} steps, "
            "so none reaches sft.learning_rate; lower it, or train for more epochs"
        )
    if resume:
        refuse_unfit(config, resume=True, clean=False)
        _refuse_changed(config, examples)
    say(_data_line(config, examples))
    rate, warmup = config.trainer.learning_rate, config.trainer.warmup_steps
    rates = f"{rate:g}{f' after {warmup:,} steps' if warmup else ''}"
    rates += f", {config.trainer.learning_rate_schedule}"
    say(f"{'training':<10} mean -log p of the learned tokens; learning rate {rates}")
    engine = {"max_model_len": examples.longest, "kind": "torch", "kinds": ()}
    sized = config.model_copy(update={"engine": config.engine.model_copy(update=engine)})
    check_positions(sized, model)
    shape, device = shape_of(sized, model, parameters(model), loaded.sizes), device_here(config)
    if shape is not None:
        refuse_too_large(sized, shape, device)
        say(startup_summary.memory_line(memory_of(sized, shape, on_gpu=device.on_gpu), device))
    say(f"{'results':<10} {config.directory}: result.json, metrics.jsonl, checkpoints/")
    gpus = _gpus(config)
    if dry_run:
        say("dry run: nothing was started and nothing was written to the run's folder")
        return
    directory = RunDirectory.create(config, resume=resume, clean=clean, say=say)
    directory.state.kind, directory.state.examples = "sft", examples.digest
    directory.folder = replace(directory.folder, verb="sft")
    start = _Start(config, examples, model_path, most_tokens, directory, gpus)
    try:
        with contextlib.closing(directory), directory.folder.required():
            watcher = _run(start, console)
    except UserError:
        directory.undo()
        raise
    _say_end(say, config, watcher, time.monotonic() - began, command)


def _refuse_changed(config: RunConfig, examples: Examples) -> None:
    state = read_state(config.directory)
    if state is not None and state.examples not in ("", examples.digest):
        raise UserError(
            f"cannot resume {config.directory}: the rows, the chat template or the tokenizer have "
            "changed, so its steps would train on other examples; start a new run from its newest "
            "model with --set model.path"
        )


@dataclass(frozen=True, slots=True)
class _Start:
    """The checked inputs of a run."""

    config: RunConfig
    examples: Examples
    model_path: str
    most_tokens: int | None
    directory: RunDirectory
    gpus: tuple[str, ...]
    """The variable's value that gives each rank its GPU; empty on a CPU."""


def _run(start: _Start, console: Console) -> "_Watcher":
    """Train, and record how the run ended."""
    directory = start.directory
    ended: Ending = "failed"
    directory.write_state()
    try:
        with _Watcher(directory, start.config, console, start.examples) as watcher:
            asyncio.run(_train_beside_sinks(start, watcher))
        ended = "done" if watcher.done == start.config.run.steps else "stopped"
    finally:
        if not directory.folder.is_gone():
            directory.state.ended = ended
            directory.write_state()
    directory.write_result(watcher.result())
    return watcher


async def _train_beside_sinks(start: _Start, watcher: "_Watcher") -> None:
    records = ProcessRecords(start.directory.path)
    sinks = Sinks(start.config, start.directory.path, records, watcher.say)
    try:
        await asyncio.to_thread(_train, start, watcher, records)
    finally:
        await sinks.close()


def _train(start: _Start, watcher: "_Watcher", records: ProcessRecords) -> None:
    """Train as the first rank, with the others as processes."""
    config, directory, ranks = start.config, start.directory, start.config.trainer.ranks
    point, run, logs = directory.resume_point, directory.path.resolve(), directory.path / "logs"
    resume_from = None if point.directory is None else point.step
    threads = config.trainer.threads or max(1, usable_cores() // ranks)
    prepare_memory(config)
    if start.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = start.gpus[0]
    with contextlib.ExitStack() as closing:
        world = ALONE
        if ranks > 1:
            closing.callback(remove_meetings, directory.path)
            meeting = make_place(run / MEETINGS / f"sft-{os.getpid()}")
            others: list[subprocess.Popen[bytes]] = []
            closing.callback(_end, others)
            for rank in range(1, ranks):
                spec = Rank(
                    run=str(run),
                    model_path=start.model_path,
                    most_tokens=start.most_tokens,
                    rank=rank,
                    meeting=str(meeting),
                    fence=directory.fence,
                    threads=threads,
                    parent=os.getpid(),
                    resume_from=resume_from,
                )
                gpu = {"CUDA_VISIBLE_DEVICES": start.gpus[rank]} if start.gpus else {}
                others.append(_start(spec, logs, gpu, records.mark))
                records.add(f"trainer-{rank}", others[-1].pid)
            world = _joined(config, meeting, others, logs)
            closing.callback(world.close)
        training = SftTraining(
            config,
            start.examples,
            start.model_path,
            world=world,
            threads=threads,
            fence=directory.fence,
            resume_from=resume_from,
        )
        try:
            training.train(watcher)
        except RankLost as error:
            raise RunFailed(f"{error}. The logs of the other ranks are in {logs}") from error
        except CheckpointUnwritable as error:
            raise RunFailed(
                f"{error}; once it can be written, --resume repeats the steps since the newest one"
            ) from error


def _joined(
    config: RunConfig, meeting: Path, others: Sequence[subprocess.Popen[bytes]], logs: Path
) -> World:
    """Meet the other ranks. Raises RunFailed, with its last words, if one ends before."""
    found: Future[World] = Future()

    def join() -> None:
        try:
            found.set_result(join_ranks(config, meeting, 0))
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            found.set_exception(error)

    threading.Thread(target=join, name="joining", daemon=True).start()
    while True:
        with contextlib.suppress(TimeoutError):
            return found.result(_LOOK_SECONDS)
        for rank, process in enumerate(others, start=1):
            if process.poll() is not None:
                log = logs / f"trainer-{rank}.log"
                raise RunFailed(
                    f"rank {rank} ended with exit code {process.returncode} before it joined; "
                    f"the end of {log}:\n{last_lines(log, 5)}"
                )


def _gpus(config: RunConfig) -> tuple[str, ...]:
    """Return the GPU of each rank, empty on a CPU. Raises UserError if there are too few."""
    if config.trainer.device == "cpu" or not torch.cuda.is_available():
        return ()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(one) for one in range(torch.cuda.device_count())]
    if config.launcher.gpus is not None:
        names = [str(one) for one in config.launcher.gpus]
    if len(names) < config.trainer.ranks:
        raise UserError(
            f"trainer.ranks: {config.trainer.ranks} need a GPU each, and there are {len(names)}"
        )
    return tuple(names)


def _start(spec: Rank, logs: Path, gpu: dict[str, str], mark: str) -> subprocess.Popen[bytes]:
    with open_log(logs / f"trainer-{spec.rank}.log") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "asyncrl.sft.training", msgspec.json.encode(spec)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is the first rank's, which tells the others
            env=os.environ | child_environment(spec.threads, mark) | gpu,
        )


def _end(processes: Sequence[subprocess.Popen[bytes]], seconds: float = 10.0) -> None:
    """Wait for ranks that are about to end; kill those that remain after `seconds`."""
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Watcher(Watcher):
    """Writes the records of the run, prints a line per step, and stops it at the first signal."""

    def __init__(
        self, directory: RunDirectory, config: RunConfig, console: Console, examples: Examples
    ) -> None:
        self._path, self._config = directory.path, config
        self._examples = len(examples.train)
        self._held_out = min(len(examples.held_out), config.evaluation.prompts)
        self.say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
        self._closing = contextlib.ExitStack()
        size = config.sft.batch_size
        for sentence in rewind(directory.path, directory.resume_point, groups_per_step=size):
            self.say(sentence)
        earlier = read_metrics(directory.path / "metrics.jsonl")
        self._wall = earlier[-1].wall_seconds if earlier else 0.0
        self.done = directory.resume_point.step
        self.losses = {
            one.step: one.main.loss
            for one in read_evaluations(directory.path / "evaluations.jsonl")
            if one.main is not None and one.main.loss is not None
        }
        self._signals = 0

    def __enter__(self) -> Self:
        self._metrics = MetricsLog(self._path / "metrics.jsonl")
        self._evaluations = EvaluationsLog(self._path / "evaluations.jsonl")
        self._closing.callback(self._metrics.close)
        self._closing.callback(self._evaluations.close)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._closing.callback(signal.signal, number, signal.signal(number, self._signalled))
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    @property
    def is_stopped(self) -> bool:
        """True after the first signal."""
        return self._signals > 0

    def has_loss(self, version: int) -> bool:
        """True if the version's held-out loss is known, from before a resume."""
        return version in self.losses

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._signals:
            return
        self._signals += 1
        if self._signals > 1:
            os._exit(Interrupted.exit_code)  # files are whole at any time; ranks and sinks see it
        self.say("ending after this step; a second signal ends at once, without a checkpoint")

    def finished(self, step: int, metrics: LearnerMetrics, seconds: float) -> None:
        """Record and print a step."""
        self._wall, self.done = self._wall + seconds, step + 1
        learning, tokens = metrics.learning, metrics.batch.tokens
        record = StepMetrics(
            step=step,
            time=time.time(),  # noqa: TID251 - for the record of the step
            wall_seconds=self._wall,
            step_seconds=seconds,
            tokens_per_second=None,
            engine_busy_seconds=None,
            times=TrainerTimes(train_seconds=seconds),
            learning=learning,
            batch=metrics.batch,
        )
        self._metrics.append(record)
        epoch = self.done * self._config.sft.batch_size / self._examples
        self.say(
            f"step {self.done}/{self._config.run.steps} | loss {learning.loss:.4f} | "
            f"grad norm {learning.grad_norm:.3g} | lr {learning.learning_rate:.3g} | "
            f"{tokens / max(seconds, 1e-9):,.0f} tok/s | epoch {epoch:.2f}"
        )

    def evaluated(self, version: int, loss: float) -> None:
        """Record and print a held-out loss."""
        if math.isnan(loss):
            return
        self.losses[version] = loss
        when: When = "before" if version == 0 else "during"
        when = "after" if version == self._config.run.steps else when
        count = self._held_out
        estimate = SetEvaluation(prompts=count, samples=count, accuracy=None, loss=loss)
        now = time.time()  # noqa: TID251 - for the record
        record = EvaluationRecord(step=version, time=now, when=when, sets={HELD_OUT: estimate})
        self._evaluations.append(record)
        self.say(f"held-out loss {loss:.4f} after {version} steps")

    def result(self) -> SftResult:
        """Return the contents of result.json."""
        return SftResult(
            run=self._config.run.name,
            steps=self.done,
            examples=self._examples,
            wall_seconds=self._wall,
            loss_before=self.losses.get(0),
            loss_after=self.losses.get(self.done),
        )


def _say_end(
    say: Callable[[str], None], config: RunConfig, watcher: _Watcher, seconds: float, command: str
) -> None:
    result = watcher.result()
    newest = path_of(config.directory / "checkpoints", result.steps)
    if result.steps < config.run.steps:
        say(f"stopped after {result.steps} steps; continue with: {command}")
        return
    losses = [one for one in (result.loss_before, result.loss_after) if one is not None]
    shown = " → ".join(f"{one:.4f}" for one in losses)
    about = f"; held-out loss {shown}" if losses else ""
    say(f"{result.steps} steps of {config.sft.batch_size} examples, {seconds:.0f} s{about}")
    say(f"model: {newest}; train it further with: --set model.path={shlex.quote(str(newest))}")


def _data_line(config: RunConfig, examples: Examples) -> str:
    source = config.task.path if config.task.kind == "dataset" else f"built-in {config.task.kind}"
    epochs = config.run.steps * config.sft.batch_size / len(examples.train)
    return (
        f"{'data':<10} {source}: {len(examples.train):,} examples to train on, "
        f"{len(examples.held_out):,} held out, the longest of {examples.longest:,} tokens; "
        f"{config.run.steps:,} steps of {config.sft.batch_size:,} examples: {epochs:.3g} epochs"
    )
