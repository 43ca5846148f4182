"""What the client asks of an engine's core, the process in which the model runs.

An engine implements `Core` by its own means. Everything else in this package only needs that.

Counters and gauges of a running core.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.engine.errors import EngineError
from asyncrl.engine.remote.calls import StagingReport
from asyncrl.engine.remote.client.inbox import Inbox
from asyncrl.engine.remote.client.responses import Responses
from asyncrl.engine.remote.extras import RequestExtra
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest


class Meter:
    """What a core has done since its start. The engine adds what each message reports."""

    def __init__(self) -> None:
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self.busy_seconds = 0.0
        self.running = 0
        self.waiting = 0
        self.kv_used = 0.0
        self.prefix_asked = 0
        """Context tokens that new requests came with."""
        self.prefix_found = 0
        """Of those, tokens whose KV was found in the prefix cache."""
        self._busy_since: float | None = None

    def idle(self) -> None:
        """Nothing runs from now on (paused, or the last request was aborted)."""
        self._busy_since = None

    def busy(self) -> None:
        """Something runs from now on."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()

    def loaded(self, running: int, waiting: int, kv_used: float) -> None:
        """Note the load after the last step of a message, and the time that its steps took.

        Args:
            running: requests.
            waiting: requests.
            kv_used: 0 to 1.
        """
        now = time.monotonic()
        if self._busy_since is not None:
            self.busy_seconds += now - self._busy_since
        self.running, self.waiting, self.kv_used = running, waiting, kv_used
        self._busy_since = now if running or waiting else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRequest:
    """A request to generate, or to score if `extra.scored`."""

    tokens: list[int]
    """What to continue, or to score the end of."""
    max_tokens: int
    """To generate; 0: it only scores."""
    temperature: float
    top_p: float
    stop_tokens: tuple[int, ...]
    extra: RequestExtra
    """The rest of it; the ticket is not set yet."""
    priority: int
    """Lower is served first, ties by arrival."""


class Core(Protocol):
    """A running core. Calls raise EngineError when it fails, dies or does not answer in time."""

    @property
    def name(self) -> str:
        """Of the engine, for messages: "vLLM"."""

    @property
    def min_temperature(self) -> float:
        """Requests with a lower temperature are refused."""

    @property
    def vocab_size(self) -> int:
        """Of the loaded model."""

    @property
    def policy_version(self) -> int:
        """Of the weights that are loaded; 0 at the start."""

    @property
    def ended(self) -> EngineError | None:
        """Why nothing can be asked any more; None while it runs."""

    @property
    def unfinished(self) -> int:
        """Requests submitted whose end has not come."""

    @property
    def responses(self) -> Responses:
        """The responses being generated, to which the core's steps are added."""

    @property
    def meter(self) -> Meter:
        """What it has done since its start."""

    def failure(self, what: str) -> EngineError:
        """An error that says what went wrong and quotes the end of the engine's log."""

    def fail(self, error: EngineError) -> None:
        """Refuse every later call with this error, and raise it to all readers."""

    async def submit(self, request_id: str, inbox: Inbox[Any], request: CoreRequest) -> None:
        """Send a request that is answered to `inbox`, under prefix KV of these weights only.

        Args:
            request_id: never used before.
            inbox: a `Response` of `responses`, or one for a `Scored`. Its ticket goes along.
            request: to serve.
        """

    async def abort(self, request_ids: list[str]) -> None:
        """End requests and drop what comes of them later; those already over are ignored."""

    async def interrupt(self, request_id: str) -> None:
        """End a request, which answers with all that it has drawn and then its end.

        Nothing happens if it is already over.
        """

    async def pause(self) -> None:
        """Return when no step runs any more and all steps have come; requests stay as they are."""

    async def resume(self) -> None:
        """Resume drawing."""

    async def begin_staging(self, manifest: WeightManifest) -> None:
        """Have the worker begin to copy published weights; generation continues."""

    async def staging(self) -> StagingReport:
        """How far the staging begun last is, in all ranks together."""

    async def install(self, policy_version: int, limit: float) -> str:
        """Put the staged weights in place and stamp what is drawn from now on; only while paused.

        Args:
            policy_version: that is staged.
            limit: of the wait for it, in seconds.

        Returns:
            Why the engine had to load them in the pause (`RemoteWorker.asyncrl_install`), or "".
        """

    async def fingerprint(self, shapes: dict[str, tuple[int, ...]]) -> Fingerprint:
        """Of the weights in use, by names and shapes of the HF state dict.

        It generates meanwhile. The weights must stay.
        """

    async def save_cache(self) -> int:
        """Write the snapshot of the cache of rollouts; returns its bytes."""
