"""The client's view of an engine's core, which an engine implements: `Core`."""

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
    """Counters and gauges of a core since its start; the engine adds what each message reports."""

    def __init__(self) -> None:
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self.busy_seconds = 0.0
        self.running = 0
        self.waiting = 0
        self.kv_used = 0.0
        self.prefix_asked = 0
        """Context tokens of new requests."""
        self.prefix_found = 0
        """Those whose KV was found in the prefix cache."""
        self._busy_since: float | None = None

    def idle(self) -> None:
        """Note that nothing runs (paused, or the last request was aborted)."""
        self._busy_since = None

    def busy(self) -> None:
        """Note that something runs."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()

    def loaded(self, running: int, waiting: int, kv_used: float) -> None:
        """Note the load after the last step of a message, and the time that its steps took."""
        now = time.monotonic()
        if self._busy_since is not None:
            self.busy_seconds += now - self._busy_since
        self.running, self.waiting, self.kv_used = running, waiting, kv_used
        self._busy_since = now if running or waiting else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRequest:
    """A request to generate, or to score if `extra.scored`."""

    tokens: list[int]
    """The tokens to continue, or whose end to score."""
    max_tokens: int
    """Most tokens to generate; 0: it only scores."""
    temperature: float
    top_p: float
    stop_tokens: tuple[int, ...]
    extra: RequestExtra
    """The ticket is not set yet."""
    priority: int


class Core(Protocol):
    """A running core. Calls raise EngineError when it fails, dies or does not answer in time."""

    @property
    def name(self) -> str:
        """The engine's name in messages: "vLLM"."""

    @property
    def min_temperature(self) -> float:
        """Requests with a lower temperature are refused."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the loaded model."""

    @property
    def policy_version(self) -> int:
        """Version of the loaded weights; 0 at the start."""

    @property
    def ended(self) -> EngineError | None:
        """The error that every later call raises; None while it runs."""

    @property
    def unfinished(self) -> int:
        """Number of submitted requests that have not ended."""

    @property
    def responses(self) -> Responses:
        """The responses being generated, to which the core's steps are added."""

    @property
    def meter(self) -> Meter:
        """Its counters since the start."""

    def failure(self, what: str) -> EngineError:
        """Return an error about `what` that quotes the end of the engine's log."""

    def fail(self, error: EngineError) -> None:
        """Refuse every later call with this error, and raise it to all readers."""

    async def submit(self, request_id: str, inbox: Inbox[Any], request: CoreRequest) -> None:
        """Send a request that is answered to `inbox`, using prefix KV of these weights only.

        `request_id` was never used before. `inbox` is a `Response` of `responses` or for a
        `Scored`.
        """

    async def abort(self, request_ids: list[str]) -> None:
        """End requests and drop their later results; ended ones are ignored."""

    async def interrupt(self, request_id: str) -> None:
        """End a request, which reports all that it has drawn and then its end. Idempotent."""

    async def pause(self) -> None:
        """Stop, and return when all steps have been received; requests keep their state."""

    async def resume(self) -> None:
        """Resume drawing."""

    async def begin_staging(self, manifest: WeightManifest) -> None:
        """Make the worker copy published weights; generation continues."""

    async def staging(self) -> StagingReport:
        """Return the state of the staging begun last, over all ranks."""

    async def install(self, policy_version: int, limit: float) -> str:
        """Put the staged weights in place and stamp later tokens with them; only while paused.

        Raises after `limit` seconds. Returns as `RemoteWorker.asyncrl_install`.
        """

    async def fingerprint(self, shapes: dict[str, tuple[int, ...]]) -> Fingerprint:
        """Return the fingerprint of the weights in use, which must not change; steps continue."""

    async def save_cache(self) -> int:
        """Write the snapshot of the rollout cache; return its bytes."""
