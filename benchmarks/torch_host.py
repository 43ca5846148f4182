"""What does a step of the torch engine cost on the host, with a model that costs nothing?

    python -m benchmarks.torch_host [--quick] [--json FILE]

256 rows of a random model with one layer and a hidden size of 16 generate 96 tokens each, as in a
run: K = 8, siblings share prompts, the cache is fed, and the planner keeps its books; full steps
have no room for drafts. Medians over rounds of the thread's CPU time, in µs per row and step:
`forward` is the model's forward pass, `draw` from logits to tokens and lists, and `host`
(**torch_host_us_per_row_step**) all the rest, which is our own Python. What a request costs is
spread over its tokens; the event loop and the decode thread are not part of it.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import numpy as np
import torch

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.sampling import logits
from asyncrl.engine.torch.core import CoreSettings, DecodeCore
from asyncrl.engine.torch.model import SlotModel, load_model
from asyncrl.engine.torch.step_kernels import warm_up
from benchmarks.harness import medians, parser_of, pick, report, table
from benchmarks.tiny_models import qwen3

P = ParamSpec("P")
R = TypeVar("R")

ROWS = 256
TOKENS = 96
GROUP = 8
K = 8


class Clock:
    """CPU seconds of this thread inside the functions that it times."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[P, R]) -> Callable[P, R]:
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began

        return run


def smallest_model(folder: Path, rows: int) -> SlotModel:
    """One layer, 16 numbers per token: the host is all there is."""
    qwen3(
        32, 16, 1, intermediate_size=16, head_dim=8, max_position_embeddings=128,
        tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    cpu = torch.device("cpu")
    return load_model(str(folder), slots=rows, max_len=128, device=cpu, dtype=torch.float32)


def core_of(model: SlotModel, rows: int) -> DecodeCore:
    """A core with a cache, whose steps have room for their rows and nothing else."""
    settings = CoreSettings(
        max_step_tokens=rows, max_draft_tokens=8, max_prefill_tokens=4096, chunk_tokens=16, top_k=K
    )
    return DecodeCore(model, settings, RolloutCache(CacheConfig(max_bytes=1 << 26)), seed=0)


def requests(round_: int, rows: int, tokens: int) -> list[GenerateRequest]:
    """That many requests in groups, with the prompts of a round."""
    rng = np.random.default_rng(round_)
    out = []
    for group in range(rows // GROUP):
        prompt = rng.integers(0, 32, 16).astype(np.int32)
        for sample in range(GROUP):
            sampling = SamplingParams(max_tokens=tokens, top_k_logprobs=K, seed=len(out))
            name = f"{round_}.{group}.{sample}"
            out.append(GenerateRequest(name, f"{round_}.{group}", prompt, sampling))
    return out


def measure(core: DecodeCore, round_: int, rows: int, tokens: int) -> dict[str, float]:
    """Microseconds per row and step of one round, by part."""
    forward, draw = Clock(), Clock()
    asked, steps = requests(round_, rows, tokens), core.stats().steps
    with (
        mock.patch.object(SlotModel, "forward", forward.timed(SlotModel.forward)),
        mock.patch.object(logits, "draw", draw.timed(logits.draw)),
    ):
        began = time.thread_time()
        for one in asked:
            core.add(one)
        while core.has_work:
            core.step()
        spent = time.thread_time() - began
    each = 1e6 / ((core.stats().steps - steps) * rows)
    return {
        "forward": forward.seconds * each,
        "draw": draw.seconds * each,
        "host": (spent - forward.seconds - draw.seconds) * each,
    }


def run(rounds: int, rows: int, tokens: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = smallest_model(Path(folder), rows)
    warm_up(model, listed=K, drafting=True)
    core = core_of(model, rows)
    measure(core, 0, rows, tokens)  # everything loaded, memory touched
    measured = [measure(core, 1 + i, rows, tokens) for i in range(rounds)]
    return {"us_per_row_step": medians(measured), "rounds": measured}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_of(__doc__, "fewer rounds").parse_args(arguments)
    rows, tokens = (16, 24) if options.smoke else (ROWS, TOKENS)
    results = run(pick(options, 25, 5, 1), rows, tokens)
    parts = results["us_per_row_step"]
    shown = table(f"torch engine, {rows} rows, µs per row and step", "part,µs", parts.items())
    report(options, "torch_host", results, {"torch_host_us_per_row_step": parts["host"]}, shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
