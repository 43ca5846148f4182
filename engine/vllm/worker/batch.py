"""vLLM's batch as arrays. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.remote.worker.batch import Batch
from asyncrl.engine.remote.worker.entries import Entry
from asyncrl.engine.sampling.drawing import UNREPORTED_K
from asyncrl.engine.vllm.extras import from_extra_args


class RunnerBatch(Batch):
    """Follows the batch of one model runner.

    Args:
        runner: vLLM's `GPUModelRunner`.
        listed: length of the lists that tokens are drawn with, reported or not.
    """

    def __init__(self, runner: Any, listed: int = UNREPORTED_K) -> None:
        super().__init__(listed)
        self.runner = runner

    @property
    def present(self) -> list[str]:
        """`[B]` request ids of the runner's rows."""
        ids: list[str] = self.runner.input_batch.req_ids
        return ids

    @property
    def alive(self) -> Container[str]:
        """Ids of the requests that the runner knows."""
        requests: Container[str] = self.runner.requests
        return requests

    def read(self, request_id: str) -> Entry:
        """From the runner's state of a request."""
        return entry_of(self.runner.requests[request_id])

    def lengths(self) -> NDArray[np.int64]:
        """`[B]` tokens of each row now, drafts not counted."""
        lengths: NDArray[np.int64] = self.runner.input_batch.num_tokens_no_spec[: len(self.ids)]
        return lengths.astype(np.int64)


def entry_of(request: Any) -> Entry:
    """What the runner's state of a request says.

    Raises:
        KeyError: the request does not carry our section, so this engine did not send it.
    """
    params = request.sampling_params
    return Entry.of(
        from_extra_args(params.extra_args),
        np.array(request.prompt_token_ids, np.int32),
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        stop_tokens=tuple(params.stop_token_ids or ()),
    )
