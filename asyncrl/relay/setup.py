"""Builds a relay and serves the controller. Imports no torch, so that it starts within a second.

control     consumes: frames of this node's processes and of the controller, and passes them on.
            (`control`)
commands    consumes: commands of the controller. produces: calls of the parts.
            waits for: the controller.
weights     consumes: orders to serve and to fetch. produces: files in memory, `WeightsHere`.
            (in threads of `asyncrl.wire.weights.chain`, which report through the event loop)
files       consumes: orders to copy and to fetch. produces: copies, `FileHere`, `PullFinished`.
            (`files`)
report      consumes: counters. produces: `RelayReport`.
            waits for: the clock. bounded by: REPORT_SECONDS.

A node has the weights of its trainer for other nodes, and those of other nodes for its engines.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from asyncrl.errors import first_error
from asyncrl.launch.child_spec import RelayKeys, RelaySpec, bind_to, reached_at
from asyncrl.launch.shared_memory import weights_id
from asyncrl.monitoring.errors import MonitoringError
from asyncrl.monitoring.metrics.instruments import new_registry
from asyncrl.monitoring.metrics.metrics import RelayMetrics
from asyncrl.relay.control import ControlRelay, RelayLine
from asyncrl.relay.files import RelayFiles
from asyncrl.wire.errors import WeightsSupersededError, WireError
from asyncrl.wire.messages import from_relay, to_relay
from asyncrl.wire.transport.addresses import MeetingPlace
from asyncrl.wire.transport.keys import HubKeys
from asyncrl.wire.weights.chain.node import Received, WeightNode
from asyncrl.wire.weights.chain.receiving import Timing
from asyncrl.wire.weights.chain.source import WeightSource

logger = logging.getLogger("asyncrl.relay")

_TIMING = Timing(limit_seconds=6 * 3600.0)
"""A version may take this long, as long as chunks of it come."""


class RelayWeights:
    """Serves, fetches and checks weights. Create it within the event loop.

    Binds `address` for the weights of this node's trainer (port `*` takes any free one), and
    `node_address`, by default the same, for received ones. `directory` is in memory; `files_id`
    names this relay's files on this machine; `say` queues a message in the event loop.
    """

    def __init__(
        self,
        name: str,
        address: str,
        keys: HubKeys,
        *,
        directory: Path,
        files_id: str,
        say: Callable[[msgspec.Struct], None],
        metrics: RelayMetrics | None = None,
        node_address: str = "",
    ) -> None:
        self._metrics = metrics
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._source = WeightSource(name, address, keys)
        self.source_address = self._source.address
        """Address that serves the weights of this node's trainer."""
        try:
            here = node_address or address
            self._node = WeightNode(
                name, here, keys, directory=directory, files_id=files_id, timing=_TIMING
            )
        except BaseException:
            self._source.close()
            raise
        self.node_address = self._node.address
        """Address that serves the weights that this node has received."""

    def check_threads(self) -> None:
        """Raise WireError if one of the threads has ended, which is a defect."""
        for one in (self._source, self._node):
            if not one.is_serving:
                raise WireError(f"a thread that serves weights at {one.address} has ended")

    @property
    def sent_bytes(self) -> int:
        """Bytes of weights sent so far."""
        return self._source.sent_bytes + self._node.sent_bytes

    def serve(self, order: to_relay.ServeWeights) -> None:
        """Serve other nodes what the trainer of this node has published."""

        def report(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                self._later(_failed(order.attempt, error))

        self._source.publish(order.manifest).add_done_callback(report)

    def forget(self) -> None:
        """Forget the files of this node's trainer, which is gone."""
        self._source.forget()

    def fetch(self, order: to_relay.FetchWeights) -> None:
        """Fetch a version, in place of another one that is on its way."""

        def report(done: Future[Received]) -> None:
            if (error := done.exception()) is not None:
                failure = _failed(order.attempt, error)
                self._count("superseded" if failure.superseded else "failed")
                self._later(failure)
                return
            got = done.result()
            self._count("whole", got)
            left = "".join(f"; left {name}: {why}" for name, why in got.left.items())
            version = got.manifest.policy_version
            logger.info("version %d: %d bytes in %.3f s%s", version, got.nbytes, got.seconds, left)
            here = (order.attempt, got.manifest, got.seconds, got.nbytes, got.left)
            self._later(from_relay.WeightsHere(*here))

        self._node.fetch(order.manifest, order.parents).add_done_callback(report)

    def _count(self, outcome: str, got: Received | None = None) -> None:
        if self._metrics is None:
            return
        self._metrics.weights_fetched.of(outcome).inc()
        if got is not None:
            self._metrics.weights_received.inc(got.nbytes)
            self._metrics.weights_time.observe(got.seconds)

    async def check(self, question: to_relay.CheckWeights) -> from_relay.WeightsChecked:
        """Report whether a file of this node exists."""
        exists = await asyncio.to_thread(Path(question.path).exists)
        return from_relay.WeightsChecked(question.path, exists)

    def close(self) -> None:
        """Stop serving and remove this node's files."""
        try:
            self._node.close()
        finally:
            self._source.close()

    def _later(self, message: msgspec.Struct) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._say, message)


def _failed(attempt: int, error: BaseException) -> from_relay.WeightsFailed:
    what = str(error) if isinstance(error, WireError) else f"{type(error).__name__}: {error}"
    return from_relay.WeightsFailed(attempt, what, isinstance(error, WeightsSupersededError))


REPORT_SECONDS = 1.0


@dataclass(eq=False)
class RelayProcess:
    """Dispatches commands and reports; `_reached_at` maps bound addresses to reachable ones."""

    _passing: ControlRelay
    _weights: RelayWeights
    _files: RelayFiles
    _metrics: RelayMetrics
    _metrics_port: int | None
    _reached_at: Callable[[str], str]

    async def run(self) -> None:
        """Serve until the shutdown command. Raises ExceptionGroup with the error of a loop."""
        reached, weights, files = self._reached_at, self._weights, self._files.ready
        addresses = reached(weights.source_address), reached(weights.node_address)
        files, control = replace(files, address=reached(files.address)), self._passing.line
        await control.send(from_relay.RelayReady(*addresses, files, self._metrics_port))
        async with asyncio.TaskGroup() as loops:
            running = [loops.create_task(loop) for loop in (self._passing.run(), self._report())]
            await self._dispatch_commands()
            for task in running:
                task.cancel()
        await control.send(from_relay.Goodbye())

    async def _dispatch_commands(self) -> None:
        control: RelayLine[to_relay.ToRelay] = self._passing.line
        while True:
            match await control.receive():
                case to_relay.ServeWeights() as order:
                    self._weights.serve(order)
                case to_relay.ForgetWeights():
                    self._weights.forget()
                case to_relay.FetchWeights() as order:
                    self._weights.fetch(order)
                case to_relay.CheckWeights() as question:
                    await control.send(await self._weights.check(question))
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
            self._weights.check_threads()
            self._files.check()
            sent, files = self._weights.sent_bytes, self._files.server.sent_bytes
            pulled = self._files.puller.pulled_bytes
            self._measure(sent, files, pulled)
            await self._passing.line.send(from_relay.RelayReport(sent, files, pulled))
            await asyncio.sleep(REPORT_SECONDS)

    def _measure(self, sent: int, files: int, pulled: int) -> None:
        metrics = self._metrics
        metrics.weights_sent.follow(sent)
        metrics.files_sent.follow(files)
        metrics.files_copied.follow(pulled)
        followed, failing = self._files.puller.nodes
        metrics.nodes_followed.set(followed)
        metrics.nodes_failing.set(failing)


async def run_relay(spec: RelaySpec, keys: RelayKeys) -> None:
    """Start the parts of a relay, and serve until the shutdown command."""
    registry = new_registry()
    metrics = RelayMetrics.register(registry, spec.name)
    with contextlib.ExitStack() as closing:
        closing.callback(MeetingPlace(spec.relay_address).close)
        ends = spec.relay_address, keys.children.secret, spec.control_address, keys.control
        passing = ControlRelay(*ends, to_relay.ToRelay, metrics)
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
            run, shares, address = spec.run_directory, spec.shares_run_directory, bind_to(spec, 2)
            files = RelayFiles(
                Path(run), shares=shares, address=address, keys=keys.files, say=control.send_soon
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
    if isinstance(error, MonitoringError | WireError):
        await control.send(from_relay.Failure(str(error), user_error=False))
