"""The kernels for GPUs: in Triton's interpreter, compiled for sm_90, and counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_kernels_draw_and_look_up_as_the_compiled_code_of_a_cpu() -> None:
    """Tokens, lists, names and log-probabilities; top-k, top-p, min-p; ties; rows not finite."""
    assert "the same" in run("compare", TRITON_INTERPRET="1")


def test_a_step_takes_few_kernels() -> None:
    """Two, and copies, where tensor operations take over thirty."""
    counts = dict(line.split() for line in run("count", TRITON_INTERPRET="1").splitlines())
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
