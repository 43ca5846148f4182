"""The HTTP API of a run, as a FastAPI application, and the files of the page.

`/docs` is the API's reference without scripts: FastAPI's page loads its scripts from another site.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from asyncrl.errors import AsyncrlError
from asyncrl.monitoring.records.jsonl import read_tail
from asyncrl.monitoring.records.samples import newest_samples
from asyncrl.monitoring.report.markup import Child, Markup, element
from asyncrl.web import orders
from asyncrl.web.controller_link import Source
from asyncrl.web.feed import Feed
from asyncrl.web.sections import NAMES, ORDER_BYTES, recent_spans
from asyncrl.web.step_file import StepFile
from asyncrl.wire.messages import control
from asyncrl.wire.messages.control import OrderRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_STEPS = 1000
MAX_SAMPLES = 100
ABOUT = """\
What `asyncrl status`, `stop`, `pause` and the others do, over HTTP.

Orders are POST requests with JSON and the token, as `Authorization: Bearer TOKEN`. The token is in
`RUN/web.token`, or in `monitoring.web.token_file`. An order that is refused changes nothing: its \
answer has the status 409 and the reason.
"""
_REFUSED: dict[int | str, dict[str, Any]] = {
    401: {"description": "The token is missing or wrong."},
    403: {"description": "The request comes from another site."},
    409: {"description": "Refused, with the reason; nothing has changed."},
    502: {"description": "The controller did not answer."},
}


class EventStream(Response):
    """A stream of `event: snapshot` with JSON, for as long as the watcher takes them."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the watcher goes away or the feed ends; to HEAD the head only."""
        with self._feed.stream() as is_free:
            if not is_free:
                text = "too many pages show this run; use `asyncrl status`"
                await _json({"detail": text}, status=503)(scope, receive, send)
            elif scope["method"] == "HEAD":
                await super().__call__(scope, receive, send)
            else:
                await self._send_all(receive, send)

    async def _send_all(self, receive: Receive, send: Send) -> None:
        left = asyncio.create_task(_left(receive))
        sending = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait({left, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (left, sending):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._feed.watch()) as snapshots:
            async for snapshot in snapshots:
                body = b"event: snapshot\ndata: " + snapshot + b"\n\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"event: end\ndata: {}\n\n"})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def reference_page(openapi: Mapping[str, Any]) -> str:
    """Return a page with each operation: purpose, parameters, answers."""
    parts = [
        _operation(path, method, about, openapi)
        for path, methods in openapi["paths"].items()
        for method, about in methods.items()
    ]
    paragraphs = openapi["info"].get("description", "").strip().split("\n\n")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", "asyncrl: HTTP API"),
        Markup('<link rel="stylesheet" href="/page.css"/>'),
    )
    openapi_link = element("a", "/openapi.json", href="/openapi.json")
    run_link = element("a", "the run", href="/")
    links = ["For programs: ", openapi_link, " (OpenAPI). Back to ", run_link]
    body = element(
        "main",
        element("h1", "HTTP API"),
        [element("p", _with_code(text), class_="about") for text in paragraphs],
        element("p", links, ".", class_="about"),
        parts,
    )
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n"


def _with_code(text: str) -> list[Child]:
    parts = text.split("`")
    return [element("code", part) if index % 2 else part for index, part in enumerate(parts)]


def _operation(path: str, method: str, about: Mapping[str, Any], spec: Mapping[str, Any]) -> Child:
    taken = [*_parameters(about), *_body(about, spec)]
    answers = [
        element("tr", element("td", code), element("td", each.get("description", "")))
        for code, each in about["responses"].items()
    ]
    details = element("summary", "Answers"), element("table", answers)
    return element(
        "section",
        element("h3", element("code", f"{method.upper()} {path}")),
        element("p", _with_code(about.get("description", ""))),
        element("table", taken) if taken else None,
        element("details", *details, class_="answers"),
        class_="card operation",
    )


def _parameters(about: Mapping[str, Any]) -> Iterator[Markup]:
    for one in about.get("parameters", ()):
        yield _row(one["name"], one["in"], one["schema"], required=one.get("required", False))


def _body(about: Mapping[str, Any], openapi: Mapping[str, Any]) -> Iterator[Markup]:
    try:
        reference = about["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    except KeyError:
        return
    schema = openapi["components"]["schemas"][reference.rpartition("/")[2]]
    for name, value in schema.get("properties", {}).items():
        yield _row(name, "body", value, required=name in schema.get("required", ()))


def _row(name: str, place: str, schema: Mapping[str, Any], *, required: bool) -> Markup:
    kinds = [one.get("type", "") for one in schema.get("anyOf", [schema])]
    details = [" or ".join(kinds)]
    if "enum" in schema:
        details.append("one of " + ", ".join(map(str, schema["enum"])))
    if required:
        details.append("required")
    elif "default" in schema:
        details.append(f"default {json.dumps(schema['default'])}")
    cells = element("code", name), place, ", ".join(details)
    return element("tr", [element("td", cell) for cell in cells])


class Api:
    """The dependencies of the routes; `disk` is the thread that reads files."""

    def __init__(
        self, run: Path, source: Source, steps: StepFile, feed: Feed, disk: ThreadPoolExecutor
    ) -> None:
        self._run = run
        self._source = source
        self._steps = steps
        self._feed = feed
        self._disk = disk

    async def read(self, function: Callable[[], T]) -> T:
        """Call `function` in the thread that reads files."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, function)

    async def _status(self) -> Mapping[str, Any]:
        try:
            return await self._source.status()
        except AsyncrlError as error:
            raise HTTPException(502, str(error)) from error

    async def status(self) -> Response:
        """State of the run: the numbers of `asyncrl status --json`."""
        return _json(await self._status())

    async def processes(self) -> Response:
        """The processes of the run, by name: state, policy version, port of their metrics."""
        return _json((await self._status()).get("processes", {}))

    async def metrics(
        self,
        first: Annotated[int, Query(ge=0, le=10**12, alias="from")] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_STEPS)] = MAX_STEPS,
    ) -> Response:
        """Lines of metrics.jsonl, of one step each, from a step on."""

        def lines() -> list[bytes]:
            self._steps.refresh()
            return self._steps.lines(first, limit)

        body = b"[" + b",".join(await self.read(lines)) + b"]"
        return Response(body, media_type="application/json")

    async def timeline(self, seconds: Annotated[float, Query(gt=0, le=3600)] = 60.0) -> Response:
        """Spans of each process's activity in the last seconds, by process."""
        return _json(await self.read(lambda: recent_spans(self._run, seconds)))

    async def samples(self, limit: Annotated[int, Query(ge=1, le=MAX_SAMPLES)] = 8) -> Response:
        """The newest samples, oldest first, with the origin of each token."""
        return _json(await self.read(lambda: newest_samples(self._run, limit)))

    async def given(self) -> Response:
        """The orders that were given and recorded, oldest first."""
        path = self._run / "orders.jsonl"
        return _json(await self.read(lambda: read_tail(path, OrderRecord, ORDER_BYTES)))

    async def events(self) -> Response:
        """Server-sent events: `snapshot` once a second, with the status."""
        return EventStream(self._feed)

    async def section(self, name: Literal[NAMES]) -> HTMLResponse:  # type: ignore[valid-type]
        """A section of the report, as HTML."""
        return HTMLResponse((await self._feed.section(name)).html)

    async def order(self, request: control.Request, who: Request) -> orders.Taken:
        """Give an order and wait for the answer."""
        name = orders.name_of(request)
        client = who.client
        by = "an unknown client" if client is None else f"{client.host}:{client.port}"
        try:
            reply = await self._source.order(request)
        except AsyncrlError as error:
            logger.warning("order %s from %s: no answer: %s", name, by, error)
            raise HTTPException(502, str(error)) from error
        logger.info("order %s from %s: %s", name, by, reply)
        if isinstance(reply, control.Accepted):
            return orders.Taken(accepted=reply.message, step=reply.step)
        reason = reply.reason if isinstance(reply, control.Refused) else f"answered with {reply}"
        raise HTTPException(409, reason)


def application(api: Api) -> FastAPI:
    """Build the application. It has to be guarded (`asyncrl.web.server`)."""
    app = FastAPI(title="asyncrl", description=ABOUT, docs_url=None, redoc_url=None, version="1")
    data: Sequence[tuple[str, Callable[..., Awaitable[Response]]]] = (
        ("/api/status", api.status),
        ("/api/processes", api.processes),
        ("/api/metrics", api.metrics),
        ("/api/timeline", api.timeline),
        ("/api/samples", api.samples),
        ("/api/orders", api.given),
        ("/api/events", api.events),
        ("/api/report/{name}", api.section),
    )
    app.exception_handler(RequestValidationError)(_senseless)
    for path, answer in data:
        app.get(path, response_class=Response, tags=["watch"])(answer)
        app.head(path, response_class=Response, include_in_schema=False)(answer)
    _add_orders(app, api)
    _add_page(app)
    return app


def _add_orders(app: FastAPI, api: Api) -> None:
    def add(name: str, about: str, answer: Callable[..., Awaitable[orders.Taken]]) -> None:
        path = f"/api/orders/{name}"
        app.post(path, description=about, responses=_REFUSED, tags=["orders"], name=name)(answer)

    def simple(make: Callable[[], control.Request]) -> Callable[..., Awaitable[orders.Taken]]:
        async def answer(_arguments: orders.NoArguments, who: Request) -> orders.Taken:
            return await api.order(make(), who)

        return answer

    async def scale(arguments: orders.ScaleArguments, who: Request) -> orders.Taken:
        return await api.order(control.ScaleRequest(arguments.generators), who)

    async def set_value(arguments: orders.SetArguments, who: Request) -> orders.Taken:
        return await api.order(orders.set_request(arguments), who)

    for name, (make, about) in orders.SIMPLE.items():
        add(name, about, simple(make))
    add("scale", "Change the number of generators.", scale)
    add("set", "Change a setting that is safe to change while the run trains.", set_value)


def _add_page(app: FastAPI) -> None:
    report_css = _file("asyncrl.monitoring.report", "report.css")
    files = {
        "/": ("text/html", _file("asyncrl.web", "static/index.html")),
        "/page.js": ("text/javascript", _file("asyncrl.web", "static/page.js")),
        "/page.css": ("text/css", report_css + _file("asyncrl.web", "static/page.css")),
        "/docs": ("text/html", reference_page(app.openapi()).encode()),
    }

    def add(path: str, kind: str, contents: bytes) -> None:
        async def answer() -> Response:
            return Response(contents, media_type=kind)

        app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(answer)

    for path, (kind, contents) in files.items():
        add(path, kind, contents)


async def _senseless(_request: Request, error: Exception) -> Response:
    """Describe a request's mistakes without its values: NaN cannot be sent back."""
    found = error.errors() if isinstance(error, RequestValidationError) else []
    detail = [{name: one[name] for name in ("type", "loc", "msg")} for one in found]
    return _json({"detail": detail}, status=422)


def _file(package: str, name: str) -> bytes:
    return resources.files(package).joinpath(name).read_bytes()


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
