"""The sockets to the generator's process. Imports no SGLang."""

from __future__ import annotations

import msgspec
import zmq

from asyncrl.engine.sglang.messages import ToClient, ToWorker


class Link:
    """Receives requests and sends outputs.

    Args:
        requests: address that requests come from.
        outputs: address that outputs go to.
    """

    def __init__(self, requests: str, outputs: str) -> None:
        context = zmq.Context()
        self.requests: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._outputs: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        for socket in (self.requests, self._outputs):
            socket.set_hwm(0)  # a step never waits for the client
            socket.linger = 0
        self.requests.connect(requests)
        self._outputs.connect(outputs)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)

    def receive(self) -> list[ToWorker]:
        """All messages that have come, in order. Does not wait."""
        messages: list[ToWorker] = []
        while True:
            try:
                frame = self.requests.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decoder.decode(frame))

    def send(self, message: ToClient) -> None:
        """Send a message; does not wait."""
        self._outputs.send(self._encoder.encode(message))
