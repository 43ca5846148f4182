"""The two sockets to SGLang's scheduler process, and the task that takes what it sends.

receiving task   consumes: `ToClient` messages · produces: what `take` makes of them
waits for: the scheduler process · unblocked by: `close`
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from asyncrl.engine.errors import EngineError
from asyncrl.engine.sglang.client.environment import SglangFolder
from asyncrl.engine.sglang.messages import ToClient, ToWorker

logger = logging.getLogger(__name__)

AnySocket = TypeVar("AnySocket", bound=zmq.Socket[Any])


class Link:
    """Sends `ToWorker` messages and hands over `ToClient` messages in order.

    Args:
        folder: where the sockets are; only this user may enter it.
        take: gets each message.
        fail: is told why no more are received.
    """

    def __init__(
        self,
        folder: SglangFolder,
        take: Callable[[ToClient], None],
        fail: Callable[[EngineError], None],
    ) -> None:
        self._take = take
        self._fail = fail
        self._context = zmq.asyncio.Context()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(ToClient)
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context)
        self._push = self._bind(plain.socket(zmq.PUSH), folder.requests)
        self._pull = self._bind(self._context.socket(zmq.PULL), folder.outputs)
        self._task = asyncio.create_task(self._receive(), name="asyncrl-sglang-outputs")

    def _bind(self, socket: AnySocket, address: str) -> AnySocket:
        # Nothing is dropped or held up: requests are bounded by those who send them.
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.LINGER, 0)
        socket.bind(address)
        return socket

    def send(self, message: ToWorker) -> None:
        """Queue a message; it does not wait for the worker to take it.

        It does not give way to other tasks either: otherwise one could send the end of a request
        before the request.

        Raises:
            EngineError: the worker has not connected yet, or is gone.
        """
        try:
            self._push.send(self._encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise EngineError("SGLang's scheduler process is not connected") from error

    async def _receive(self) -> None:
        try:
            while True:
                frame = await self._pull.recv()
                self._take(self._decoder.decode(frame))
        except (msgspec.MsgspecError, ValueError) as error:
            self._fail(
                EngineError(
                    f"SGLang's process sent a message that cannot be read ({error}): is asyncrl "
                    "the same version in engine.sglang.python?"
                )
            )
        except EngineError as error:
            self._fail(error)
        except Exception as error:  # readers must not wait for a task that is gone
            logger.exception("a message of SGLang's process was not understood")
            self._fail(EngineError(f"a message of SGLang's process was not understood: {error!r}"))

    async def close(self) -> None:
        """Stop receiving and close both sockets."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._push.close()
        self._pull.close()
        self._context.term()
