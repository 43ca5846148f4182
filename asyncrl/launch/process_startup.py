"""The start that generator and trainer processes share.

It connects to the controller, checks the model's tokenizer against that of the run's prompts,
serves metrics, records a time line, reports failures to the controller, and closes everything at
the end.
"""

import contextlib
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import UserError, WrongPolicyError, first_error
from asyncrl.launch.child_spec import ChildKeys, ModelSpec
from asyncrl.monitoring.metrics.exporter import Exporter
from asyncrl.monitoring.metrics.metrics import ProcessMetrics, new_registry
from asyncrl.monitoring.records.timeline import Timeline
from asyncrl.monitoring.tracing import open_tracer
from asyncrl.monitoring.tracing.tracer import Tracer
from asyncrl.tasks.model_tokenizer import load_tokenizer, tokenizer_digest
from asyncrl.wire import Line
from asyncrl.wire.records.wrong_policy import WrongPolicy, compare_tokenizers
from asyncrl.wire.sessions.line import SessionLine
from asyncrl.wire.transport.addresses import MeetingPlace


def check_given_gpus(spec: ModelSpec) -> None:
    """Compare the launcher's GPUs with torch's. Raises UserError if torch finds fewer."""
    found = torch.cuda.device_count() if spec.gpus and torch.cuda.is_available() else 0
    if found < spec.gpus:
        raise UserError(
            f"the launcher gave {spec.name} {spec.gpus} GPU(s), and torch {torch.__version__} "
            f"finds {found} on its node: install the driver and a torch for CUDA there, use an "
            "image that has them (launcher.ray.image), correct `ray start --num-gpus`, or "
            "set engine.device and trainer.device to cpu"
        )


SpecT = TypeVar("SpecT", bound=ModelSpec)
MetricsT = TypeVar("MetricsT", bound=ProcessMetrics)


@dataclass(frozen=True, slots=True)
class Child(Generic[SpecT, MetricsT]):
    """The common resources of a trainer or generator process."""

    spec: SpecT
    config: RunConfig
    control: Line[Any]
    metrics: MetricsT
    exporter: Exporter | None
    """Serves the metrics; None where they are turned off."""
    timeline: Timeline
    closing: contextlib.AsyncExitStack
    """Closed when the child ends, last entry first."""
    tracer: Tracer | None = None
    """None where `monitoring.tracing` is off."""

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.spec.run_directory)

    @property
    def metrics_port(self) -> int | None:
        """Port of the metrics; None where they are turned off."""
        return None if self.exporter is None else self.exporter.port


def timeline_file(spec: ModelSpec, config: RunConfig, folder: str) -> Path | None:
    """Return RUN/FOLDER/NAME.jsonl; None where `monitoring.timeline` is off."""
    if not config.monitoring.timeline:
        return None
    return Path(spec.run_directory) / folder / f"{spec.name}.jsonl"


@contextlib.contextmanager
def without_collecting_the_start() -> Iterator[None]:
    """Exempt all objects that exist now from garbage collection while the body runs.

    A full collection visits some 430,000 objects of libraries and models, 0.25 s in which no thread
    runs Python. `asyncrl.child` disables collection while they are made, which saves a sixth of the
    start; a program that has not, and runs this in a thread, keeps its settings.
    """
    if gc.isenabled():
        yield
        return
    gc.collect()
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.asynccontextmanager
async def bring_up(
    spec: SpecT,
    keys: ChildKeys,
    commands: Any,
    metrics_class: type[MetricsT],
    failure: Callable[[SpecT, BaseException], msgspec.Struct | None],
) -> AsyncIterator[Child[SpecT, MetricsT]]:
    """Bring up a child process; on exit report a failure and close everything.

    `commands` is the union of messages that the controller sends to this role. `failure` makes the
    message to the controller about an error, None for an unexpected one, whose traceback is in the
    process's log. Raises the body's error, the first of a group.
    """
    async with contextlib.AsyncExitStack() as closing:
        control: Line[Any]
        if spec.relayed:
            closing.callback(MeetingPlace(spec.relay_address).close)
            control = SessionLine(spec.relay_address, keys.control, commands)
        else:
            control = Line(spec.control_address, keys.control, commands)
        closing.callback(control.close)
        try:
            config = spec.config()
            registry = new_registry()
            metrics = metrics_class.register(registry, spec.name)
            control.refusals.count = metrics.count_refused
            if isinstance(control, SessionLine):
                metrics.watch_session(control.session)
            timeline = Timeline(
                timeline_file(spec, config, "timeline"), spec.name, observe=metrics.observe_span
            )
            closing.callback(timeline.close)
            exporter = spec.exporter(config.monitoring, registry)
            if exporter is not None:
                closing.callback(exporter.close)
            tracer, tracing = None, config.monitoring.tracing
            if tracing.enabled:
                names = {"key": spec.trace_key, "run": config.run.name, "process": spec.name}
                unix = timeline.unix
                tracer = open_tracer(tracing, closing, metrics=metrics, unix=unix, **names)
            yield Child(spec, config, control, metrics, exporter, timeline, closing, tracer)
        except BaseExceptionGroup as group:
            error = first_error(group)
            if (message := failure(spec, error)) is not None:
                await control.send(message)
            raise error from group
        except Exception as error:
            if (message := failure(spec, error)) is not None:
                await control.send(message)
            raise


async def load_checked_tokenizer(
    child: Child[Any, Any], report: Callable[[WrongPolicy], msgspec.Struct]
) -> Any:
    """Load the tokenizer and compare it with the prompts'. Raises ModelError, WrongPolicyError."""
    spec = child.spec
    tokenizer = load_tokenizer(spec.model_path)
    if spec.tokenizer is None:
        return tokenizer
    found = tokenizer_digest(tokenizer)
    wrong = compare_tokenizers(spec.name, expected=spec.tokenizer, found=found)
    if wrong is not None:
        await child.control.send(report(wrong))
        if child.config.run.on_wrong_policy == "stop":
            raise WrongPolicyError(wrong.text)
    return tokenizer
