"""Our draws as SGLang's sampler, and the hidden states of scored positions.

Written against SGLang 0.5.23, whose model runner calls `sampler` for every step without drafts,
prefills included, in the forward pass's stream, after the output layer: so scoring happens here
too. `register_sampler_backend` is its plug-in point for samplers, but on a CPU its settings choose
another backend whatever was asked for, and a backend is made before there is a scheduler.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.engine.sglang.worker.api import LogitsMetadata, LogitsProcessor, Sampler
from asyncrl.engine.sglang.worker.drawing import StepDrawing
from asyncrl.engine.sglang.worker.scoring import PrefillScoring


class OutputLayer:
    """Takes the hidden states that go into a model's output layer, and computes logits of some.

    Args:
        model: SGLang's.

    Raises:
        TypeError: the model has no `LogitsProcessor`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        processors = [one for one in model.modules() if isinstance(one, LogitsProcessor)]
        if not processors:
            raise TypeError(
                f"{type(model).__name__} has no LogitsProcessor of SGLang's: kept tokens of it "
                "cannot be scored"
            )
        self._processor = processors[0]
        self._scoring: PrefillScoring | None = None
        self._taken: tuple[torch.Tensor, Any, Any] | None = None
        self._processor.register_forward_pre_hook(self._take)

    def serve(self, scoring: PrefillScoring) -> None:
        """Take what this wants from now on."""
        self._scoring = scoring

    def _take(self, _module: Any, arguments: tuple[Any, ...]) -> None:
        if self._scoring is not None and self._scoring.wanted:
            _, hidden, head, step, *_ = arguments
            self._taken = hidden, head, LogitsMetadata.from_forward_batch(step)

    def score(self) -> None:
        """Score what the step that has just run takes in, if it is to be scored.

        Raises:
            RuntimeError: its output layer was not called.
        """
        scoring = self._scoring
        if scoring is None or not scoring.wanted:
            return
        if self._taken is None:
            raise RuntimeError(
                "SGLang ran a prefill without calling its output layer, so nothing can be scored. "
                "Start it with cuda_graph_backend_prefill=disabled"
            )
        scoring.compute(self._taken[0])
        self._taken = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, V]` of some hidden states `[n, H]` of the step that runs; all ranks call it."""
        assert self._taken is not None  # noqa: S101 - only called by `score`
        _, head, metadata = self._taken
        found: torch.Tensor = self._processor._get_logits(  # noqa: SLF001
            hidden, head, metadata, use_logits_buffer=False
        )
        return found


class DrawingSampler(Sampler):
    """Draws for SGLang's model runner, in the place of its sampler.

    Args:
        drawing: draws.
        output_layer: of the model.
    """

    def __init__(self, drawing: StepDrawing, output_layer: OutputLayer) -> None:
        super().__init__()
        self._drawing = drawing
        self._output_layer = output_layer

    def forward(
        self,
        logits_output: Any,
        *_arguments: Any,
        **_named: Any,
    ) -> torch.Tensor:
        """The token of each row, `[B]` int64; the table goes along with the logits' output."""
        self._output_layer.score()
        tokens, output = self._drawing(logits_output.next_token_logits)
        logits_output.auxiliary_device_output = output
        return tokens
