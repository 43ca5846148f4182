"""The client's view of an engine's core."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from asyncrl.engine.errors import EngineError
from asyncrl.engine.remote.client.process import CoreProcess
from asyncrl.engine.remote.client.responses import Inbox, Responses
from asyncrl.engine.remote.extras import RemoteWorker, RequestExtra, StagingReport
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest

T = TypeVar("T")
P = ParamSpec("P")
W = TypeVar("W", bound=RemoteWorker)


class Meter:
    """Counters and gauges of a core since its start; the engine adds what each message reports."""

    def __init__(self) -> None:
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self.busy_seconds = 0.0
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
        self.kv_used = kv_used
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


class Core(ABC):
    """A running core. Calls raise EngineError when it fails, dies or does not answer in time."""

    min_temperature = 0.01
    """Requests with a lower one are refused: vLLM silently raises it to this, and float32 logits
    overflow in SGLang's division."""
    responses: Responses
    """The responses being generated, to which the core's steps are added."""
    meter: Meter
    vocab_size: int

    def __init__(self, process: CoreProcess) -> None:
        self.process = process
        self._installations = 0
        self.policy_version = 0
        """Version of the loaded weights."""

    @property
    def name(self) -> str:
        """The engine's name in messages: "vLLM"."""
        return self.process.name

    @property
    def ended(self) -> EngineError | None:
        """The error that every later call raises; None while it runs."""
        return self.process.ended

    @property
    @abstractmethod
    def unfinished(self) -> int:
        """Number of submitted requests that have not ended."""

    def failure(self, what: str) -> EngineError:
        """Return an error about `what` that quotes the end of the engine's log."""
        return self.process.failure(what)

    def fail(self, error: EngineError) -> None:
        """Refuse every later call with this error, and raise it to all readers."""
        self.process.fail(error)

    @abstractmethod
    async def submit(self, request_id: str, inbox: Inbox[Any], request: CoreRequest) -> None:
        """Send a request that is answered to `inbox`, using prefix KV of these weights only.

        `request_id` was never used before. `inbox` is a `Response` of `responses` or for a
        `Scored`.
        """

    def _salt(self) -> str:
        """Return the salt of these weights: a version may come twice, from two trainers."""
        return f"version {self.policy_version}, installation {self._installations}"

    @abstractmethod
    async def abort(self, request_ids: list[str]) -> None:
        """End requests and drop their later results; ended ones are ignored."""

    @abstractmethod
    async def interrupt(self, request_id: str) -> None:
        """End a request, which reports all that it has drawn and then its end. Idempotent."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop, and return when all steps have been received; requests keep their state."""

    @abstractmethod
    async def resume(self) -> None:
        """Resume drawing."""

    async def begin_staging(self, manifest: WeightManifest) -> None:
        """Make the worker copy published weights; generation continues."""
        builtins = msgspec.to_builtins(manifest)
        await self._call("stage new weights", RemoteWorker.asyncrl_begin_staging, builtins)

    async def staging(self) -> StagingReport:
        """Return the state of the staging begun last, over all ranks."""
        found = await self._call("stage new weights", RemoteWorker.asyncrl_staging)
        return StagingReport.of_all([msgspec.convert(one, StagingReport) for one in found])

    async def install(self, policy_version: int, limit: float) -> str:
        """Put the staged weights in place and stamp later tokens with them; only while paused.

        Raises after `limit` seconds. Returns as `RemoteWorker.asyncrl_install`.
        """
        install = RemoteWorker.asyncrl_install
        reasons = await self._call_within(limit, "install new weights", install, policy_version)
        self.policy_version = policy_version
        self._installations += 1
        return next((reason for reason in reasons if reason), "")

    async def fingerprint(self, shapes: dict[str, tuple[int, ...]]) -> Fingerprint:
        """Return the fingerprint of the weights in use, which must not change; steps continue."""
        what = "compare its weights"
        await self._call(what, RemoteWorker.asyncrl_begin_fingerprint, shapes)
        while True:
            found, *_ = await self._call(what, RemoteWorker.asyncrl_fingerprint)
            if found is not None:  # each rank returns that of the whole model
                return msgspec.convert(found, Fingerprint)

    async def save_cache(self) -> int:
        """Write the snapshot of the rollout cache; return its bytes."""
        return sum(await self._call("save its cache", RemoteWorker.asyncrl_save_cache))

    async def _call(
        self, what: str, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method of the worker; return the results of all ranks, or that of rank 0."""
        return await self._call_within(None, what, method, *args, **kwargs)

    @abstractmethod
    async def _call_within(
        self,
        limit: float | None,
        what: str,
        method: Callable[Concatenate[W, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Call as `_call`, within `limit` seconds instead of the limit of calls."""
