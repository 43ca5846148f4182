"""Entry point of a paced run's children: `asyncrl.child` on modelled devices.

The engine and the learner are the real ones. Where a process would wait for its device it sleeps,
in the thread that computes: an engine step takes as long as the roofline says for the tokens that
were fed and the KV that was read, the gradient of a group as long as for its tokens. The planner of
the drafts learns from the modelled times.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from asyncrl import child
from asyncrl.engine.protocol import Score, ScoreRequest, TokenChunk
from asyncrl.engine.torch.core import DecodeCore
from asyncrl.launch.child_spec import ChildSpec
from asyncrl.simulation.cost import Cost
from asyncrl.trainer.learner import Group, Learner
from asyncrl.wire.records.step import LearnerMetrics
from asyncrl.wire.weights.layout import WeightManifest
from benchmarks.paced.pace import PacedDevice, cost_of_environment

RECORDS = "paced"
"""Folder in the run's directory with a file for each device."""


class PacedPlanner:
    """A planner that is told the modelled seconds of a step in place of the real ones."""

    def __init__(self, planner: Any, cost: Cost) -> None:
        self._planner, self._cost = planner, cost
        self.seconds = 0.0
        """Modelled seconds of the last step."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def observe(self, *, tokens: int, rows: int, context: int, seconds: float) -> None:
        """Learn what a step would have cost."""
        del seconds
        self.seconds = self._cost.step(tokens, context)
        self._planner.observe(tokens=tokens, rows=rows, context=context, seconds=self.seconds)


class PacedCore(DecodeCore):
    """The torch engine's core on a modelled device."""

    device: PacedDevice
    cost: Cost

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._paced = PacedPlanner(self._drafter.planner, self.cost)
        self._drafter.planner = self._paced

    def step(self) -> list[TokenChunk]:
        """One forward pass, as long as on the device."""
        began, before = self.device.begin(), self._steps
        chunks: list[TokenChunk] = super().step()
        if self._steps > before:
            self.device.finish("step", began, self._paced.seconds)
        return chunks

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score given tokens, as long as on the device."""
        began = self.device.begin()
        scores: list[Score] = super().score(requests)
        tokens = sum(len(one.prompt_tokens) + len(one.tokens) for one in requests)
        self.device.finish("score", began, self.cost.prefill(tokens, 0, 0))
        return scores

    def stage_weights(self, manifest: WeightManifest) -> None:
        """Receive weights next to the steps, as long as on the device's network."""
        end = time.monotonic() + self.cost.stage_seconds
        super().stage_weights(manifest)
        time.sleep(max(0.0, end - time.monotonic()))

    def install_weights(self, policy_version: int) -> list[TokenChunk]:
        """Replace the weights, as long as on the device."""
        began = self.device.begin()
        chunks: list[TokenChunk] = super().install_weights(policy_version)
        self.device.finish("install", began, self.cost.swap_seconds)
        return chunks


class PacedLearner(Learner):
    device: PacedDevice
    cost: Cost

    def add_groups(self, groups: Sequence[Group]) -> list[Tensor]:
        """Accumulate the gradients of groups, as long as on the device."""
        began = self.device.begin()
        rows: list[Tensor] = super().add_groups(groups)
        samples = [one for trajectories, _ in groups for one in trajectories]
        tokens = sum(len(one.prompt_tokens) + len(one.tokens) for one in samples)
        for one in samples:
            self.device.trained(one.id.group, one.id.sample, len(one.tokens))
        self.device.finish("train", began, self.cost.train_token_seconds * tokens)
        return rows

    def step(self) -> LearnerMetrics:
        """The optimizer step, as long as on the device."""
        began = self.device.begin()
        metrics: LearnerMetrics = super().step()
        self.device.finish("optimizer", began, self.cost.optimizer_seconds)
        self.device.flush()
        return metrics


def pace(name: str, folder: Path, cost: Cost) -> None:
    """Put the paced core and learner in the places of the real ones, in this process."""
    import asyncrl.engine.torch.engine as torch_engine
    import asyncrl.trainer_process.setup as trainer_setup

    device = PacedDevice(folder / RECORDS / f"{name}.jsonl")
    for paced in (PacedCore, PacedLearner):
        paced.device, paced.cost = device, cost
    torch_engine.DecodeCore = PacedCore  # type: ignore[misc]
    trainer_setup.Learner = PacedLearner  # type: ignore[misc]


if __name__ == "__main__":
    spec: ChildSpec = msgspec.json.decode(sys.argv[1], type=ChildSpec)
    pace(spec.name, Path(spec.run_directory), cost_of_environment())
    child.main()
