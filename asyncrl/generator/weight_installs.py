"""Installs new weights in a generator's engine, one version at a time."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from asyncrl.engine.errors import WeightsSupersededError
from asyncrl.engine.protocol import Engine
from asyncrl.errors import WrongPolicyError
from asyncrl.generator.background import ControllerLine
from asyncrl.generator.sample_table import Samples, Unfinished
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages import from_generator, to_generator
from asyncrl.wire.records.wrong_policy import WrongPolicy, compare_weights
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest

logger = logging.getLogger("asyncrl.generator")


@dataclass(eq=False)
class WeightInstalls:
    """Stages published weights while the engine generates, then swaps them in and compares them.

    The comparison takes several times as long as the swap, so it runs while tokens are drawn with
    the new weights. No trajectory is delivered until it is done (`compared`).

    `_on_change` is called when the engine stops for an installation and resumes, `installed`
    with each version as soon as it is in use; `verify` requests the verification of samples. With
    `stops_on_wrong_policy` the process ends if the engine decodes with other weights than the
    trainer has: no token drawn with them can be delivered. The engine's first weights are the run's
    first policy if `starts_with_policy`: not with an initial adapter, which the first version has.
    """

    _engine: Engine
    _samples: Samples
    _controller: ControllerLine
    _metrics: GeneratorMetrics
    _on_change: Callable[[], None]
    verify: Callable[[to_generator.Verify], Awaitable[None]]
    installed: Callable[[int], Awaitable[None]]
    stops_on_wrong_policy: bool
    starts_with_policy: bool
    installing: int | None = field(default=None, init=False)
    _lineage: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._lock = asyncio.Lock()
        self._are_gone = not self.starts_with_policy
        """True if the engine's weights are not a policy of the run: nothing is generated."""
        if self._are_gone:
            self._samples.interrupt_all()
        self._compared = asyncio.Event()
        self._compared.set()

    async def install(self, command: to_generator.InstallWeights) -> None:
        """Swap to these weights and report the version installed afterwards.

        After `rewind`, weights of a lost trainer are neither installed nor answered for. With
        `rebuild_kv` the KV of running samples is recomputed under the new weights. If these are
        superseded or removed, the engine keeps its version until the next command.

        Raises EngineError if the engine refused the weights or failed; WrongPolicyError if it
        decodes with other ones: then nothing is generated any more.
        """
        started = time.monotonic()
        async with self._lock:
            if command.lineage < self._lineage:
                return  # a lost trainer's; the answer to `Rewind` covers it
            before = self._engine.stats().policy_version, await self._engine.fingerprint()
            if await self._swap(command):
                await self._verify(command)
                await self._report(await self._compare(command.manifest, before))
            self._compared.set()
            installed = self.version
        self._metrics.weights_time.observe(time.monotonic() - started)
        name = self._controller.generator
        await self._controller.send(from_generator.WeightsInstalled(name, installed))

    async def _swap(self, command: to_generator.InstallWeights) -> bool:
        version = command.manifest.policy_version
        try:
            await self._engine.stage_weights(command.manifest)
            self.installing = version
            self._on_change()
            if command.rebuild_kv:
                self._samples.interrupt_all()
            self._compared.clear()
            await self._engine.install_weights(version)
            self._are_gone = False
        except WeightsSupersededError as error:
            logger.info("version %d is not installed: %s", version, error)
            return False
        finally:
            self.installing = None
            if not self._are_gone:
                self._samples.resume_all()
            self._on_change()
        return True

    async def _verify(self, command: to_generator.InstallWeights) -> None:
        for verification in command.verify:
            if verification.min_version <= self.version:
                await self.verify(verification)
        await self.installed(self.version)

    async def compared(self) -> None:
        """Wait until the weights in use have been compared with the trainer's.

        The engine may draw tokens before that. It never returns if the process ends for them.
        """
        await self._compared.wait()

    async def _compare(
        self, manifest: WeightManifest, before: tuple[int, Fingerprint]
    ) -> WrongPolicy | None:
        if manifest.fingerprint is None:
            return None
        name, version = self._controller.generator, manifest.policy_version
        expected, found = manifest.fingerprint, await self._engine.fingerprint()
        return compare_weights(name, version, expected=expected, found=found, before=before)

    async def _report(self, wrong: WrongPolicy | None) -> None:
        if wrong is None:
            return
        found = from_generator.WrongPolicyFound(self._controller.generator, wrong)
        await self._controller.send(found)
        if self.stops_on_wrong_policy:
            self._are_gone = True
            raise WrongPolicyError(wrong.text)

    async def rewind(self, command: to_generator.Rewind) -> None:
        """Relabel tokens of policies after a version, which are gone, and stop using their weights.

        If the engine has such weights, every sample stops until other weights are installed; its KV
        is then recomputed. Raises EngineError if the engine did not end its requests.
        """
        version, lineage = command.policy_version, command.lineage
        async with self._lock:
            self._lineage = lineage
            newest = self._engine.stats().policy_version
            if newest > version or self._are_gone:
                self._are_gone = True
                await self._samples.rewind(version, lineage, newest=newest)
            installed = self.version
        name = self._controller.generator
        await self._controller.send(from_generator.Rewound(name, lineage, installed))

    async def unfinished(self, wanted: Callable[[SampleId], bool]) -> list[Unfinished]:
        """Call `Samples.unfinished` between two installations, and resume the samples."""
        async with self._lock:
            try:
                return await self._samples.unfinished(wanted)
            finally:
                if not self._are_gone:
                    self._samples.resume_all()

    @property
    def version(self) -> int:
        """The version that samples are generated with; -1 if none."""
        return -1 if self._are_gone else self._engine.stats().policy_version
