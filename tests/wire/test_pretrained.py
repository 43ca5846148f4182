"""Models of transformers that several threads of a process load at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import AutoConfig

from asyncrl.wire.weights.pretrained import causal_lm_without_weights, load_causal_lm

_THREADS, _ROUNDS = 4, 3


def test_threads_that_load_at_once_get_tied_weights_and_so_does_everyone_after_them(
    tiny_qwen3: str,
) -> None:
    path = str(tiny_qwen3)
    start = threading.Barrier(_THREADS)

    def load(_: int) -> bool:
        start.wait(timeout=60)
        model = load_causal_lm(path, torch.float32)
        return model.get_output_embeddings().weight is model.get_input_embeddings().weight

    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in range(_ROUNDS):
            assert all(pool.map(load, range(_THREADS)))
    described = causal_lm_without_weights(AutoConfig.from_pretrained(path))
    assert described.get_output_embeddings().weight is described.get_input_embeddings().weight
    assert {one.device.type for one in described.parameters()} == {"meta"}
