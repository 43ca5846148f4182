"""A relay's hub: control messages of the children of its node, gathered on their way.

    children ◄── ipc ──► relay ◄── one TCP connection, bundles ──► controller

up      consumes: frames of children. produces: bundles. (`asyncrl.wire.sessions.peers`)
        waits for: children. bounded by: GATHER_SECONDS, or at once if urgent.
down    consumes: bundles of the controller. produces: frames for children, and the relay's own
        messages. waits for: the controller.

It keeps nothing: sessions between the children and the controller (`asyncrl.wire.sessions`) resend
frames that a relay or a connection has lost. So a frame that cannot be passed on is dropped,
counted and logged. The controller, not the relay, checks passes and decodes messages of children.
The relay itself also has a session (`line`), as one of its children.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from asyncrl.monitoring.metrics.metrics import RelayMetrics
from asyncrl.wire.errors import KeyUnusable
from asyncrl.wire.sessions.line import SessionEnd
from asyncrl.wire.sessions.peers import EXTRA_BYTES, Gatherer, bundles_of, entries_of
from asyncrl.wire.sessions.session import is_urgent
from asyncrl.wire.sockets import HUB_BYTES, LINE_BYTES, error_of, identify
from asyncrl.wire.transport.decoding import FrameRefused
from asyncrl.wire.transport.keys import LineKeys
from asyncrl.wire.transport.outbox import join, split
from asyncrl.wire.transport.refusals import Refusals

In = TypeVar("In")

logger = logging.getLogger("asyncrl.relay")

QUEUED = 256
"""Bundles that wait for the controller's connection, and frames for each child. More are dropped:
they are resent when there is room."""
_HEARTBEAT_SECONDS = 1.0
_DEAD_SECONDS = 4.0
"""A TCP connection whose other end is silent for this long is replaced."""
_LOG_SECONDS = 5.0
_TURN = 64


class RelayLine(Generic[In]):
    """Messages of the relay's own process to the controller and back; used like a `wire.Line`."""

    def __init__(self, relay: "ControlRelay", keys: LineKeys, incoming: Any) -> None:
        transmit = partial(relay.gather, keys.identity)
        self.session = SessionEnd[In](incoming, max_bytes=LINE_BYTES, transmit=transmit)
        self._ready: deque[In] = deque()
        self._arrived = asyncio.Event()
        self.refusals = Refusals()

    def send_soon(self, message: msgspec.Struct, *, urgent: bool | None = None) -> None:
        """Queue a message for the controller. Raises Unreachable as `wire.Line.send_soon`."""
        self.session.send_soon(message, urgent=urgent)

    async def send(self, message: msgspec.Struct) -> None:
        """Send a message to the controller. Raises Unreachable as `wire.Line.send`."""
        self.session.send(message)

    async def receive(self) -> In:
        """Wait for the next message."""
        while not self._ready:
            self._arrived.clear()
            await self._arrived.wait()
        return self._ready.popleft()

    def arrived(self, frame: bytes) -> None:
        """Take a frame of the controller."""
        try:
            self._ready.extend(self.session.arrived(frame))
        except FrameRefused as error:
            self.refusals.refuse("the controller", error)
        if self._ready:
            self._arrived.set()

    def close(self) -> None:
        """Send queued messages."""
        self.session.close()


class ControlRelay:
    """Passes frames on. Use: create it, `await run()` with the relay's other loops, `close()`.

    The node's children connect to `address`, whose CURVE key is `secret` (`HubKeys.secret` of the
    relays' hub). `incoming` is the union of the controller's messages to the relay itself. Raises
    KeyUnusable if there is no key; then nothing listens.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        controller: str,
        keys: LineKeys,
        incoming: Any,
        metrics: RelayMetrics | None = None,
    ) -> None:
        if not secret:
            raise KeyUnusable(f"nothing listens at {address} without a CURVE key")
        context = zmq.asyncio.Context.instance()
        self._gatherer = Gatherer()
        self._timer: asyncio.TimerHandle | None = None
        self._controller = context.socket(zmq.DEALER)
        identify(self._controller, keys)
        self._controller.setsockopt(zmq.LINGER, 1000)
        self._controller.setsockopt(zmq.MAXMSGSIZE, LINE_BYTES)
        self._controller.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * _HEARTBEAT_SECONDS))
        self._controller.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * _DEAD_SECONDS))
        self._controller.set_hwm(QUEUED)
        self._controller.connect(controller)
        self._children = context.socket(zmq.ROUTER)
        self._children.setsockopt(zmq.LINGER, 0)
        self._children.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._children.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._children.setsockopt(zmq.MAXMSGSIZE, HUB_BYTES)
        self._children.set_hwm(QUEUED)
        self._children.curve_server = True
        self._children.curve_secretkey = secret
        self._children.bind(address)
        self._lines: dict[bytes, RelayLine[Any]] = {}
        self.line: RelayLine[Any] = self.line_of(keys, incoming)
        self._metrics = metrics
        if metrics is not None:
            metrics.watch_session(self.line.session)
            metrics.waiting.set_function(lambda: self._gatherer.waiting)
        self.dropped = 0
        self._logged = float("-inf")

    def line_of(self, keys: LineKeys, incoming: Any) -> RelayLine[Any]:
        """Create a line for another part of this process, with a separate session."""
        line = self._lines[keys.identity] = RelayLine(self, keys, incoming)
        return line

    async def run(self) -> None:
        """Pass frames on until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._up())
            loops.create_task(self._down())

    async def _up(self) -> None:
        passed = 0
        while True:
            identity, *parts = await self._children.recv_multipart()
            with contextlib.suppress(FrameRefused):  # its sender's session will resend it
                self.gather(identity, join(parts, max_bytes=HUB_BYTES + EXTRA_BYTES))
            passed += 1
            if passed % _TURN == 0:
                await asyncio.sleep(0)

    def gather(self, identity: bytes, frame: bytes) -> None:
        """Queue a frame for the controller, to leave when it is due."""
        loop = asyncio.get_running_loop()
        self._gatherer.add(identity, frame, loop.time(), urgent=is_urgent(frame))
        due = self._gatherer.due
        if due is None or (self._timer is not None and self._timer.when() <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(due, self._leave)

    def _leave(self) -> None:
        self._timer = None
        leaving = self._gatherer.leave(asyncio.get_running_loop().time())
        bundles = list(bundles_of(leaving))
        self._count("up", len(leaving), bundles=len(bundles))
        for bundle in bundles:
            sending = self._controller.send_multipart(split(bundle), flags=zmq.NOBLOCK)
            self._note(error_of(sending), "the controller")

    async def _down(self) -> None:
        passed = 0
        while True:
            parts = await self._controller.recv_multipart()
            try:
                entries = entries_of(join(parts, max_bytes=LINE_BYTES + EXTRA_BYTES))
            except FrameRefused as error:
                self.line.refusals.refuse("the controller", error)
                continue
            self._count("down", len(entries), bundles=1)
            for identity, frame in entries:
                here = self._lines.get(identity)
                if here is not None:
                    here.arrived(frame)
                    continue
                sending = self._children.send_multipart([identity, *split(frame)], zmq.NOBLOCK)
                self._note(error_of(sending), "a child")
            passed += len(entries)
            if passed >= _TURN:
                passed = 0
                await asyncio.sleep(0)

    def _count(self, direction: str, frames: int, *, bundles: int) -> None:
        if self._metrics is not None:
            self._metrics.frames.of(direction).inc(frames)
            self._metrics.bundles.of(direction).inc(bundles)

    def _note(self, error: BaseException | None, receiver: str) -> None:
        if error is None:
            return
        self.dropped += 1
        if self._metrics is not None:
            self._metrics.dropped.inc()
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            logger.warning(
                "%d frames could not be passed on until now, the last one to %s: %s; sessions send "
                "them again", self.dropped, receiver, error,
            )  # fmt: skip

    def close(self) -> None:
        """Close the sockets; messages to the controller are still sent for at most a second."""
        for line in self._lines.values():
            line.close()
        if self._timer is not None:
            self._timer.cancel()
        for bundle in bundles_of(self._gatherer.leave(float("inf"))):
            error_of(self._controller.send_multipart(split(bundle), flags=zmq.NOBLOCK))
        self._children.close()
        self._controller.close()
