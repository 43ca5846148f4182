"""Weights of a node: those of its trainer for other nodes, those of other nodes for its engines.

Both halves are threads (`asyncrl.wire.weights.chain`). What they report is handed to the event
loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec

from asyncrl.monitoring.metrics.relay_metrics import RelayMetrics
from asyncrl.wire.errors import WeightsSupersededError, WireError
from asyncrl.wire.messages import from_relay, to_relay
from asyncrl.wire.transport.keys import HubKeys
from asyncrl.wire.weights.chain.node import Received, WeightNode
from asyncrl.wire.weights.chain.receiving import Timing
from asyncrl.wire.weights.chain.source import WeightSource

logger = logging.getLogger("asyncrl.relay")

_TIMING = Timing(limit_seconds=6 * 3600.0)
"""However long a version takes, as long as chunks of it come."""


class RelayWeights:
    """Serves, fetches and checks weights. Make it within the event loop.

    Args:
        name: of the relay.
        address: to bind for the weights of this node's trainer; port `*`: any that is free.
        node_address: to bind for those that this node has received; empty: as `address`.
        keys: of both sockets.
        directory: in memory.
        files_id: names this relay's files; unique on this machine.
        say: queues a message for the controller; called in the event loop.
        metrics: count versions that were fetched.
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
        try:
            self._node = WeightNode(
                name,
                node_address or address,
                keys,
                directory=directory,
                files_id=files_id,
                timing=_TIMING,
            )
        except BaseException:
            self._source.close()
            raise

    @property
    def source_address(self) -> str:
        """Where the weights of this node's trainer are served."""
        return self._source.address

    @property
    def node_address(self) -> str:
        """Where the weights that this node has received are served."""
        return self._node.address

    def check_threads(self) -> None:
        """Raise WireError if one of the threads has ended, which is a defect."""
        for one in (self._source, self._node):
            if not one.is_serving:
                raise WireError(f"a thread that serves weights at {one.address} has ended")

    @property
    def sent_bytes(self) -> int:
        """Of weights, so far."""
        return self._source.sent_bytes + self._node.sent_bytes

    def serve(self, order: to_relay.ServeWeights) -> None:
        """Let other nodes ask for what the trainer of this node has published."""
        served = self._source.publish(order.manifest)

        def report(done: Future[None]) -> None:
            error = done.exception()
            if error is not None:
                self._later(_failed(order.attempt, error))

        served.add_done_callback(report)

    def forget(self) -> None:
        """The trainer of this node is gone, and its files with it."""
        self._source.forget()

    def fetch(self, order: to_relay.FetchWeights) -> None:
        """Bring a version here, in place of another one that is on its way."""
        fetched = self._node.fetch(order.manifest, order.parents)

        def report(done: Future[Received]) -> None:
            error = done.exception()
            if error is not None:
                self._count("superseded" if _is_superseded(error) else "failed")
                self._later(_failed(order.attempt, error))
                return
            got = done.result()
            self._count("whole", got)
            logger.info(
                "version %d: %d bytes in %.3f s%s",
                got.manifest.policy_version,
                got.nbytes,
                got.seconds,
                "".join(f"; left {name}: {why}" for name, why in got.left.items()),
            )
            self._later(
                from_relay.WeightsHere(
                    order.attempt, got.manifest, got.seconds, got.nbytes, got.left
                )
            )

        fetched.add_done_callback(report)

    def _count(self, outcome: str, got: Received | None = None) -> None:
        if self._metrics is None:
            return
        self._metrics.weights_fetched.of(outcome).inc()
        if got is not None:
            self._metrics.weights_received.inc(got.nbytes)
            self._metrics.weights_time.observe(got.seconds)

    async def check(self, question: to_relay.CheckWeights) -> from_relay.WeightsChecked:
        """Whether a file of this node is there."""
        exists = await asyncio.to_thread(Path(question.path).exists)
        return from_relay.WeightsChecked(question.path, exists)

    def close(self) -> None:
        """Stop serving and remove this node's files."""
        try:
            self._node.close()
        finally:
            self._source.close()

    def _later(self, message: msgspec.Struct) -> None:
        """Say something, from another thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._say, message)


def _failed(attempt: int, error: BaseException) -> from_relay.WeightsFailed:
    what = str(error) if isinstance(error, WireError) else f"{type(error).__name__}: {error}"
    return from_relay.WeightsFailed(attempt, what, _is_superseded(error))


def _is_superseded(error: BaseException) -> bool:
    return isinstance(error, WeightsSupersededError)
