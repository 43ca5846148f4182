"""What do new weights cost an engine: how long is the pause, and do steps slow down before it?

    python -m benchmarks.weights [--quick] [--engine torch|vllm|sglang] [--json FILE]
    python -m benchmarks.weights --part engines|chain|broadcast|proof

A random model of 103M parameters decodes in a thread while versions of it are published, staged and
installed, in float32 and in bfloat16 (`engine.dtype`); in a real vLLM or SGLang in float32
(`benchmarks.weights_remote`). The statistic is the median over versions. Ratios to one copy of the
engine's bytes to where they already have memory: `install_pause_vs_memcpy` (the worse data type),
`stage_vs_memcpy`; and `step_during_stage`, the median decode step during staging over that without.
Weights between nodes are measured by `benchmarks.weights_chain`, broadcasts by
`benchmarks.weights_broadcast`, what an engine proves before it is ready by
`benchmarks.weights_proof`.
"""

import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.table import Table

from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.torch.core import CoreSettings, DecodeCore
from asyncrl.engine.torch.model import load_model
from asyncrl.wire.weights.layout import SHARED_MEMORY
from asyncrl.wire.weights.writer import WeightPublisher
from benchmarks import weights_broadcast, weights_chain, weights_proof
from benchmarks.harness import parser_of, pick, report, table
from benchmarks.tiny_models import qwen3
from benchmarks.weights_remote import measure_remote

_ROWS = 4
_PROMPT = 16
_MAX_LEN = 4096
_VOCABULARY = 4096
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FEWEST_STEPS = 3
"""Decode steps that are waited for between two measurements."""


@dataclass(frozen=True)
class Effort:
    repeats: int
    """Versions of each kind."""
    chain_repeats: int
    delta_steps: int
    broadcast_repeats: int
    nbytes: int = weights_chain.NBYTES
    """That chains and broadcasts pass on."""
    receivers: int = 4
    """Of which there are several."""
    hidden: int = 1024
    layers: int = 8
    proof_gb: float = 1.0
    """Of the model whose installation is proved."""
    kinds: tuple[str, ...] = ("torch", "vllm")
    """Engines, unless one is chosen."""


QUICK, FULL = Effort(7, 3, 4, 5), Effort(25, 9, 12, 15)
SMOKE = Effort(
    1, 1, 1, 1, nbytes=2_000_000, receivers=1, proof_gb=0.002, hidden=128, layers=2,
    kinds=("torch",),
)  # fmt: skip


@dataclass(slots=True)
class Decoding:
    """A core that decodes in a thread. `lock` is held by every step: hold it to pause."""

    core: DecodeCore
    lock: threading.Lock = field(default_factory=threading.Lock)
    steps: list[tuple[float, float]] = field(default_factory=list)
    """When each began, and its seconds."""

    def run(self, stop: threading.Event) -> None:
        """Decode until told to stop; requests that end are replaced."""
        count = 0
        while not stop.is_set():
            with self.lock:
                for _ in range(_ROWS - self.core.stats().running - self.core.stats().waiting):
                    count += 1
                    self.core.add(_request(f"r{count}"))
                began = time.perf_counter()
                self.core.step()
                self.steps.append((began, time.perf_counter() - began))
            time.sleep(0)  # the lock is not fair

    def wait(self) -> None:
        wanted = len(self.steps) + _FEWEST_STEPS
        while len(self.steps) < wanted:
            time.sleep(0.005)

    def median_step(self, began: float, ended: float) -> float | None:
        """Of the steps that ran in an interval; None if none did."""
        during = [
            seconds for start, seconds in self.steps if start < ended and start + seconds > began
        ]
        return statistics.median(during) if during else None


def make_model(folder: Path, *, hidden: int, layers: int) -> str:
    """Save a random Qwen3: 103M parameters with a hidden size of 1024 and 8 layers."""
    settings = {
        "intermediate_size": hidden * 11 // 4,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": _MAX_LEN,
    }
    qwen3(_VOCABULARY, hidden, layers, **settings).save_pretrained(folder)
    return str(folder)


def _request(name: str) -> GenerateRequest:
    prompt = np.arange(_PROMPT, dtype=np.int32)
    return GenerateRequest(name, "", prompt, SamplingParams(_MAX_LEN // 2, top_k_logprobs=8))


@contextmanager
def decoding(path: str, dtype: torch.dtype) -> Iterator[Decoding]:
    """A model that decodes inside the block."""
    cpu = torch.device("cpu")
    model = load_model(path, slots=_ROWS, max_len=_MAX_LEN, device=cpu, dtype=dtype)
    core = DecodeCore(model, CoreSettings(None, 0, 4096, 16, 8), None, seed=0)
    engine, stop = Decoding(core), threading.Event()
    thread = threading.Thread(target=engine.run, args=(stop,))
    thread.start()
    try:
        engine.wait()
        yield engine
    finally:
        stop.set()
        thread.join()


def measure(path: str, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Milliseconds by part; medians. And bytes."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    trainer = load_model(path, slots=1, max_len=64, device=cpu, dtype=torch.float32).module
    tensors = dict(trainer.named_parameters())
    found: dict[str, list[float]] = defaultdict(list)
    name = f"bench-{id(found)}"
    with decoding(path, dtype) as engine, WeightPublisher(SHARED_MEMORY, name, dtype=dtype) as made:
        size = sum(p.nbytes for p in engine.core._model.module.parameters())  # noqa: SLF001
        source, target = (np.ones(size, np.uint8) for _ in range(2))
        for version in range(1, repeats + 2):  # the first one touches the memory
            _once(engine, made, tensors, version, found)
            with engine.lock:
                _timed(lambda: np.copyto(target, source), found["memcpy"])
        memory = {
            "staged": engine.core._weights._whole.nbytes,  # noqa: SLF001
            "published": 2 * made._nbytes,  # noqa: SLF001
        }
    medians = {part: 1e3 * statistics.median(v[1:]) for part, v in found.items() if v[1:]}
    return {"engine_bytes": size, "milliseconds": medians, "memory_bytes": memory}


def _once(
    engine: Decoding,
    publisher: WeightPublisher,
    tensors: dict[str, torch.Tensor],
    version: int,
    found: dict[str, list[float]],
) -> None:
    """Publish, stage and install one version while the engine decodes."""
    engine.wait()
    began = time.perf_counter()
    manifest = publisher.publish(tensors.items(), version)
    quiet = time.perf_counter()
    found["publish"].append(quiet - began)
    engine.wait()
    began = time.perf_counter()
    engine.core.stage_weights(manifest)
    ended = time.perf_counter()
    engine.wait()  # until the steps that ran meanwhile are noted
    found["stage"].append(ended - began)
    for part, interval in (("step during stage", (began, ended)), ("step", (quiet, began))):
        step = engine.median_step(*interval)
        if step is not None:
            found[part].append(step)
    with engine.lock:
        _timed(lambda: engine.core.install_weights(version), found["pause"])


def _timed(call: Callable[[], object], into: list[float]) -> None:
    began = time.perf_counter()
    call()
    into.append(time.perf_counter() - began)


def ratios_of(raw: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The worse of both data types. A ratio is missing if no step fell into what it compares."""
    asked = {
        "install_pause_vs_memcpy": ("pause", "memcpy"),
        "stage_vs_memcpy": ("stage", "memcpy"),
        "step_during_stage": ("step during stage", "step"),
    }
    times = [one["milliseconds"] for one in raw.values()]
    known = {
        name: [one[part] / one[below] for one in times if part in one and below in one]
        for name, (part, below) in asked.items()
    }
    return {name: max(values) for name, values in known.items() if values}


def remote_ratios(kind: str, raw: dict[str, Any]) -> dict[str, float]:
    times = raw["milliseconds"]
    return {
        f"{kind}_install_pause_vs_memcpy": times["pause"] / times["memcpy"],
        f"{kind}_stage_vs_memcpy": times["stage"] / times["memcpy"],
    }


def table_of(engines: dict[str, dict[str, Any]]) -> Table:
    """Milliseconds of each engine or data type."""
    parts = list(dict.fromkeys(part for one in engines.values() for part in one["milliseconds"]))
    return table(
        "milliseconds; memcpy: of the engine's bytes",
        ("engine", *parts),
        (
            (name, *(one["milliseconds"].get(part) for part in parts))
            for name, one in engines.items()
        ),
    )


def main(given: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "7 versions of each kind, not 25")
    kinds = ("torch", "vllm", "sglang")
    parser.add_argument("--engine", choices=kinds, help="only this one; default: torch, vllm")
    parts = ("engines", "chain", "broadcast", "proof")
    parser.add_argument("--part", choices=parts, help="only this one")
    parser.add_argument("--gb", type=float, help="of the model of `--part proof`; default: 1")
    options = parser.parse_args(given)
    effort = pick(options, FULL, QUICK, SMOKE)
    raw: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    shown: list[Table] = []
    every = options.part is None and options.engine is None
    if every or options.part == "chain":
        raw["chain"] = weights_chain.measure(
            effort.nbytes,
            effort.chain_repeats,
            effort.delta_steps,
            effort.receivers,
            lambda folder: make_model(folder, hidden=effort.hidden // 2, layers=effort.layers // 2),
            smoke=options.smoke,
        )
        ratios |= weights_chain.ratios_of(raw["chain"])
        shown += weights_chain.tables(raw["chain"])
    if every or options.part == "broadcast":
        raw["broadcast"] = weights_broadcast.measure(
            effort.nbytes, effort.broadcast_repeats, four=effort.receivers == 4
        )
        ratios |= weights_broadcast.ratios_of(raw["broadcast"])
        shown.append(weights_broadcast.table_of(raw["broadcast"]))
    if every or options.part == "proof":
        layers = _layers(options.gb or effort.proof_gb, effort.hidden)
        with TemporaryDirectory() as folder:
            path = make_model(Path(folder), hidden=effort.hidden, layers=layers)
            raw["proof"] = weights_proof.measure(path, options.engine or "torch")
        ratios["proof_gb_per_second"] = raw["proof"]["bytes"] / raw["proof"]["seconds"] / 1e9
        shown.append(table("proof", "what,value", raw["proof"].items()))
    if options.part in (None, "engines"):
        chosen = (options.engine,) if options.engine else effort.kinds
        _measure_engines(chosen, effort, raw, ratios)
        shown.append(table_of({n: one for n, one in raw.items() if "milliseconds" in one}))
    report(options, "weights", raw, ratios, *shown)
    return 0


def _layers(gb: float, hidden: int) -> int:
    """So many have the numbers, with `make_model`'s sizes, that take `gb` in bfloat16."""
    each = hidden * (4 * hidden + 3 * (hidden * 11 // 4))
    return max(1, round((gb * 1e9 / 2 - _VOCABULARY * hidden) / each))


def _measure_engines(
    kinds: Sequence[str], effort: Effort, raw: dict[str, Any], ratios: dict[str, float]
) -> None:
    with TemporaryDirectory() as folder:
        path = make_model(Path(folder), hidden=effort.hidden, layers=effort.layers)
        if "torch" in kinds:
            found = {n: measure(path, dtype, effort.repeats) for n, dtype in _DTYPES.items()}
            raw |= found
            ratios |= ratios_of(found)
        for kind in (one for one in kinds if one != "torch"):
            raw[kind] = measure_remote(kind, path, torch.float32, effort.repeats)
            ratios |= remote_ratios(kind, raw[kind])


if __name__ == "__main__":
    sys.exit(main())
