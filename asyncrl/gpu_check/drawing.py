"""Parts about drawing: the kernels against tensor operations, and draws against the distribution.

Without a GPU, `kernels` runs in Triton's interpreter, and `draws` tests a CPU's compiled code.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.gpu_check.parts import Context, PartFailed, Said

if TYPE_CHECKING:
    import torch

    from asyncrl.engine.sampling.truncation import SamplingColumns

FALSE_ALARM = 1e-6
"""False-alarm rate of each chi-square test."""
_APART = 1e-4
"""Maximum difference in nats of two ways to sum a vocabulary."""
_OTHER_ROWS = 0.01
"""Share of rows in which rounding at the edge of a symbol may give another token."""
_ROUNDS = 10
_IN_A_ROW = 8
"""Calls between two events, so that a fast kernel is measured without its launch."""
_BUFFERS = 4
"""Alternating logits, so that none is in a GPU's cache."""


def kernels(context: Context) -> Said:
    """Compare draws, lists and log-probabilities with tensor operations; time the kernels."""
    if not context.gpus:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
        _take_small_blocks()
    import torch

    rows, vocabulary, k = (2, 1000, 2) if context.small else (256, 151_936, 64)
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 3).to(context.device)
    low = logits.bfloat16()  # many are equal, so the rule for equal ones counts
    top_p = {"top_p": 0.95}
    cases: dict[str, tuple[torch.Tensor, int, dict[str, float]]] = {
        "float32": (logits, k, {}),
        "bfloat16": (low, k, {}),
        "bfloat16, top_p 0.95": (low, k, top_p),
        "bfloat16, K = 1": (low, 1, {}),
    }
    numbers: dict[str, Any] = {"rows": rows, "vocabulary": vocabulary, "k": k}
    wrong: list[str] = []
    for name, (given, wanted, ways) in cases.items():
        try:
            seconds, found = _compare(given, wanted, _sampling(rows, **ways))
            numbers[f"{name}: first draw, s"] = round(seconds, 2)  # with the compiler's time
        except Exception as error:  # noqa: BLE001 - the other cases are still of use
            found = [f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"]
        wrong += [f"{name}: {one}" for one in found]
    if not wrong and context.gpus:
        numbers |= _timed(low, k)
    if wrong:
        raise PartFailed("; ".join(wrong), numbers)
    what = f"{rows} x {vocabulary:,}, K = {k}: draws as tensor operations and a CPU do"
    if not context.gpus:
        return f"{what}, interpreted by Triton (no time is measured)", numbers
    speed = f"{numbers['draw_ms']:.3f} ms, {numbers['draw_share_of_limit']:.0%} of the memory limit"
    return f"{what} in {speed}; with top_p {numbers['draw_top_p_ms']:.3f} ms", numbers


def _take_small_blocks() -> None:
    """Let the small vocabulary fill its blocks: an interpreter is as slow for what is masked."""
    from asyncrl.engine.sampling import logits_triton

    logits_triton._BLOCK = 256  # noqa: SLF001 - of this process alone


def _sampling(rows: int, **ways: float) -> SamplingColumns:
    from asyncrl.engine.protocol import SamplingParams
    from asyncrl.engine.sampling.truncation import SamplingColumns

    return SamplingColumns.of([SamplingParams(1, **ways)] * rows)  # type: ignore[arg-type]


def _compare(logits: torch.Tensor, k: int, sampling: SamplingColumns) -> tuple[float, list[str]]:
    """Return the seconds of the first draw, and the kernels' differences from the references.

    In float32 the reference is the tensor operations on the same device, which lack a rule for
    ties. In bfloat16, where ties are common, it is the compiled code of a CPU.
    """
    import numpy as np
    import torch

    from asyncrl.engine.sampling.drawing import Streams, draw, draw_by_tensors, noise_seeds
    from asyncrl.engine.sampling.logits import FusedRows, ProcessedRows
    from asyncrl.engine.sampling.truncation import processed_logprobs
    from asyncrl.engine.sampling.verification import KeptColumns

    rows, wrong = len(logits), []
    seeds = np.arange(rows, dtype=np.uint64)
    streams = Streams(seeds, np.arange(rows), noise_seeds(seeds, 3))
    logprobs = processed_logprobs(logits.float().clone(), sampling)
    here = logprobs.cpu()
    by_tensors = logits.dtype == torch.float32
    want = draw_by_tensors(logprobs, k, streams) if by_tensors else draw(here, k, streams)
    fused, began = FusedRows(logits, sampling), time.perf_counter()
    got = fused.draw(k, streams)
    tokens, ids = got.tokens.cpu(), got.listed.ids.cpu()
    seconds = time.perf_counter() - began
    if (others := int((tokens != want.tokens.cpu()).sum())) > max(1, _OTHER_ROWS * rows):
        wrong.append(f"{others} of {rows} rows draw another token")
    if not torch.equal(ids, want.listed.ids.cpu()):
        wrong.append("lists have other ids")
    own = here.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    wrong += _apart("tokens", got.logprobs.cpu(), own)
    wrong += _apart("lists", got.listed.logprobs.cpu(), want.listed.logprobs.cpu())
    columns = KeptColumns(
        want.tokens.cpu().numpy().astype(np.int32), ids.numpy(), streams.positions,
        streams.noise_seeds, np.ones(rows, np.bool_), np.zeros(rows, np.bool_),
    )  # fmt: skip
    everything = np.arange(rows)
    found, known = (one.read(everything, columns) for one in (fused, ProcessedRows(here)))
    if np.count_nonzero(found.names != known.names) > max(1, _OTHER_ROWS * rows):
        wrong.append("tokens outside lists are named differently")
    wrong += _apart("looked up", *(torch.from_numpy(one.own) for one in (found, known)))
    return seconds, wrong


def _apart(what: str, found: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    both = found.isfinite() & wanted.isfinite()
    if not bool((found.isfinite() == wanted.isfinite()).all()):
        return [f"{what}: log-probabilities are finite at different places"]
    gap = float((found - wanted)[both].abs().max()) if bool(both.any()) else 0.0
    return [] if gap <= _APART else [f"{what}: log-probabilities differ by {gap:.1e} nats"]


def _timed(logits: torch.Tensor, k: int) -> dict[str, float]:
    """Time a draw and a look-up in ms, and the share of reading the logits once."""
    import numpy as np

    from asyncrl.engine.sampling.drawing import Streams, noise_seeds
    from asyncrl.engine.sampling.logits import FusedRows
    from asyncrl.engine.sampling.verification import KeptColumns

    rows = len(logits)
    seeds = np.arange(rows, dtype=np.uint64)
    streams = Streams(seeds, np.arange(rows), noise_seeds(seeds, 3))
    buffers = [logits, *(logits.clone() for _ in range(_BUFFERS - 1))]
    plain, cut = _sampling(rows), _sampling(rows, top_p=0.95)
    ids = np.tile(np.arange(k, dtype=np.int32), (rows, 1))
    columns = KeptColumns(
        ids[:, 0].copy(), ids, streams.positions, streams.noise_seeds,
        np.ones(rows, np.bool_), np.zeros(rows, np.bool_),
    )  # fmt: skip
    actions: dict[str, Callable[[int], object]] = {
        "draw": lambda i: FusedRows(buffers[i], plain).draw(k, streams),
        "draw_top_p": lambda i: FusedRows(buffers[i], cut).draw(k, streams),
        "look_up": lambda i: FusedRows(buffers[i], plain).read(np.arange(rows), columns),
    }
    bandwidth = copy_bytes_a_second()
    limit = 1000 * logits.nbytes / bandwidth
    numbers = {"copy_gb_a_second": bandwidth / 1e9, "limit_ms": limit}
    for name, action in actions.items():
        numbers[f"{name}_ms"] = ms = milliseconds(action, _BUFFERS)
        numbers[f"{name}_share_of_limit"] = limit / ms
    return numbers


def milliseconds(action: Callable[[int], object], inputs: int = 1) -> float:
    """Return the median time of consecutive GPU actions over 0 to `inputs` - 1, by events."""
    import torch

    for index in range(inputs):
        action(index)
    make: Any = torch.cuda.Event
    times: list[float] = []
    for _ in range(_ROUNDS):
        began, ended = (make(enable_timing=True) for _ in range(2))
        began.record()
        for index in range(_IN_A_ROW):
            action(index % inputs)
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / _IN_A_ROW)
    return statistics.median(times)


def copy_bytes_a_second() -> float:
    """Return the bytes per second that a copy within the GPU's memory reads and writes."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / (milliseconds(lambda _: target.copy_(source)) / 1000)


def draws(context: Context) -> Said:
    """Draw from one distribution very often and compare the counts with it."""
    import torch

    vocabulary, k, count = (400, 8, 30_000) if context.small else (2000, 8, 1 << 20)
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(1, vocabulary, generator=generator) * 1.5).to(context.device)
    numbers: dict[str, Any] = {"draws": count, "vocabulary": vocabulary, "false_alarm": FALSE_ALARM}
    low = []
    for name, ways in (
        ("plain", {}), ("temperature 0.7", {"temperature": 0.7}), ("top_p 0.9", {"top_p": 0.9}),
    ):  # fmt: skip
        expected, counts = _counted(logits, k, count, ways)
        numbers[f"p, {name}"] = p = chi_square_p(counts, expected)
        if p < FALSE_ALARM:
            low.append(f"{name}: p = {p:.1e}")
    if low:
        raise PartFailed(f"drawn tokens do not follow the distribution: {'; '.join(low)}", numbers)
    by = "the GPU's kernels" if context.gpus else "a CPU's compiled code"
    least = min(value for key, value in numbers.items() if key.startswith("p, "))
    said = f"{count:,} draws by {by} follow three distributions (least p {least:.3f}, alarm below"
    return f"{said} {FALSE_ALARM:g})", numbers


def _counted(
    logits: torch.Tensor, k: int, count: int, ways: dict[str, float]
) -> tuple[list[float], list[int]]:
    import numpy as np
    import torch

    from asyncrl.engine.sampling.drawing import Streams, noise_seeds
    from asyncrl.engine.sampling.logits import distributions_of
    from asyncrl.engine.sampling.truncation import processed_logprobs

    logprobs = processed_logprobs(logits.float().clone(), _sampling(1, **ways)).cpu().double()[0]
    rows = distributions_of(logits.clone(), _sampling(1, **ways), k)
    counts = torch.zeros(len(logprobs), dtype=torch.int64)
    for start in range(0, count, 1 << 16):
        seeds = np.arange(start, min(start + (1 << 16), count), dtype=np.uint64)
        streams = Streams(seeds, np.full(len(seeds), 5), noise_seeds(seeds, 1))
        tokens = rows.draw(k, streams, np.zeros(len(seeds), np.int64)).tokens.cpu()
        counts += torch.bincount(tokens, minlength=len(logprobs))
    probabilities = logprobs.exp()
    expected = (probabilities / probabilities.sum() * count).tolist()
    return expected, counts.tolist()


def chi_square_p(counts: Sequence[int], expected: Sequence[float], least: float = 10.0) -> float:
    """Return the probability of a chi-square as large as this; cells below `least` are merged."""
    import torch

    pairs = list(zip(counts, expected, strict=True))
    if any(found and not wanted for found, wanted in pairs):
        return 0.0
    cells = [pair for pair in pairs if pair[1] >= least]
    rest = [pair for pair in pairs if pair[1] < least]
    if (together := sum(wanted for _, wanted in rest)) >= least:
        cells.append((sum(found for found, _ in rest), together))
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in cells)
    half = torch.tensor([len(cells) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))
