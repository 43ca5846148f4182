"""What the client asks of an engine's core, the process in which the model runs.

An engine implements `Core` by its own means. Everything else in this package only needs that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.engine.errors import EngineError
from asyncrl.engine.remote.calls import StagingReport
from asyncrl.engine.remote.client.inbox import Inbox
from asyncrl.engine.remote.client.meter import Meter
from asyncrl.engine.remote.client.responses import Responses
from asyncrl.engine.remote.extras import RequestExtra
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest


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
