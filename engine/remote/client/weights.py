"""New weights, from the generator's side: staged in the engine's worker, then installed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from asyncrl.engine.errors import EngineError, WeightsError, WeightsSupersededError
from asyncrl.engine.remote.client.core import Core
from asyncrl.engine.remote.client.pausing import Pausing
from asyncrl.engine.remote.client.streams import Streams
from asyncrl.engine.weights import ModelShapes, not_staged
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest

_LOG = logging.getLogger(__name__)
_FIRST_POLL_SECONDS, _MAX_POLL_SECONDS = 0.002, 0.05
"""Between two questions whether weights are staged. Each is answered between two steps."""


class WeightSwap:
    """Stages published weights in the worker while it generates, then installs them.

    Args:
        core: of the engine.
        streams: its requests; those without a token begin again under the new weights.
        pausing: stops drawing for the installation.
        shapes: of the model.
        longest: seconds that staging, and installing, so many bytes of weights may take.
    """

    def __init__(
        self,
        core: Core,
        streams: Streams,
        pausing: Pausing,
        shapes: ModelShapes,
        longest: Callable[[int], float],
    ) -> None:
        self._core = core
        self._streams = streams
        self._pausing = pausing
        self._shapes = shapes
        self._longest = longest
        self._limit = 0.0
        """Seconds, of the version that is staged."""
        self._lock = asyncio.Lock()
        self._staged: int | None = None
        self._fingerprint: Fingerprint | None = None
        self._said_why = False

    async def fingerprint(self) -> Fingerprint:
        """Of the weights in use, which stay until it is done; once after each installation.

        Raises EngineError.
        """
        async with self._lock:
            if self._fingerprint is None:
                self._fingerprint = await self._core.fingerprint(self._shapes.shapes)
            return self._fingerprint

    async def stage(self, manifest: WeightManifest) -> None:
        """Have the worker copy published weights into its staging memory.

        Raises:
            WeightsSupersededError: these were overwritten or removed; nothing is staged.
            WeightsError: the weights do not fit the model, cannot be read or have values that are
                not finite; nothing is staged.
            EngineError: the core failed, or did not finish in time; nothing is staged.
        """
        async with self._lock:
            self._staged = None
            self._shapes.check(manifest)
            # Of an adapter, all weights that it is merged into are loaded, in at least 16 bits.
            nbytes = max(manifest.nbytes, 2 * self._shapes.elements)
            self._limit = self._longest(nbytes)
            await self._core.begin_staging(manifest)
            await self._staging_ended()
            self._staged = manifest.policy_version

    async def _staging_ended(self) -> None:
        """Poll: a call to the core that waited for the copy would hold up its steps."""
        deadline = time.monotonic() + self._limit
        pause = _FIRST_POLL_SECONDS
        while (report := await self._core.staging()).state == "running":
            if time.monotonic() > deadline:
                raise self._core.failure(
                    f"{self._core.name} did not stage new weights within {self._limit:g} s"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_SECONDS)
        if report.state == "superseded":
            raise WeightsSupersededError(report.message)
        if report.state == "refused":
            raise WeightsError(report.message)

    async def install(self, policy_version: int) -> None:
        """Replace the weights between two steps.

        Raises:
            WeightsError: this version is not staged; nothing was changed.
            EngineError: the core failed during the installation; the engine has ended.
        """
        async with self._lock:
            if self._staged != policy_version:
                raise not_staged(policy_version, self._staged)
            try:
                async with self._pausing.stopped():
                    self._fingerprint = None
                    began = time.monotonic()
                    why_reloaded = await self._core.install(policy_version, self._limit)
                    seconds = time.monotonic() - began
                    self._staged = None
                    await self._streams.restart_unstarted()
            except EngineError as error:
                self._core.fail(error)
                raise
            if why_reloaded and not self._said_why:
                self._said_why = True
                _LOG.warning(
                    "%s loads new weights while it is paused, %.1f s for each version, which takes "
                    "several times as long as copying staged ones: %s",
                    self._core.name,
                    seconds,
                    why_reloaded,
                )
