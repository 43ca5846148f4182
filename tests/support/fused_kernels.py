"""Runs the kernels of `asyncrl.engine.sampling.logits_triton`.

python fused_kernels.py compile SM:K ...        compiles them for GPUs of these compute
                                                capabilities (90 is 9.0) and these K: prints JSON,
                                                a `Compiled` for each
python fused_kernels.py interpreted             the other parts, in Triton's interpreter: prints a
                                                JSON object of what each of them says, or its
                                                traceback

A program of its own, because Triton decides when it is imported whether it interprets or compiles.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.sampling import logits as engine_logits
from asyncrl.engine.sampling import logits_triton
from asyncrl.engine.sampling.drawing import (
    Streams,
    draw,
    draw_by_tensors,
    identify_by_tensors,
    top_k,
)
from asyncrl.engine.sampling.logits import (
    FusedRows,
    ProcessedRows,
    draw_from_logits,
    read_from_logits,
)
from asyncrl.engine.sampling.truncation import SamplingColumns, processed_logprobs, stream_bits
from asyncrl.engine.sampling.verification import KeptColumns
from asyncrl.rollout.trajectory import Provenance

if TYPE_CHECKING:
    from asyncrl.engine.protocol import GenerateRequest, Score, ScoreRequest, TokenChunk

PLAIN: list[dict[str, float]] = [{}, {"temperature": 0.7}]
CUT: list[dict[str, float]] = [
    {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {}, {"top_p": 0.999},
    {"top_k": 9, "top_p": 0.7, "min_p": 0.05, "temperature": 1.3},
]  # fmt: skip
SMALL = {"_BLOCK": 32, "_CUT_BLOCK": 32, "_BLOCKS_A_PART": 2}
"""So that few tokens are several blocks and parts: an interpreter is slow."""
VIEWS = {
    "view",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "expand",
    "t",
    "alias",
    "empty",
    "detach",
}
POINTERS = {
    "columns": "*i64", "floors": "*i64", "keys": "*i64", "tokens": "*i64", "names": "*i64",
    "maxima": "*fp32", "sums": "*fp32", "values": "*fp32", "name_values": "*fp32", "ids": "*i32",
}  # fmt: skip
CONSTANTS = {"C": 128, "PARTS": 32, "BLOCKS": 4, "CUT": True}


class Compiled(NamedTuple):
    """What a compilation has given."""

    triton: str
    """Version."""
    kernel: str
    sm: int
    """Compute capability, times 10."""
    k: int
    """K of the engine's lists."""
    seconds: float
    """Of all CPUs, ptxas included."""
    instructions: int
    """In the PTX."""


def sampling_of(ways: list[dict[str, float]], rows: int) -> SamplingColumns:
    """The ways in turn."""
    return SamplingColumns.of(
        [SamplingParams(1, **ways[row % len(ways)]) for row in range(rows)]  # type: ignore[arg-type]
    )


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    """Random ones; every fifth row has tokens that cannot be drawn. In bfloat16 many are equal."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 2).to(dtype)
    logits[1::5] = logits[1::5].masked_fill(logits[1::5] < 0.5, -torch.inf)
    logits[1::5, 0] = 1.0
    return logits


def streams_of(rows: int) -> Streams:
    """Seeds that use all 64 bits."""
    seeds = np.arange(rows, dtype=np.uint64) * np.uint64(0x1234567890ABCDEF)
    return Streams(seeds, np.arange(rows) * 3, seeds + np.uint64(9))


def compare() -> None:
    """Against compiled code of a CPU, and what is defined for rows that are not finite."""
    outside = named = 0
    for vocabulary, k, rows, dtype in (
        (50, 4, 6, torch.float32), (80, 5, 6, torch.bfloat16), (3, 5, 2, torch.float32),
        (50, 1, 3, torch.float32),
    ):  # fmt: skip
        for ways, n in ((PLAIN, 2), (CUT, rows)):
            found = _same_draws(logits_of(n, vocabulary, dtype), k, sampling_of(ways, n))
            outside += found
            named += _same_reading(logits_of(n, vocabulary, dtype), k, sampling_of(ways, n))
    _same_of_some(logits_of(4, 40, torch.float32), 4, sampling_of(CUT[:2], 4))
    assert outside > 3
    assert named > 8
    bad = torch.zeros(3, 40)
    bad[0, 3], bad[1] = torch.nan, -torch.inf
    drawn = draw_from_logits(bad, SamplingColumns.unset(3), 4, streams_of(3), max_bytes=1)
    assert drawn.tokens[:2].tolist() == [-1, -1]
    assert drawn.tokens[2] >= 0
    assert drawn.ids[:2, 0].tolist() == [0, 0]
    assert not drawn.logprobs[:2, :2].isfinite().any()
    print("the same")


def _same_draws(logits: torch.Tensor, k: int, sampling: SamplingColumns) -> int:
    rows, streams = len(logits), streams_of(len(logits))
    places = np.random.default_rng(0).permutation(rows + 3)[:rows]
    logprobs = processed_logprobs(logits.float().clone(), sampling)
    wanted = draw(logprobs, k, streams)
    found = draw_from_logits(
        logits, sampling, k, streams, max_bytes=1, places=places, table_rows=rows + 3
    )
    assert torch.equal(found.tokens, wanted.tokens)
    ids, values = found.ids[places], found.logprobs[places]
    assert torch.equal(ids[:, 0].long(), wanted.tokens)
    own = logprobs.gather(1, wanted.tokens[:, None])
    torch.testing.assert_close(
        values, torch.cat([own, wanted.listed.logprobs], 1), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(ids[:, 1:], wanted.listed.ids)
    assert not found.ids[np.setdiff1d(np.arange(rows + 3), places)].any()
    return int((ids[:, 1:] != ids[:, :1]).all(1).sum())


def _same_reading(logits: torch.Tensor, k: int, sampling: SamplingColumns) -> int:
    rows, vocabulary = logits.shape
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(vocabulary)[: min(k, vocabulary)] for _ in range(rows)])
    ids[::3, -1] = -1
    columns = KeptColumns(
        rng.integers(0, vocabulary, rows).astype(np.int32), ids.astype(np.int32),
        np.arange(rows), streams_of(rows).seeds, np.arange(rows) % 4 > 0, np.arange(rows) % 7 == 5,
    )  # fmt: skip
    logprobs = processed_logprobs(logits.float().clone(), sampling)
    right = ProcessedRows(logprobs).read(np.arange(rows), columns)
    found = read_from_logits(logits, sampling, columns, 3)
    for mine, theirs in zip(found.reading, right, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    assert found.listed is not None
    best = draw(logprobs, 3, streams_of(rows)).listed
    torch.testing.assert_close(found.listed.logprobs, best.logprobs, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.listed.ids, best.ids)
    return int((columns.outside() & (right.names >= 0)).sum())


def _same_of_some(logits: torch.Tensor, k: int, sampling: SamplingColumns) -> None:
    """Some rows, in any order and repeatedly: the kernels find them where they lie."""
    rows = np.array([len(logits) - 1, 0, 2, 0])
    logprobs = processed_logprobs(logits.float().clone(), sampling)
    fused, processed = FusedRows(logits, sampling), ProcessedRows(logprobs)
    mine, theirs = (each.draw(k, streams_of(4), rows) for each in (fused, processed))
    assert torch.equal(mine.tokens, theirs.tokens)
    torch.testing.assert_close(mine.logprobs, theirs.logprobs, rtol=1e-5, atol=1e-5)
    for listed in (mine.listed, fused.top_k(k, rows)):
        assert torch.equal(listed.ids, theirs.listed.ids)
        torch.testing.assert_close(listed.logprobs, theirs.listed.logprobs, rtol=1e-5, atol=1e-5)
    columns = KeptColumns(
        np.array([1, 2, 0, 1], np.int32), theirs.listed.ids.numpy(), np.arange(4),
        streams_of(4).seeds, np.ones(4, np.bool_), np.arange(4) == 2,
    )  # fmt: skip
    for found, wanted in zip(fused.read(rows, columns), processed.read(rows, columns), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def names() -> None:
    """Names by the same noise as those of tensor operations, over several blocks."""
    for vocabulary, k, rows in ((50, 1, 7), (2048, 3, 7), (9000, 8, 7)):
        logits = logits_of(rows, vocabulary, torch.float32)
        logits[3] = -torch.inf
        logits[3, :k] = 0.0  # nothing is outside
        logprobs = torch.log_softmax(logits, -1)
        ids = top_k(logprobs, k).ids
        seeds, positions = np.arange(rows, dtype=np.uint64), np.arange(rows)
        tail = np.arange(rows) % 4 > 0
        columns = KeptColumns(
            ids.numpy()[:, 0].copy(), ids.numpy(), positions, seeds,
            np.zeros(rows, np.bool_), np.zeros(rows, np.bool_),
        )  # fmt: skip
        found = logits_triton.look_up_rows(logits, SamplingColumns.unset(rows), columns, tail)
        wanted = identify_by_tensors(logprobs, ids, stream_bits(seeds, positions))
        assert wanted[3] == -1
        wanted[~torch.from_numpy(tail)] = -1
        assert torch.equal(found.names, wanted), (vocabulary, k)
        own = logprobs.gather(1, wanted.clamp(min=0)[:, None])[:, 0]
        named = wanted >= 0
        assert named.sum() > rows // 2
        torch.testing.assert_close(found.name_values[named], own[named], rtol=1e-5, atol=1e-5)
    print("the same names")


def engine() -> None:
    """The torch engine with the kernels gives the tokens that it gives without them."""
    import torch_cores  # imports transformers, which takes seconds

    fused = _rounds()
    with patch.object(engine_logits, "fused", lambda _logits, _k: False):
        processed = _rounds()
    outside = renewed = 0
    for (chunks, scores), (other_chunks, other_scores) in zip(fused, processed, strict=True):
        assert chunks.keys() == other_chunks.keys()
        for name, mine in chunks.items():
            for what in ("tokens", "topk_ids", "noise_seeds", "provenance"):
                one, other = (torch_cores.joined(c, what) for c in (mine, other_chunks[name]))
                np.testing.assert_array_equal(one, other, what)
            for what in ("logprobs", "topk_logprobs"):
                one, other = (torch_cores.joined(c, what) for c in (mine, other_chunks[name]))
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
            outside += sum(chunk.outside_top_k() for chunk in mine)
            renewed += int((torch_cores.joined(mine, "provenance") == Provenance.VERIFIED).sum())
        for score, other_score in zip(scores, other_scores, strict=True):
            np.testing.assert_allclose(score.logprobs, other_score.logprobs, atol=1e-5)
            np.testing.assert_array_equal(score.topk_ids, other_score.topk_ids)
    assert outside > 5, outside
    assert renewed > 5, renewed
    print("the same engine")


Round: TypeAlias = "tuple[dict[str, list[TokenChunk]], list[Score]]"


def _rounds() -> list[Round]:
    """Rounds of one core: new samples, the same verified under new weights, and scores."""
    import torch_cores
    from enumerated_policies import policies
    from new_weights import swap_weights
    from tiny_models import save

    old, new = policies(0.1)
    with tempfile.TemporaryDirectory() as folder:
        model = torch_cores.load(save(old, Path(folder)), slots=4)
    core = torch_cores.core_of(model, top_k=2)
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_p": 0.8}, {}]
    asked = [
        torch_cores.request(f"{i}", seed=i, top_k_logprobs=2, max_tokens=4, **ways[i])
        for i in range(4)
    ]
    first = torch_cores.run(core, asked)
    swap_weights(core, new.state_dict().items(), 1)
    again = []
    for i, one in enumerate(asked):
        kept = torch_cores.kept_of(first[one.request_id], lenience=1.2 if i == 3 else None)
        sampling = replace(one.sampling, seed=100 + i)
        again.append(replace(one, kept=kept, sampling=sampling))
    verified = torch_cores.run(core, again)
    scores = core.score([_score_of(one, verified[one.request_id]) for one in asked])
    return [(first, []), (verified, scores)]


def _score_of(request: GenerateRequest, chunks: list[TokenChunk]) -> ScoreRequest:
    import torch_cores

    from asyncrl.engine.protocol import ScoreRequest

    tokens = torch_cores.joined(chunks, "tokens")
    return ScoreRequest(request.request_id, request.prompt_tokens, tokens, request.sampling)


class Counter(TorchDispatchMode):
    """Counts the operations that would start a kernel or a copy on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one, unless it is a view or only takes memory."""
        self.count += func.overloadpacket.__name__.strip("_") not in VIEWS
        return func(*args, **(kwargs or {}))


def count() -> None:
    """Operations and kernels for one step without drafts, fused and by tensor operations."""
    rows, sampling = 2, sampling_of([{"temperature": 0.7}], 2)
    logits = logits_of(rows, 40, torch.bfloat16)
    launched = 0
    names = ("summarise_kernel", "draw_kernel", "cut_kernel")
    kernels = {name: getattr(logits_triton, name) for name in names}

    class Launch:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            nonlocal launched
            launched += 1
            return lambda *_args, **_kwargs: None

    # Two launches are counted, not made: an interpreter's own work would be counted too.
    with patch.multiple(logits_triton, **{name: Launch(kernels[name]) for name in names}):
        with Counter() as counter:
            draw_from_logits(logits, sampling, 4, streams_of(rows), max_bytes=1)
        # The copy of the parameters to the device is no operation on a CPU.
        print("fused", counter.count + launched + 1)
    with Counter() as counter:
        logprobs = processed_logprobs(logits.float(), sampling)
        drawn = draw_by_tensors(logprobs, 4, streams_of(rows))
        logprobs.gather(1, drawn.tokens.clamp(min=0)[:, None])
    print("tensors", counter.count)


def compile_for(wanted: list[str]) -> None:
    """With truncation; what does not depend on K only for the first GPU."""
    pairs = [(int(sm), int(k)) for sm, _, k in (one.partition(":") for one in wanted)]
    by_k = [(name, *pair) for name in ("summarise_kernel", "draw_kernel") for pair in pairs]
    others = [(name, *pairs[0]) for name in ("look_up_kernel", "cut_kernel")]
    compiled = [_compiled(*one) for one in by_k + others]
    print(json.dumps([one._asdict() for one in compiled]))


def _compiled(name: str, sm: int, k: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(logits_triton, name)
    block = logits_triton._CUT_BLOCK if name == "cut_kernel" else logits_triton._BLOCK
    constants = CONSTANTS | {"BLOCK": block, "K": logits_triton._width(k)}
    signature, values = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], values[(place,)] = "constexpr", constants[argument]
        else:
            pointer = "*bf16" if argument == "logits" else POINTERS.get(argument, "i32")
            signature[argument] = pointer
    source = ASTSource(kernel, signature, values)
    began = _cpu_seconds()
    made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": 8})
    assert made.asm["cubin"]
    lines = [line.strip() for line in made.asm["ptx"].splitlines()]
    instructions = sum(line.endswith(";") and not line.startswith((".", "//")) for line in lines)
    return Compiled(triton.__version__, name, sm, k, _cpu_seconds() - began, instructions)


def _cpu_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


class _Nothing:
    """Stands in for what puts Triton's language back as it was."""

    def restore(self) -> None:
        """Leave it as it is."""


def patched_once() -> Callable[[Any], _Nothing]:
    """Gives the language its interpreted functions once, and leaves them there.

    Triton's interpreter does so, with the same result, at each call of a function, which is half
    of its work.
    """
    from triton.runtime import interpreter

    real: Callable[[Any], Any] = interpreter._patch_lang
    functions: set[Any] = set()
    known: set[frozenset[int]] = set()

    def patch_lang(function: Any) -> _Nothing:
        if function in functions:
            return _Nothing()
        functions.add(function)
        modules = {sys.modules["triton.language"], sys.modules["triton.language.core"]}
        seen = frozenset(
            id(one)
            for one in function.__globals__.values()
            if inspect.ismodule(one) and one in modules
        )
        if seen not in known:
            real(function)
            known.add(seen)
        return _Nothing()

    return patch_lang


def known_types(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes the interpreter's table of NumPy's types once, not at each look."""
    known: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = real(dtype)
        return known[name]

    return numpy_type


def xor_by_numpy(real: Callable[..., Any]) -> Callable[..., Any]:
    """Has NumPy reduce by xor, as the interpreter does sums. It takes one element at a time."""
    import triton.language as tl

    def apply(self: Any, given: tuple[Any, ...]) -> Any:
        if self.combine_fn != tl.standard._xor_combine or self.axis is None:
            return real(self, given)
        data = np.bitwise_xor.reduce(given[0].handle.data, self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, given[0].dtype)

    return apply


def interpreted() -> None:
    """Each part; one that fails does not stop the others."""
    from triton.runtime import interpreter

    interpreter._patch_lang = patched_once()
    interpreter._get_np_dtype = known_types(interpreter._get_np_dtype)
    reduce: Any = interpreter.ReduceOps
    reduce.apply_impl = xor_by_numpy(reduce.apply_impl)
    said = {}
    for part, sizes in ((count, {}), (names, {}), (compare, SMALL), (engine, SMALL)):
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            patch.multiple(logits_triton, **sizes) if sizes else contextlib.nullcontext(),
        ):
            try:
                part()
            except Exception:  # noqa: BLE001 - the test shows it
                traceback.print_exc(file=out)
        said[part.__name__] = out.getvalue()
    print(json.dumps(said))


if __name__ == "__main__":
    with patch.object(engine_logits, "fused", lambda _logits, k: 0 < k <= 64):
        compile_for(sys.argv[2:]) if sys.argv[1] == "compile" else interpreted()
