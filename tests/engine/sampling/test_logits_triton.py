"""The kernels for GPUs: in Triton's interpreter, compiled for several GPUs, and counted."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from needed_programs import triton_folder

from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.sampling import logits
from asyncrl.engine.sampling.drawing import Streams, draw, draw_by_tensors, noise_seeds
from asyncrl.engine.sampling.logits import (
    FusedRows,
    ProcessedRows,
    distributions_of,
    draw_from_logits,
    read_from_logits,
    warm_up,
)
from asyncrl.engine.sampling.truncation import SamplingColumns
from asyncrl.engine.sampling.verification import KeptColumns

ROOT = Path(__file__).parents[3]
CASES = ROOT / "tests" / "support" / "fused_kernels.py"
K = 8
KERNELS = ("summarise_kernel", "draw_kernel", "look_up_kernel", "cut_kernel")
TORCH_TRITON, SGLANG_TRITON = "3.7.1", "3.8.0"
"""What GPUs get: with the torch of cuda.lock, and with the one that SGLang 0.5.23 asks for."""


def run(*what: str, triton: Path | None = None, **environment: str) -> str:
    """A part of `fused_kernels`, in a process of its own: Triton's mode is fixed at its import.

    Args:
        what: its arguments.
        triton: folder of the Triton that is used; None: this environment's.
        environment: more variables.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    if triton is not None:
        paths = [str(triton), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [sys.executable, str(CASES), *what],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, str]:
    """What each part has said in the interpreter of the Triton that GPUs get.

    Its rules for types of numbers are other ones than those of this environment's, in which
    `asyncrl gpu-check` interprets the kernels (`test_gpu_check`).
    """
    folder = triton_folder(TORCH_TRITON, request.config)
    ended = run("interpreted", triton=folder, TRITON_INTERPRET="1")
    said: dict[str, str] = json.loads(ended.splitlines()[-1])
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


BY_TRITON = {TORCH_TRITON: ("90:64", "100:8", "80:1"), SGLANG_TRITON: ("100:64", "89:1")}
"""H100, B200, A100 and L40S, each width of lists, and the widest for the oldest and newest PTX.

All but B200 get the same PTX. A K of 1 and one of 2 are the same kernel.
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", BY_TRITON)
def test_kernels_compile_with_the_tritons_that_gpus_get(
    version: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder, wanted = triton_folder(version, request.config), BY_TRITON[version]
    said = run("compile", *wanted, triton=folder, TRITON_CACHE_DIR=str(tmp_path),
               TRITON_DISABLE_LINE_INFO="1")  # fmt: skip
    compiled = json.loads(said.splitlines()[-1])
    assert [f"{one['sm']}:{one['k']} {one['kernel']}" for one in compiled] == [
        *(f"{pair} {kernel}" for kernel in KERNELS[:2] for pair in wanted),
        *(f"{wanted[0]} {kernel}" for kernel in KERNELS[2:]),
    ]
    assert {one["triton"] for one in compiled} == {version}
    # 6,500 to 11,000 instructions in 0.3 to 3 s.
    assert max(one["instructions"] for one in compiled) < 25_000, compiled
    assert max(one["seconds"] for one in compiled) < 60, compiled


def test_make_installs_the_triton_of_the_lock() -> None:
    lock = (ROOT / "requirements" / "cuda.lock").read_text()
    assert f"\ntriton=={TORCH_TRITON} " in lock
    makefile = (ROOT / "requirements" / "environments.mk").read_text()
    for version in (TORCH_TRITON, SGLANG_TRITON):
        assert f"$(VENV)-triton/{version}/.ready" in makefile


class Launches:
    """Stands in for kernels: notes for what Triton would compile them."""

    def __init__(self) -> None:
        self.seen: set[tuple[Any, ...]] = set()

    def of(self, kernel: Any) -> Any:
        """What takes the place of a kernel."""
        return _Launch(self, kernel)


class _Launch:
    def __init__(self, launches: Launches, kernel: Any) -> None:
        self._launches, self._kernel = launches, kernel

    def __getitem__(self, grid: Any) -> Any:
        return self._note

    def _note(self, *arguments: Any, num_warps: int, **constants: Any) -> None:
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.runtime.jit import native_specialize_impl

        passed = zip(self._kernel.params, arguments, strict=False)
        key = [
            native_specialize_impl(
                CUDABackend, value, False, not one.do_not_specialize,
                not one.do_not_specialize_on_alignment,
            )
            for one, value in passed
        ]  # fmt: skip
        assert len(key) + len(constants) == len(self._kernel.params)
        name = self._kernel.fn.__name__
        self._launches.seen.add((name, num_warps, *key, *sorted(constants.items())))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Of kernels as on a GPU, in this process. They write nothing."""
    pytest.importorskip("triton", reason="triton is not installed")
    from asyncrl.engine.sampling import logits_triton

    monkeypatch.setattr(logits, "fused", lambda _logits, k: 0 < k <= logits.MAX_FUSED_K)
    found = Launches()
    for name in KERNELS:
        monkeypatch.setattr(logits_triton, name, found.of(getattr(logits_triton, name)))
    return found


@pytest.mark.parametrize("k", [1, K, 64])
def test_no_step_compiles_a_kernel_after_the_warm_up(launches: Launches, k: int) -> None:
    """Whatever the rows are: one, 16 or 17 of them, cut or not, at any address, in any order."""
    vocabulary = 1000
    warm_up(torch.empty(1, vocabulary), k)
    warm = set(launches.seen)
    assert {one[0] for one in warm} == set(KERNELS)
    ways = (SamplingParams(1), SamplingParams(1, temperature=0.5, top_p=0.9, top_k=3))
    whole = torch.zeros(64, vocabulary + 24)
    for n, way, first in itertools.product((1, 2, 16, 17, 32), ways, (0, 1, 3)):
        rows = whole.view(-1)[first : first + n * (vocabulary + 24 - first)]
        given = rows.view(n, -1)[:, :vocabulary]
        sampling, places = SamplingColumns.of([way] * n), np.arange(n) * 2
        seeds = np.zeros(n, np.uint64)
        streams = Streams(seeds, np.arange(n), seeds)
        draw_from_logits(given, sampling, k, streams, max_bytes=1)
        draw_from_logits(given, sampling, k, streams, max_bytes=1, places=places, table_rows=2 * n)
        for listed in {0, 1, k}:
            columns = KeptColumns.only_tokens(np.zeros(n, np.int32), listed)
            read_from_logits(given, sampling, columns, min(1, listed), listed=k)
        distributions = distributions_of(given, sampling, k)
        distributions.draw(k, streams.part(np.zeros(3, np.int64)), np.zeros(3, np.int64))
        distributions.top_k(1, np.zeros(5, np.int64))
    assert launches.seen == warm


def test_the_warm_up_is_for_the_type_of_the_logits(launches: Launches) -> None:
    warm_up(torch.empty(1, 1000, dtype=torch.bfloat16), K)
    half = set(launches.seen)
    warm_up(torch.empty(1, 1000), K)
    assert half.isdisjoint(launches.seen - half)
    assert len(launches.seen) > len(half)


@pytest.mark.parametrize("k", [0, 65])
def test_what_kernels_do_not_draw_is_not_compiled(launches: Launches, k: int) -> None:
    warm_up(torch.empty(1, 1000), k)
    assert not launches.seen


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
