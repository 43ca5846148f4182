"""Serves a reward model on a socket until SIGTERM or SIGINT.

The HTTP side: who may ask, how much, and what is answered. An ASGI application.

    POST /score   {"prompt": "...", "response": "..."} ──► {"score": 1.5}
    GET /health   ──► {"serves": "asyncrl reward model", "model": "...", "waiting": 0, ...}

400: no such JSON. 401: wrong token. 408: the body is too slow. 413: it is too long. 422: the text
has too many tokens. 429 with Retry-After: too many texts wait. 500: the model failed. 503: the
server ends.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from asyncrl.errors import RenderingError
from asyncrl.reward_server.batching import Batcher, BatchSettings, QueueFullError
from asyncrl.reward_server.classifier import Classifier, ClassifierSettings, TooLongError

BODY_SECONDS = 10.0
"""Longest time for a body to arrive."""
SERVES = "asyncrl reward model"


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """What is to be scored."""

    prompt: str
    response: str


class _Answer(Exception):  # noqa: N818 - any answer but a score
    def __init__(self, status: int, detail: str, retry_after: float | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.retry_after = status, detail, retry_after


class App:
    """Answers requests.

    Args:
        classifier: makes tokens of texts.
        batcher: makes scores of tokens.
        token: that requests need; None: none.
        max_body_bytes: of a request.
    """

    def __init__(
        self, classifier: Classifier, batcher: Batcher, token: str | None, max_body_bytes: int
    ) -> None:
        self._classifier, self._batcher = classifier, batcher
        self._token, self._max_body_bytes = token, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        try:
            answer = await self._answer(scope, receive)
        except _Answer as other:
            await _send(send, other.status, {"detail": other.detail}, other.retry_after)
        else:
            if answer is not None:
                await _send(send, 200, answer)

    async def _answer(self, scope: Scope, receive: Receive) -> dict[str, Any] | None:
        """The answer; None: the caller is gone. Raises _Answer."""
        headers = dict(scope["headers"])
        method, path = scope["method"], scope["path"]
        if (method, path) == ("GET", "/health"):
            return self._health()
        if path != "/score":
            raise _Answer(404, "there are POST /score and GET /health")
        if method != "POST":
            raise _Answer(405, "scores are asked for with POST")
        self._check_token(headers)
        question = await self._question(headers, receive)
        loop = asyncio.get_running_loop()
        try:
            tokens = await loop.run_in_executor(
                None, self._classifier.encode, question.prompt, question.response
            )
        except (RenderingError, TooLongError) as error:
            raise _Answer(422, str(error)) from None
        return await self._score(tokens, receive)

    def _health(self) -> dict[str, Any]:
        batcher = self._batcher
        return {
            "serves": SERVES,
            "model": self._classifier.settings.model,
            "waiting": batcher.waiting,
            "texts": batcher.texts,
            "batches": batcher.batches,
        }

    def _check_token(self, headers: dict[bytes, bytes]) -> None:
        if self._token is None:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        same = hmac.compare_digest(given.strip(), self._token.encode())
        if scheme.lower() != b"bearer" or not same:
            raise _Answer(401, "the token is missing or wrong")

    async def _question(self, headers: dict[bytes, bytes], receive: Receive) -> Question:
        length = headers.get(b"content-length", b"")
        most = self._max_body_bytes
        if not length.isdigit() or len(length) > 12:
            raise _Answer(411, "the request does not say how long its body is (Content-Length)")
        if int(length) > most:
            raise _Answer(413, f"the body is longer than {most} bytes (--max-body-kib)")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(receive, most)
        except TimeoutError:
            raise _Answer(408, f"the body did not arrive within {BODY_SECONDS:.0f} s") from None
        try:
            return msgspec.json.decode(body, type=Question)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _Answer(
                400, f'the body must be {{"prompt": text, "response": text}}: {error}'
            ) from None

    async def _score(self, tokens: list[int], receive: Receive) -> dict[str, Any] | None:
        """The score, unless the caller goes away before."""
        scoring = asyncio.ensure_future(self._batcher.submit(tokens))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait([scoring, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not scoring.done():
                return None
            score = scoring.result()
        except QueueFullError as full:
            raise _Answer(429, "too many texts wait", full.seconds) from None
        except asyncio.CancelledError:
            if scoring.cancelled():
                raise _Answer(503, "the server ends", 1.0) from None
            raise
        except Exception as error:  # noqa: BLE001 - logged by the batcher
            raise _Answer(500, f"the model failed: {type(error).__name__}: {error}") from None
        finally:
            scoring.cancel()
            leaving.cancel()
        if not math.isfinite(score):
            raise _Answer(422, f"the model's score is {score}")
        return {"score": score}


async def _body(receive: Receive, most: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise _Answer(400, "the body did not arrive")
        body += message.get("body", b"")
        if len(body) > most:
            raise _Answer(413, f"the body is longer than {most} bytes")
        if not message.get("more_body", False):
            return bytes(body)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(
    send: Send, status: int, answer: dict[str, Any], retry_after: float | None = None
) -> None:
    body = msgspec.json.encode(answer)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if retry_after is not None:
        headers.append((b"retry-after", str(math.ceil(retry_after)).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    start: Message = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})


MAX_CONNECTIONS = 4096
"""Further ones get 503."""
KEEP_ALIVE_SECONDS = 75
END_SECONDS = 5


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What is served, and how."""

    classifier: ClassifierSettings
    batching: BatchSettings = field(default_factory=BatchSettings)
    token: str | None = field(default=None, repr=False)
    max_body_bytes: int = 1 << 20


async def serve(
    settings: ServerSettings, listening: socket.socket, ready: Callable[[str], None]
) -> None:
    """Load the model and answer until SIGTERM or SIGINT.

    Args:
        settings: of the server.
        listening: a socket; connections wait on it while the model is loaded.
        ready: told once, with the model in a few words, before the first answer.

    Raises:
        UserError: the model cannot be served.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    classifier = Classifier.load(settings.classifier)
    batcher = Batcher(classifier.score, settings.batching, pads=classifier.pads)
    batcher.start()
    app: Any = App(classifier, batcher, settings.token, settings.max_body_bytes)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=END_SECONDS,
        )
    )
    ready(classifier.described)
    try:
        await server.serve([listening])
    finally:
        await batcher.close()
