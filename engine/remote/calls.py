"""The calls from the generator's process to an engine's core.

The client names a call by the method of `RemoteWorker`, which the worker overrides. Arguments and
results are builtins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec


class StagingReport(msgspec.Struct, frozen=True):
    """State of staging weights."""

    state: Literal["running", "staged", "refused", "superseded"]
    message: str = ""
    """Reason, if it was refused or superseded."""

    @classmethod
    def of_all(cls, reports: Sequence[StagingReport]) -> StagingReport:
        """Combine the reports of at least one rank: running, then refused, superseded, staged."""
        order = ("running", "refused", "superseded", "staged")
        return min(reports, key=lambda report: order.index(report.state))


class RemoteWorker:
    """The calls. Every rank of the model executes each of them."""

    def asyncrl_begin_staging(self, manifest: dict[str, Any]) -> None:
        """Begin to copy the weights of a manifest in a thread, after a staging still running."""
        raise NotImplementedError

    def asyncrl_staging(self) -> dict[str, Any]:
        """Return a `StagingReport` (as builtins) of the staging begun last."""
        raise NotImplementedError

    def asyncrl_install(self, policy_version: int) -> str:
        """Put the staged weights of this version in place, while generation is paused.

        Returns why the engine had to load them, and will for all versions; "" if they were copied.
        """
        raise NotImplementedError

    def asyncrl_begin_fingerprint(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Begin a `Fingerprint` of the weights in use, by names and shapes of the HF state dict."""
        raise NotImplementedError

    def asyncrl_fingerprint(self) -> dict[str, Any] | None:
        """Continue it for a few milliseconds; return the `Fingerprint` once it is done."""
        raise NotImplementedError

    def asyncrl_save_cache(self) -> int:
        """Write the snapshot of the cache of rollouts; returns its bytes."""
        raise NotImplementedError
