"""The calls of the generator's process, made in all ranks between two steps."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from asyncrl.engine.remote.calls import RemoteWorker
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.sglang.messages import Answer, Call


class SteppingScheduler(Protocol):
    """A scheduler that can be stopped and receives new versions."""

    def stop(self) -> None:
        """Run no step from now on; the outputs of earlier steps are in the outbox."""

    def resume_steps(self) -> None:
        """Run steps again."""

    def advance(self, policy_version: int) -> None:
        """Draw under this version from now on."""

    def save_cache(self) -> int:
        """Write the snapshot of the rollout cache; return its bytes."""


class Weights(Protocol):
    """The weights of the model (`asyncrl.engine.sglang.worker.weights`)."""

    def begin(self, manifest: dict[str, Any]) -> None:
        """Begin to copy the weights of a manifest."""

    def staging(self) -> dict[str, Any]:
        """Return a `StagingReport`."""

    def install(self, policy_version: int) -> str:
        """Put the staged weights of this version in place."""

    def begin_fingerprint(self, shapes: dict[str, Any]) -> None:
        """Begin a `Fingerprint`."""

    def fingerprint(self) -> dict[str, Any] | None:
        """Continue it."""


class WorkerCalls(RemoteWorker):
    """The methods that the client may call, by name."""

    def __init__(self, scheduler: SteppingScheduler, weights: Weights) -> None:
        self._scheduler = scheduler
        self._weights = weights

    def asyncrl_pause(self) -> None:
        """Stop running steps; requests keep their state."""
        self._scheduler.stop()

    def asyncrl_resume(self) -> None:
        """Run steps again."""
        self._scheduler.resume_steps()

    def asyncrl_begin_staging(self, manifest: dict[str, Any]) -> None:
        """Begin to copy the weights of a manifest in a thread; generation continues."""
        self._weights.begin(manifest)

    def asyncrl_staging(self) -> dict[str, Any]:
        """Return a `StagingReport` of the staging begun last, over all ranks."""
        return self._weights.staging()

    def asyncrl_install(self, policy_version: int) -> str:
        """Put the staged weights of this version in place, while steps are stopped."""
        why_reloaded = self._weights.install(policy_version)
        self._scheduler.advance(policy_version)
        return why_reloaded

    def asyncrl_begin_fingerprint(self, shapes: dict[str, Any]) -> None:
        """Begin a `Fingerprint` of the weights in use, by the names of the HF state dict."""
        self._weights.begin_fingerprint(shapes)

    def asyncrl_fingerprint(self) -> dict[str, Any] | None:
        """Continue it for a few milliseconds; return the fingerprint when it is done."""
        return self._weights.fingerprint()

    def asyncrl_save_cache(self) -> int:
        """Write the snapshot of the rollout cache; return its bytes."""
        return self._scheduler.save_cache()


def answer(calls: object, call: Call, ranks: Ranks) -> Answer:
    """Make a call of `calls` in all ranks; report errors of any rank, or results of rank 0."""
    result, error = None, ""
    try:
        result = _method(calls, call.method)(*call.arguments)
    except Exception as problem:  # noqa: BLE001 - it is reported to the caller
        traceback.print_exc()
        sys.stderr.flush()
        error = f"{type(problem).__name__}: {problem}"
    errors = ranks.gather(error)
    return Answer(call.number, result, next((one for one in errors if one), ""))


def _method(calls: object, name: str) -> Callable[..., Any]:
    method = getattr(calls, name, None) if name.startswith("asyncrl_") else None
    if method is None:
        raise ValueError(f"the worker has no call {name!r}")
    return method  # type: ignore[no-any-return]
