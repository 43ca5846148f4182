"""vLLM's worker with our extension, which can be timed, and told to do something wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

from asyncrl.engine.remote.worker.staging import WorkerWeights
from asyncrl.engine.vllm.worker import sampling, weights
from benchmarks.vllm_host.timed_worker import TimedExtension

_DRAW = sampling.draw_from_logits
_LOAD = weights.load


def _load_and_derive(name: str, worker: Any, model: Any, tensors: Any) -> None:
    """Load, and make something of parameter `name` in place, where nobody copies it."""
    _LOAD(worker, model, tensors)
    model.get_submodule(name.rpartition(".")[0]).derived[0].copy_(model.get_parameter(name))


class FaultyWorker(TimedExtension):
    """Behaves as `WorkerExtension` until a fault or a clock is asked for."""

    _weights: WorkerWeights
    _fault: tuple[str, str] = ("none", "")

    def asyncrl_fault(self, kind: str, name: str = "") -> None:
        """Begin a fault and end all others.

        `stale head`: an installation does not replace the packed copy that the head multiplies by.
        `skip`: it leaves tensor `name` as it is. `temperature`: draw at 1.1 times the temperature.
        `deriving`: loading makes something of tensor `name` in its module. It is proved again how
        weights are installed, both when this fault begins and when it ends; the model must hold the
        weights of its start.
        Another kind: none.
        """
        if kind == "deriving":
            model: Any = self.model_runner.get_model()
            derived = [model.get_parameter(name).detach().clone()]
            model.get_submodule(name.rpartition(".")[0]).derived = derived
        weights.load = partial(_load_and_derive, name) if kind == "deriving" else _LOAD
        factor = 1.1 if kind == "temperature" else 1.0
        sampling.draw_from_logits = lambda logits, *args, **kwargs: _DRAW(
            logits / factor, *args, **kwargs
        )
        proves = "deriving" in (kind, self._fault[0])
        self._fault = kind, name
        if proves:
            self._weights = WorkerWeights(weights.VllmLoader(self))
            self._weights.prove()

    def asyncrl_install(self, policy_version: int) -> str:
        """Install, and undo a part of it."""
        kind, name = self._fault
        model: Any = self.model_runner.get_model()
        if kind == "skip":
            left = model.get_parameter(name).detach().clone()
        packed = model.lm_head.cpu_linear
        why = super().asyncrl_install(policy_version)
        if kind == "skip":
            model.get_parameter(name).data.copy_(left)
        if kind == "stale head":
            model.lm_head.cpu_linear = packed
        return why

    def asyncrl_staging_way(self) -> tuple[bool, str]:
        """Whether copying was proved to replace loading, and why it was not."""
        return self._weights._twin is not None, self._weights._why_reloads
