"""The HTTP side of agents: `/v1/chat/completions` and `/v1/models` on a loopback address.

    agent program ══HTTP, its session's key══► Endpoint ──► the session that the key belongs to

It is served on its own port in the worker process that runs the agents. Each session has its own
key, and requests without a valid key are refused. Import-light: worker processes load this file,
and uvicorn only if there are agents.
"""

import asyncio
import contextlib
import json
import logging
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from asyncrl.environments.agents import openai_messages
from asyncrl.environments.agents.openai_messages import ChatCall, PolicySettings, Turn
from asyncrl.environments.chat_messages import RefusedCallError

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
_HALVES = re.compile(rb"\\u[dD][89a-fA-F]")
_BODY_SECONDS = 60.0

Answer = Callable[[ChatCall], Awaitable[Turn]]
"""Makes the policy take its turn. Raises RefusedCallError."""


class Endpoint:
    """Serves the sessions of one process, from one event loop."""

    def __init__(self, policy: PolicySettings, ignore: Sequence[str] = ()) -> None:
        self.policy = policy
        self.ignore = tuple(ignore)
        self.ignored: Counter[str] = Counter()
        self._sessions: dict[str, Answer] = {}
        self._serving: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self._address = ""

    @property
    def url(self) -> str:
        """The base URL for clients, available while served."""
        return f"http://{self._address}/v1"

    async def start(self) -> None:
        """Start to serve, also if the server has died. Idempotent. Raises OSError."""
        if self._serving is not None and self._serving.done():
            died, self._serving = self._serving, None
            cause = None if died.cancelled() else died.exception()
            log.error("the endpoint of agents has died and restarts", exc_info=cause)
        if self._serving is None:
            listening = socket.socket()
            listening.bind(("127.0.0.1", 0))
            listening.listen(1024)
            listening.setblocking(False)
            self._address = "{}:{}".format(*listening.getsockname())
            self._ending.clear()
            self._serving = asyncio.create_task(_serve(self, listening, self._ending))

    def open(self, answer: Answer) -> str:
        """Begin a session and return its key."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._sessions[key] = answer
        return key

    def close(self, key: str) -> None:
        """End a session and invalidate its key. Idempotent."""
        self._sessions.pop(key, None)

    async def stop(self) -> None:
        """Stop serving. Idempotent."""
        task, self._serving = self._serving, None
        if task is not None:
            self._ending.set()
            await task

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request as an ASGI application."""
        if scope["type"] != "http":
            return
        try:
            await self._respond(scope, receive, send)
        except RefusedCallError as error:
            await _send_json(send, error.status, error.body())

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        answer = self._session_of(scope["headers"])
        path, method = scope["path"].rstrip("/"), scope["method"]
        if path == "/v1/models" and method == "GET":
            model = {"id": self.policy.model, "object": "model", "created": 0}
            listed = [model | {"owned_by": "asyncrl"}]
            await _send_json(send, 200, {"object": "list", "data": listed})
        elif path == "/v1/chat/completions" and method == "POST":
            again = dict(scope["headers"]).get(b"x-stainless-retry-count", b"0") != b"0"
            body = await _json_body(receive)
            call = openai_messages.read_call(body, self.policy, ignore=self.ignore, is_retry=again)
            self._note_ignored(call)
            await self._complete(call, await _unless_gone(answer(call), receive), send)
        else:
            raise RefusedCallError(
                f"{method} {path} is not served; use POST /v1/chat/completions or GET /v1/models",
                status=404,
            )

    def _session_of(self, headers: Any) -> Answer:
        scheme, _, key = dict(headers).get(b"authorization", b"").partition(b" ")
        found = self._sessions.get(key.strip().decode("latin-1"))
        if scheme.lower() != b"bearer" or found is None:
            raise RefusedCallError(
                "the API key does not belong to a sample in progress: use the agent's "
                "client.api_key (OPENAI_API_KEY), which is valid until the sample ends",
                status=401,
            )
        return found

    def _note_ignored(self, call: ChatCall) -> None:
        for name, value in call.ignored.items():
            self.ignored[name] += 1
            if self.ignored[name] == 1:
                text = "ignored a request's %s=%r (environment.args.ignore); others are not logged"
                log.warning(text, name, value)

    async def _complete(self, call: ChatCall, turn: Turn | None, send: Any) -> None:
        if turn is None:  # the client has gone
            return
        name = f"chatcmpl-{secrets.token_hex(8)}"
        created = int(time.time())  # noqa: TID251 - OpenAI's answers say when they were made
        head = (name, self.policy.model, created, turn)
        if not call.stream:
            await _send_json(send, 200, openai_messages.completion(*head))
            return
        pieces = openai_messages.chunks(*head, include_usage=call.include_usage)
        await _send_head(send, 200, b"text/event-stream")
        for text in [*map(json.dumps, pieces), "[DONE]"]:
            line = f"data: {text}\n\n".encode()
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _serve(application: Endpoint, listening: socket.socket, ending: asyncio.Event) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        """A uvicorn server that leaves the process's signals alone."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Do nothing."""
            yield

    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server = Server(uvicorn.Config(
        application, http="h11", ws="none", lifespan="off", log_config=None, access_log=False,
        proxy_headers=False, server_header=False, timeout_keep_alive=60,
        timeout_graceful_shutdown=1,
    ))  # fmt: skip
    serving = asyncio.create_task(server.serve([listening]))
    ended = asyncio.create_task(ending.wait())
    try:
        await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
            raise RuntimeError("the server has ended on its own")
        server.should_exit = True
        await serving
    finally:
        ended.cancel()
        serving.cancel()
        await asyncio.wait((serving,))
        for one in getattr(server, "servers", ()):  # else the event loop keeps the socket's number
            one.close()
        listening.close()


async def _json_body(receive: Any) -> Any:
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise RefusedCallError("the request ended before its body")
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > MAX_BODY_BYTES:
                    text = f"the request has more than {MAX_BODY_BYTES} bytes"
                    raise RefusedCallError(text, status=413)
    except TimeoutError as error:
        text = f"the request's body did not arrive within {_BODY_SECONDS:g} s"
        raise RefusedCallError(text, status=408) from error
    try:
        found = json.loads(body)
        if _HALVES.search(body):
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RefusedCallError(
            "the request has half a character (a lone surrogate such as \\ud83d), which tokenizers "
            "refuse: send whole characters, for example text.encode('utf-8', 'replace')"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RefusedCallError(f"the body is not JSON: {error}") from error
    return found


async def _unless_gone(answer: Awaitable[Turn], receive: Any) -> Turn | None:
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for one in (work, gone):
            one.cancel()


async def _send_head(send: Any, status: int, kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_json(send: Any, status: int, value: Any) -> None:
    await _send_head(send, status, b"application/json")
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})
