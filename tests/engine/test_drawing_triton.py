"""The kernel that names tail tokens on GPUs: in Triton's interpreter, and where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from engine.drawing import Streams, draw, draw_by_tensors, identify, noise_seeds

CHECK = """
import numpy as np, torch
from engine.drawing import identify_by_tensors, top_k
from engine.drawing_triton import name_tails
from engine.sampling import stream_bits

generator = torch.Generator().manual_seed(0)
for vocabulary, k, rows in ((50, 4, 60), (1024, 3, 20), (1500, 8, 40), (3000, 1, 30)):
    logits = torch.randn(rows, vocabulary, generator=generator) * 2
    logits[::5] = logits[::5].masked_fill(logits[::5] < 1, -torch.inf)
    logits[1] = -torch.inf
    logits[1, :k] = 0.0  # nothing is outside
    logprobs = torch.log_softmax(logits, -1)
    ids = top_k(logprobs, k).ids
    keys = stream_bits(np.arange(rows, dtype=np.uint64), np.arange(rows))
    symbols = torch.full((rows,), k)
    symbols[::3] = 0
    named = name_tails(logprobs, ids, torch.from_numpy(keys.view(np.int64)), symbols)
    wanted = identify_by_tensors(logprobs, ids, keys)
    assert wanted[1] == -1
    wanted[::3] = -1
    assert torch.equal(named, wanted), (vocabulary, k)
print("the same names")
"""


def test_the_kernel_makes_the_same_names_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "the same names" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs = torch.log_softmax(torch.randn(500, 32_000, generator=generator) * 3, -1)
    seeds = np.arange(500, dtype=np.uint64)
    streams = Streams(seeds, np.arange(500), noise_seeds(seeds, 3))
    there = draw(logprobs.cuda(), 16, streams)
    here, tensors = draw(logprobs, 16, streams), draw_by_tensors(logprobs, 16, streams)
    assert torch.equal(here.tokens, tensors.tokens)
    assert torch.equal(there.tokens.cpu(), here.tokens)
    rows, ids = np.arange(0, 500, 3), here.listed.ids.numpy()[::3].copy()
    which = rows, ids, streams.positions[::3], streams.noise_seeds[::3]
    np.testing.assert_array_equal(identify(logprobs.cuda(), *which), identify(logprobs, *which))
