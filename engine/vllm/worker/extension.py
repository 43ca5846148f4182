"""Our code in vLLM's engine-core process, mixed into its worker class (`worker_extension_cls`)."""

import os
import select
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.remote.worker.staging import WorkerWeights
from asyncrl.engine.sampling.drawing import UNREPORTED_K
from asyncrl.engine.sampling.logits import warm_up as warm_up_drawing
from asyncrl.engine.vllm.remote import VllmWorker
from asyncrl.engine.vllm.worker.api import get_tp_group
from asyncrl.engine.vllm.worker.drafter import CacheDrafter, prepare_plainly
from asyncrl.engine.vllm.worker.sampling import CoreSampler, CoreScorer, RunnerBatch
from asyncrl.engine.vllm.worker.weights import (
    AdapterWeights,
    ServedAdapter,
    VllmHeldWeights,
    VllmLoader,
    check_reloadable,
)
from asyncrl.rollout.acceptance import warm_up_verification
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest

_ORPHANED = 3
"""Exit status of an engine core whose generator has ended."""
_PIECE = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Elements of weights summed between two steps, some 10 ms; a tensor is never cut."""


class WorkerExtension(VllmWorker):
    """The calls of `VllmWorker`. `self` is also vLLM's worker."""

    model_runner: Any
    device: Any
    _batch: RunnerBatch
    _weights: WorkerWeights
    _adapter: ServedAdapter | None
    _fingerprint: Iterator[Fingerprint | None]

    def asyncrl_attach(
        self, parent: int, top_k: int, logits_bytes: int, stage_on_device: bool
    ) -> None:
        """Install our parts, as `VllmWorker.asyncrl_attach` says."""
        _exit_with(parent)
        runner = self.model_runner
        check_reloadable(runner.get_model())
        ranks = Ranks.of_group(get_tp_group())
        batch = self._batch = RunnerBatch(runner, top_k or UNREPORTED_K)
        sampler = CoreSampler(runner, batch, ranks, logits_bytes)
        sampler.install()
        CoreScorer(runner, batch, ranks, logits_bytes)
        self._adapter = None if runner.lora_config is None else ServedAdapter(runner)
        if self._adapter is None:
            self._weights = WorkerWeights(VllmLoader(self), on_device=stage_on_device)
        else:
            self._weights = AdapterWeights(VllmLoader(self), self._adapter)
        self._weights.prove()
        if runner.speculative_config is not None:
            prepare_plainly(runner)
        drafter = _drafter_of(runner)
        if drafter is not None:
            drafter.attach(runner, batch, sampler)
        if ranks.leads:
            model = runner.model_config
            warm_up_drawing(
                torch.empty(1, model.get_vocab_size(), dtype=model.head_dtype, device=self.device),
                batch.listed,
            )
            warm_up_verification()

    def asyncrl_begin_staging(self, manifest: dict[str, Any]) -> None:
        """Begin to copy the weights of a manifest in a thread; generation continues."""
        self._weights.begin(msgspec.convert(manifest, WeightManifest))

    def asyncrl_staging(self) -> dict[str, Any]:
        """Return a `StagingReport` of the staging begun last."""
        return dict(msgspec.to_builtins(self._weights.report()))

    def asyncrl_install(self, policy_version: int) -> str:
        """Put the staged weights of this version in place, while generation is paused."""
        why_reloaded = self._weights.install(policy_version)
        self._batch.advance(policy_version)
        drafter = _drafter_of(self.model_runner)
        if drafter is not None:
            drafter.advance(policy_version)
        return why_reloaded

    def asyncrl_begin_fingerprint(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Begin a `Fingerprint` of the weights in use, by the names of the HF state dict."""
        held = VllmHeldWeights(
            self.model_runner.get_model(),
            {name: tuple(shape) for name, shape in shapes.items()},
            Ranks.of_group(get_tp_group()),
            self._adapter,
        )
        self._fingerprint = held.fingerprint(_PIECE[self.device.type])

    def asyncrl_fingerprint(self) -> dict[str, Any] | None:
        """Continue it for a few milliseconds; return the fingerprint when it is done."""
        found = next(self._fingerprint)
        return None if found is None else dict(msgspec.to_builtins(found))

    def asyncrl_save_cache(self) -> int:
        """Write the snapshot of the rollout cache; return its bytes."""
        drafter = _drafter_of(self.model_runner)
        return 0 if drafter is None else drafter.save()


def _drafter_of(runner: Any) -> CacheDrafter | None:
    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, CacheDrafter) else None


def _exit_with(parent: int) -> None:
    """Exit when the generator ends, however it ends: vLLM's core would otherwise run forever."""
    fd = os.pidfd_open(parent)

    def wait() -> None:
        select.select([fd], [], [])
        os._exit(_ORPHANED)

    threading.Thread(target=wait, name="asyncrl-parent-watch", daemon=True).start()
