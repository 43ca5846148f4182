"""Requests that a core refuses."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import VOCAB
from torch_cores import core_of, load, request

from asyncrl.engine.errors import RequestError

NONE = np.empty(0, np.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "greater than 0"),
        ({"temperature": float("nan")}, "greater than 0"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 62}, "max_model_len"),
        ({"top_k_logprobs": 5}, "top_k_logprobs"),
        ({"stop_tokens": (VOCAB,)}, "stop_tokens"),
        ({"prompt": NONE}, "empty"),
        ({"prompt": np.array([VOCAB], np.int32)}, "vocabulary"),
        ({"prefix_tokens": np.zeros(12, np.int32)}, "nothing to generate"),
    ],
)
def test_impossible_requests_are_named_and_refused(
    tiny_qwen3: str, changes: dict[str, object], message: str
) -> None:
    core = core_of(load(tiny_qwen3))
    with pytest.raises(RequestError, match=f"'bad'.*{message}"):
        core.add(request("bad", **changes))
    assert not core.has_work


def test_an_id_in_use_is_refused(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3))
    core.add(request("a"))
    with pytest.raises(RequestError, match="being served"):
        core.add(request("a"))
