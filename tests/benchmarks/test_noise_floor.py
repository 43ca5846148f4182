"""The benchmark of the noise floor, on a model that is nearly flat over 500 tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.noise_floor import Case, measure
from benchmarks.tiny_models import random_qwen3


def test_a_flat_model_is_measured_token_by_token(tmp_path: Path) -> None:
    random_qwen3(1, 500).save_pretrained(tmp_path)
    case = Case("flat", "torch", "float32", top_k=8, responses=6, length=16)
    found = asyncio.run(measure(case, tmp_path))
    measured = found.measured
    assert (measured.samples, measured.judged) == (6, 96)
    assert measured.rejected == 0
    assert found.outside > 0.5, "most tokens lie outside the list"
    assert measured.abs_mean == pytest.approx(0.0, abs=1e-5)
    assert found.model == pytest.approx(0.0, abs=1e-3)
