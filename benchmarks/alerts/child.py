"""Entry point of the children: `asyncrl.child` with faults that can be switched on."""

from __future__ import annotations

import time
from typing import Any

import torch
from msgspec.structs import replace

from asyncrl import child
from asyncrl.engine.torch.core import ModuleWeights
from asyncrl.generator import noise_floor
from asyncrl.trainer.learner import Learner
from asyncrl.wire.records.noise_floor import NoiseFloor
from asyncrl.wire.records.step import LearnerMetrics
from benchmarks.alerts.switch import present

SLOW_SECONDS = 6.0
"""Of an optimizer step of a slowed trainer."""


class FaultyLearner(Learner):
    """A learner that can be slow, and whose policy can jump."""

    def step(self) -> LearnerMetrics:
        metrics = super().step()
        if present() == "slow trainer":
            time.sleep(SLOW_SECONDS)
        if present() == "policy that runs away":
            with torch.no_grad():
                for parameter in self.policy.model.parameters():
                    parameter.add_(0.2 * parameter.std() * torch.randn_like(parameter))
        return metrics


class FaultyWeights(ModuleWeights):
    def install(self, policy_version: int) -> None:
        super().install(policy_version)
        if present() == "wrong weights":
            with torch.no_grad():
                for tensor in self._own.values():
                    if tensor.dtype.is_floating_point and tensor.dim() > 1:
                        tensor.add_(0.3 * tensor.std() * torch.randn_like(tensor))


def _compared(kept: Any, verdict: Any) -> NoiseFloor:
    """As in `noise_floor`, from an engine that scores with other kernels than it decodes with."""
    found = _really_compared(kept, verdict)
    if present() != "engine that scores badly":
        return found
    return replace(found, cut_samples=1, rejected=found.judged // 4)


_really_compared = noise_floor._compared  # noqa: SLF001 - where the engine's verdict arrives


def inject() -> None:
    """Put the faulty parts in the places of the real ones, in this process."""
    import asyncrl.engine.torch.core as torch_core
    import asyncrl.trainer_process.setup as trainer_setup

    trainer_setup.Learner = FaultyLearner  # type: ignore[misc]
    torch_core.ModuleWeights = FaultyWeights  # type: ignore[misc]
    noise_floor._compared = _compared  # noqa: SLF001


if __name__ == "__main__":
    inject()
    child.main()
