"""Builds a relay and serves the controller. Imports no torch: it is there within a second.

The relay process: one dispatcher and the parts that it starts.

control     consumes: frames of this node's processes and of the controller, and passes them on.
            (`control`)
commands    consumes: commands of the controller. produces: calls of the parts.
            waits for: the controller.
weights     consumes: orders to serve and to fetch. produces: files in memory, `WeightsHere`.
            (`weights`, in threads of its own)
files       consumes: orders to copy and to fetch. produces: copies, `FileHere`, `PullFinished`.
            (`files`)
report      consumes: counters. produces: `RelayReport`.
            waits for: the clock. bounded by: REPORT_SECONDS.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncrl.errors import first_error
from asyncrl.launch.child_spec import RelayKeys, RelaySpec, bind_to, reached_at
from asyncrl.launch.shared_memory import weights_id
from asyncrl.monitoring.errors import MonitoringError
from asyncrl.monitoring.metrics.instruments import new_registry
from asyncrl.monitoring.metrics.relay_metrics import RelayMetrics
from asyncrl.relay.control import ControlRelay, RelayLine
from asyncrl.relay.files import RelayFiles
from asyncrl.relay.weights import RelayWeights
from asyncrl.wire.errors import WireError
from asyncrl.wire.messages import from_relay, to_relay
from asyncrl.wire.transport.addresses import MeetingPlace

REPORT_SECONDS = 1.0


class RelayProcess:
    """Dispatches commands to the parts and reports. Use once: `await process.run()`.

    Args:
        passing: of the control messages of this node's processes, and its own.
        weights: of this node.
        files: of this node.
        metrics: follow the counters.
        metrics_port: where they are served; None: nowhere.
        reached_at: the address under which other nodes reach what is bound to this one.
    """

    def __init__(
        self,
        passing: ControlRelay,
        weights: RelayWeights,
        files: RelayFiles,
        metrics: RelayMetrics,
        metrics_port: int | None,
        reached_at: Callable[[str], str] = lambda address: address,
    ) -> None:
        self._metrics = metrics
        self._metrics_port = metrics_port
        self._reached_at = reached_at
        self._passing = passing
        self._control: RelayLine[to_relay.ToRelay] = passing.line
        self._weights = weights
        self._files = files

    async def run(self) -> None:
        """Serve until told to shut down.

        Raises:
            ExceptionGroup: with the error of a loop.
        """
        await self._control.send(
            from_relay.RelayReady(
                self._reached_at(self._weights.source_address),
                self._reached_at(self._weights.node_address),
                replace(self._files.ready, address=self._reached_at(self._files.ready.address)),
                self._metrics_port,
            )
        )
        async with asyncio.TaskGroup() as loops:
            running = [
                loops.create_task(self._passing.run()),
                loops.create_task(self._report()),
            ]
            await self._dispatch_commands()
            for task in running:
                task.cancel()
        await self._control.send(from_relay.Goodbye())

    async def _dispatch_commands(self) -> None:
        while True:
            match await self._control.receive():
                case to_relay.ServeWeights() as order:
                    self._weights.serve(order)
                case to_relay.ForgetWeights():
                    self._weights.forget()
                case to_relay.FetchWeights() as order:
                    self._weights.fetch(order)
                case to_relay.CheckWeights() as question:
                    await self._control.send(await self._weights.check(question))
                case to_relay.PullFiles() as order:
                    self._files.pull(order)
                case to_relay.FinishPull() as order:
                    self._files.finish(order)
                case to_relay.FetchFile() as order:
                    self._files.fetch(order)
                case to_relay.RemoveFiles():
                    self._files.remove()
                case to_relay.Shutdown():
                    return

    async def _report(self) -> None:
        while True:
            files = self._files
            self._weights.check_threads()
            files.check()
            self._measure()
            await self._control.send(
                from_relay.RelayReport(
                    self._weights.sent_bytes, files.sent_bytes, files.pulled_bytes
                )
            )
            await asyncio.sleep(REPORT_SECONDS)

    def _measure(self) -> None:
        metrics, files = self._metrics, self._files
        metrics.weights_sent.follow(self._weights.sent_bytes)
        metrics.files_sent.follow(files.sent_bytes)
        metrics.files_copied.follow(files.pulled_bytes)
        followed, failing = files.nodes
        metrics.nodes_followed.set(followed)
        metrics.nodes_failing.set(failing)


async def run_relay(spec: RelaySpec, keys: RelayKeys) -> None:
    """Start the parts of a relay, and serve until told to shut down."""
    registry = new_registry()
    metrics = RelayMetrics.register(registry, spec.name)
    with contextlib.ExitStack() as closing:
        closing.callback(MeetingPlace(spec.relay_address).close)
        passing = ControlRelay(
            spec.relay_address,
            keys.children.secret,
            spec.control_address,
            keys.control,
            to_relay.ToRelay,
            metrics,
        )
        closing.callback(passing.close)
        control = passing.line
        control.refusals.count = metrics.count_refused
        try:
            exporter = spec.exporter(spec.config().monitoring, registry)
            if exporter is not None:
                closing.callback(exporter.close)
            weights = RelayWeights(
                spec.name,
                bind_to(spec, 0),
                keys.weights,
                node_address=bind_to(spec, 1),
                directory=Path(spec.weights_directory),
                files_id=weights_id(spec.run_id, spec.name),
                say=control.send_soon,
                metrics=metrics,
            )
            closing.callback(weights.close)
            files = RelayFiles(
                Path(spec.run_directory),
                shares=spec.shares_run_directory,
                address=bind_to(spec, 2),
                keys=keys.files,
                say=control.send_soon,
            )
            closing.callback(files.close)
            port = None if exporter is None else exporter.port
            reached = partial(reached_at, spec)
            await RelayProcess(passing, weights, files, metrics, port, reached).run()
        except BaseExceptionGroup as group:
            error = first_error(group)
            await _report(control, error)
            raise error from group
        except Exception as error:
            await _report(control, error)
            raise


async def _report(control: RelayLine[Any], error: BaseException) -> None:
    """Say why this process ends; the traceback of an unexpected error is in its log."""
    if isinstance(error, MonitoringError | WireError):
        await control.send(from_relay.Failure(str(error), user_error=False))
