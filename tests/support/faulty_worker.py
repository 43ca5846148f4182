"""vLLM's worker with our extension, which can be timed, and told to do something wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.vllm_host.timed_worker import TimedExtension
from engine.vllm.worker import sampling, weights

_REPACK = weights._repack_tied
_DRAW = sampling.draw_from_logits


class FaultyWorker(TimedExtension):
    """Behaves as `WorkerExtension` until a fault or a clock is asked for."""

    reload_weights: Callable[..., None]

    def asyncrl_fault(self, kind: str, name: str = "") -> None:
        """Begin a fault and end all others.

        `stale head`: never repack a tied head. `skip`: leave tensor `name` as it is.
        `temperature`: draw at 1.1 times the temperature. Another kind: none.
        """
        factor = 1.1 if kind == "temperature" else 1.0
        sampling.draw_from_logits = lambda logits, *args, **kwargs: _DRAW(
            logits / factor, *args, **kwargs
        )
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
