"""The calls of the generator's process, made in all ranks between two steps."""

import sys
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import torch

from asyncrl.engine.errors import WeightsError
from asyncrl.engine.remote.extras import StagingReport
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.remote.worker.staging import WorkerWeights
from asyncrl.engine.sglang.messages import Answer, Call, SglangWorker
from asyncrl.engine.sglang.worker.weights import SglangHeldWeights, SglangLoader, in_all_ranks
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest

_PIECE = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Elements of weights summed between two steps, some 10 ms; a tensor is never cut."""
_STACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""Stacked modules of models without `packed_modules_mapping`, which `load_weights` has."""


class WorkerCalls(SglangWorker):
    """The methods that the client may call, by name. All ranks return the same about weights.

    The constructor proves how new weights are installed: minutes, for large models. It raises
    WeightsError if SGLang cannot replace them. They are staged on the model's device if
    `on_device`. `scheduler` is our `ClientScheduler`.
    """

    def __init__(self, scheduler: Any, ranks: Ranks, *, on_device: bool) -> None:
        from asyncrl.engine.sglang.worker.api import unsupported_derived_weight_cache_error

        self._scheduler = scheduler
        self._ranks = ranks
        runner = scheduler.tp_worker.model_runner
        reason = unsupported_derived_weight_cache_error(runner.model)
        if reason is not None:
            raise WeightsError(f"SGLang cannot take new weights: {reason}")
        self._loader = SglangLoader(runner)
        self._weights = WorkerWeights(self._loader, on_device=on_device)
        in_all_ranks(ranks, self._weights.prove)
        self._fingerprint: Iterator[Fingerprint | None] = iter(())
        scheduler.record_weight_version_change(new_version="0")

    def asyncrl_pause(self) -> None:
        """Stop running steps; requests keep their state."""
        self._scheduler.stop()

    def asyncrl_resume(self) -> None:
        """Run steps again."""
        self._scheduler.resume_steps()

    def asyncrl_begin_staging(self, manifest: dict[str, Any]) -> None:
        """Begin to copy the weights of a manifest in a thread; generation continues."""
        self._weights.begin(msgspec.convert(manifest, WeightManifest))

    def asyncrl_staging(self) -> dict[str, Any]:
        """Return a `StagingReport` of the staging begun last, over all ranks."""
        report = StagingReport.of_all(in_all_ranks(self._ranks, self._weights.report))
        return dict(msgspec.to_builtins(report))

    def asyncrl_install(self, policy_version: int) -> str:
        """Put the staged weights of this version in place, while steps are stopped."""
        if self._loader.device.type == "cuda":
            torch.cuda.synchronize(self._loader.device)  # SGLang's steps run on other streams
        reasons = in_all_ranks(self._ranks, partial(self._weights.install, policy_version))
        self._scheduler.record_weight_version_change(new_version=str(policy_version))
        self._scheduler.advance(policy_version)
        return next((reason for reason in reasons if reason), "")

    def asyncrl_begin_fingerprint(self, shapes: dict[str, Any]) -> None:
        """Begin a `Fingerprint` of the weights in use, by the names of the HF state dict."""
        model: Any = self._loader.model
        held = SglangHeldWeights(
            model,
            {name: tuple(shape) for name, shape in shapes.items()},
            self._ranks,
            packed=_STACKED | (getattr(model, "packed_modules_mapping", None) or {}),
        )
        self._fingerprint = held.fingerprint(_PIECE[self._loader.device.type])

    def asyncrl_fingerprint(self) -> dict[str, Any] | None:
        """Continue it for a few milliseconds; return the fingerprint when it is done."""
        found = next(self._fingerprint)
        return None if found is None else dict(msgspec.to_builtins(found))

    def asyncrl_save_cache(self) -> int:
        """Write the snapshot of the rollout cache; return its bytes."""
        return int(self._scheduler.save_cache())


def answer(calls: object, call: Call, ranks: Ranks) -> Answer:
    """Make a call of `calls` in all ranks; report errors of any rank, or results of rank 0."""
    result, error = None, ""
    try:
        method = getattr(calls, call.method, None) if call.method.startswith("asyncrl_") else None
        if method is None:
            raise ValueError(f"the worker has no call {call.method!r}")
        result = method(*call.arguments)
    except Exception as problem:  # noqa: BLE001 - it is reported to the caller
        traceback.print_exc()
        sys.stderr.flush()
        error = f"{type(problem).__name__}: {problem}"
    errors = ranks.gather(error)
    return Answer(call.number, result, next((one for one in errors if one), ""))
