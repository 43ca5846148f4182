"""The kernels for GPUs: in Triton's interpreter, compiled for sm_90, and counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.engine.drawing import Streams, draw, draw_by_tensors, noise_seeds
from asyncrl.engine.logits import FusedRows, ProcessedRows
from asyncrl.engine.sampling import SamplingColumns
from asyncrl.engine.verification import KeptColumns

CASES = Path(__file__).parents[1] / "support" / "fused_kernels.py"


def run(what: str, **environment: str) -> str:
    """A part of `fused_kernels`, in a process of its own: Triton's mode is fixed at its import."""
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, str(CASES), what],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """What each part has said in Triton's interpreter."""
    said: dict[str, str] = json.loads(run("interpreted", TRITON_INTERPRET="1").splitlines()[-1])
    return said


@pytest.mark.slow
def test_kernels_draw_and_look_up_as_the_compiled_code_of_a_cpu(
    interpreted: dict[str, str],
) -> None:
    """Tokens, lists, names and log-probabilities; top-k, top-p, min-p; ties; rows not finite."""
    assert interpreted["compare"] == "the same\n", interpreted["compare"]


@pytest.mark.slow
def test_kernels_name_the_tokens_that_tensor_operations_name(interpreted: dict[str, str]) -> None:
    """Over several blocks; nothing where nothing is outside the list or no name is asked for."""
    assert interpreted["names"] == "the same names\n", interpreted["names"]


@pytest.mark.slow
def test_the_torch_engine_gives_the_same_tokens_with_kernels(interpreted: dict[str, str]) -> None:
    """Samples, verification of kept tokens, SPEC-RL's rule, tokens outside the list, scores."""
    assert interpreted["engine"] == "the same engine\n", interpreted["engine"]


@pytest.mark.slow
def test_a_step_takes_few_kernels(interpreted: dict[str, str]) -> None:
    """Two, and copies, where tensor operations take over thirty."""
    counts = dict(line.split() for line in interpreted["count"].splitlines())
    assert int(counts["fused"]) <= 4
    assert int(counts["tensors"]) >= 30


@pytest.mark.slow
def test_kernels_compile_for_an_h100() -> None:
    """For both types of logits that vLLM gives."""
    assert run("compile").split() == [
        "summarise_kernel",
        "draw_kernel",
        "look_up_kernel",
        "cut_kernel",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_and_names_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(500, 32_000, generator=generator) * 3
    logprobs = torch.log_softmax(logits, -1)
    seeds = np.arange(500, dtype=np.uint64)
    streams = Streams(seeds, np.arange(500), noise_seeds(seeds, 3))
    there = FusedRows(logits.cuda(), SamplingColumns.unset(500))
    here, tensors = draw(logprobs, 16, streams), draw_by_tensors(logprobs, 16, streams)
    assert torch.equal(here.tokens, tensors.tokens)
    assert torch.equal(there.draw(16, streams).tokens.cpu(), here.tokens)
    rows, ids = np.arange(0, 500, 3), here.listed.ids.numpy()[::3].copy()
    outside = logits.argmin(1)[::3].numpy().astype(np.int32)
    columns = KeptColumns(
        outside, ids, streams.positions[::3], streams.noise_seeds[::3],
        np.ones(len(rows), np.bool_), rows % 5 == 0,
    )  # fmt: skip
    found, wanted = there.read(rows, columns), ProcessedRows(logprobs).read(rows, columns)
    np.testing.assert_array_equal(found.names, wanted.names)
    np.testing.assert_allclose(found.name_logprobs, wanted.name_logprobs, atol=1e-5)
