"""Installs new weights in a generator's engine, one version at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from engine.errors import WeightsSupersededError
from engine.protocol import Engine
from engine.weights import read_weights
from monitoring.metrics import GeneratorMetrics
from wire.messages import from_generator
from wire.weights.layout import WeightManifest

logger = logging.getLogger("asyncrl.generator")


class WeightInstalls:
    """Copies published weights from shared memory and swaps them into the engine.

    Args:
        name: of the generator.
        engine: gets the weights.
        send: sends a message to the controller.
        metrics: gets the seconds of each installation.
        on_change: called when the engine stops for an installation and when it resumes.
        release_kv: called before the swap if the KV of running requests must be rebuilt: it
            interrupts all of them and starts none until `resume`.
        resume: ends what `release_kv` began.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        *,
        send: Callable[[from_generator.WeightsInstalled], Awaitable[None]],
        metrics: GeneratorMetrics,
        on_change: Callable[[], None],
        release_kv: Callable[[], Awaitable[None]],
        resume: Callable[[], None],
    ) -> None:
        self._name = name
        self._engine = engine
        self._send = send
        self._metrics = metrics
        self._on_change = on_change
        self._release_kv = release_kv
        self._resume = resume
        self._lock = asyncio.Lock()
        self.installing: int | None = None
        """Policy version that is being swapped in now; None while none is."""

    async def install(self, manifest: WeightManifest, *, rebuild_kv: bool) -> None:
        """Swap to these weights and report the version installed afterwards.

        If the trainer has published newer weights in their place, the engine keeps its version;
        the command to install the newer ones is on its way.

        Args:
            manifest: where the weights are.
            rebuild_kv: recompute the KV of running requests under the new weights.

        Raises:
            EngineError: the engine refused the weights or failed.
        """
        started = time.monotonic()
        version = manifest.policy_version
        async with self._lock:
            try:
                # Copy first: the trainer may overwrite the weights at any moment. Leaving the
                # block raises WeightsSupersededError if it did so during the copy.
                with read_weights(manifest) as weights:
                    whole = [(name, tensor.clone()) for name, tensor in weights]
                self.installing = version
                self._on_change()
                if rebuild_kv:
                    await self._release_kv()
                await self._engine.update_weights(whole, version)
            except WeightsSupersededError:
                logger.info("weights of version %d were overwritten by newer ones", version)
            finally:
                self.installing = None
                self._resume()
                self._on_change()
        seconds = time.monotonic() - started
        self._metrics.weights_time.observe(seconds)
        await self._send(
            from_generator.WeightsInstalled(
                self._name, self._engine.stats().policy_version, seconds
            )
        )
