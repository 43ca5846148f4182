"""vLLM's worker with our extension, which can be told to install weights wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from engine.vllm.worker import weights
from engine.vllm.worker.extension import WorkerExtension

_REPACK = weights._repack_tied


class FaultyWorker(WorkerExtension):
    """Behaves as `WorkerExtension` until a fault is asked for."""

    reload_weights: Callable[..., None]

    def asyncrl_fault(self, kind: str, name: str = "") -> None:
        """`stale head`: never repack a tied head. `skip`: leave tensor `name` as it is."""
        weights._repack_tied = _REPACK if kind != "stale head" else lambda _model: None
        vars(self).pop("reload_weights", None)
        if kind == "skip":
            load = self.reload_weights

            def without(weights_iterator: Iterator[tuple[str, Any]]) -> None:
                own = self.model_runner.get_model().get_parameter(name)
                load(
                    weights_iterator=(
                        (one, own.detach().clone() if one == name else tensor)
                        for one, tensor in weights_iterator
                    )
                )

            vars(self)["reload_weights"] = without
