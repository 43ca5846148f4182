"""What new weights cost an engine: the pause, staging while it decodes, and memory.

    python -m benchmarks.weights --quick --json FILE

A model of 411 MB in float32 (103M parameters, random) decodes in a thread while versions of it are
published, staged and installed, in float32 and in bfloat16 (`engine.dtype`). The way before
(commit e685cbe) takes turns with today's: it published in the trainer's float32, converted while
the engine was paused, and fingerprinted the parameters in the pause. The floor of an installation
is one copy of the engine's bytes to where they already have memory.

Ratios: `install_pause_vs_memcpy` and `before_pause_vs_memcpy` are the pause over that copy (the
worse of the two data types); `stage_vs_memcpy`; `step_during_stage`, the median decode step during
staging over that without. Run it on a quiet machine.

The same for a real vLLM (`benchmarks.weights_remote`), in float32: `vllm_install_pause_vs_memcpy`,
`vllm_before_pause_vs_memcpy` and `vllm_stage_vs_memcpy`. `--engine` chooses one of the engines;
`--engine sglang` measures a real SGLang, which has no way before.

Weights between nodes are measured by `benchmarks.weights_chain`, broadcasts by
`benchmarks.weights_broadcast`, what an engine proves before it is ready by
`benchmarks.weights_proof` (`--gb`: of the model's weights in bfloat16); `--part` chooses one of
the four.
"""

from __future__ import annotations

import statistics
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

from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.torch.core import CoreSettings, DecodeCore, ModuleWeights
from asyncrl.engine.torch.model import load_model
from asyncrl.engine.weights import StagedWeights
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import SHARED_MEMORY, WeightManifest
from asyncrl.wire.weights.reader import WeightBuffer
from asyncrl.wire.weights.writer import WeightPublisher
from benchmarks import weights_broadcast, weights_chain, weights_proof
from benchmarks.harness import parser_of, write_json
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
    1,
    1,
    1,
    1,
    nbytes=2_000_000,
    receivers=1,
    proof_gb=0.002,
    hidden=128,
    layers=2,
    kinds=("torch",),
)


@dataclass(slots=True)
class Way:
    """One way to bring new weights to an engine."""

    publisher: WeightPublisher
    stage: Callable[[WeightManifest], None]
    install: Callable[[int], None]
    """While no step runs."""
    staged_bytes: Callable[[], int]


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
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=_VOCABULARY,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            head_dim=64,
            max_position_embeddings=_MAX_LEN,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
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


def ways(engine: Decoding, dtype: torch.dtype) -> dict[str, Way]:
    """Today's way, and the one of commit e685cbe."""
    module = engine.core._model.module  # noqa: SLF001
    weights: ModuleWeights = engine.core._weights  # noqa: SLF001
    now = Way(
        WeightPublisher(SHARED_MEMORY, f"bench-now-{id(engine)}", dtype=dtype),
        engine.core.stage_weights,
        lambda version: engine.core.install_weights(version) and None,
        lambda: weights._staged._buffer.nbytes,  # noqa: SLF001
    )
    buffer = WeightBuffer()
    staged = StagedWeights(lambda _tensors: None, buffer)
    own = dict(module.state_dict(keep_vars=True))

    def install(version: int) -> None:
        with staged.install(version) as tensors, torch.no_grad():
            for name, tensor in tensors:
                own[name].copy_(tensor)
        fingerprint(module.state_dict(keep_vars=True).items())

    before = Way(
        WeightPublisher(SHARED_MEMORY, f"bench-before-{id(engine)}"),
        staged.stage,
        install,
        lambda: buffer.nbytes,
    )
    return {"now": now, "before": before}


def measure(path: str, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Milliseconds by way and part, in turns; medians. And bytes."""
    torch.set_num_threads(1)
    trainer = load_model(
        path, slots=1, max_len=64, device=torch.device("cpu"), dtype=torch.float32
    ).module
    tensors = dict(trainer.named_parameters())
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with decoding(path, dtype) as engine:
        size = sum(p.nbytes for p in engine.core._model.module.parameters())  # noqa: SLF001
        source, target = (np.ones(size, np.uint8) for _ in range(2))
        both = ways(engine, dtype)
        memory: dict[str, dict[str, int]] = {}
        try:
            for version in range(1, repeats + 2):  # the first one touches the memory
                for name, way in both.items():
                    _once(engine, way, tensors, 2 * version, found[name])
                    memory[name] = {"staged": way.staged_bytes()}
                with engine.lock:
                    _timed(lambda: np.copyto(target, source), found["floor"]["memcpy"])
        finally:
            for name, way in both.items():
                memory[name]["published"] = 2 * way.publisher._nbytes  # noqa: SLF001
                way.publisher.close()
    medians = {
        name: {part: 1e3 * statistics.median(v[1:]) for part, v in parts.items() if v[1:]}
        for name, parts in found.items()
    }
    return {"engine_bytes": size, "milliseconds": medians, "memory_bytes": memory}


def _once(
    engine: Decoding,
    way: Way,
    tensors: dict[str, torch.Tensor],
    version: int,
    found: dict[str, list[float]],
) -> None:
    """Publish, stage and install one version while the engine decodes."""
    engine.wait()
    manifests: list[WeightManifest] = []
    _timed(
        lambda: manifests.append(way.publisher.publish(tensors.items(), version)), found["publish"]
    )
    quiet = time.perf_counter()
    engine.wait()
    began = time.perf_counter()
    way.stage(manifests[0])
    ended = time.perf_counter()
    engine.wait()  # until the steps that ran meanwhile are noted
    found["stage"].append(ended - began)
    for part, interval in (("step during stage", (began, ended)), ("step", (quiet, began))):
        step = engine.median_step(*interval)
        if step is not None:
            found[part].append(step)
    with engine.lock:
        _timed(lambda: way.install(version), found["pause"])


def _timed(call: Callable[[], object], into: list[float]) -> None:
    began = time.perf_counter()
    call()
    into.append(time.perf_counter() - began)


def ratios_of(raw: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The worse of both data types. A ratio is missing if no step fell into what it compares."""

    def worst(name: str, part: str, below: str, of: str | None = None) -> float | None:
        pairs = (
            (one["milliseconds"][name].get(part), one["milliseconds"][of or name].get(below))
            for one in raw.values()
        )
        return max((a / b for a, b in pairs if a is not None and b is not None), default=None)

    ratios = {
        "install_pause_vs_memcpy": worst("now", "pause", "memcpy", "floor"),
        "before_pause_vs_memcpy": worst("before", "pause", "memcpy", "floor"),
        "stage_vs_memcpy": worst("now", "stage", "memcpy", "floor"),
        "step_during_stage": worst("now", "step during stage", "step"),
    }
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def remote_ratios(kind: str, raw: dict[str, Any]) -> dict[str, float]:
    times = raw["milliseconds"]
    floor = times["floor"]["memcpy"]
    ratios = {
        f"{kind}_install_pause_vs_memcpy": times["now"]["pause"] / floor,
        f"{kind}_stage_vs_memcpy": times["now"]["stage"] / floor,
    }
    if "before" in times:
        ratios[f"{kind}_before_pause_vs_memcpy"] = times["before"]["pause"] / floor
    return ratios


def print_remote_table(kind: str, raw: dict[str, Any], ratios: dict[str, float]) -> None:
    for way, parts in raw["milliseconds"].items():
        print(f"{kind} {way:8}" + "".join(f"  {part} {ms:.1f} ms" for part, ms in parts.items()))
    for name, value in ratios.items():
        print(f"{name:28} {value:.2f}")


def print_table(raw: dict[str, dict[str, Any]], ratios: dict[str, float]) -> None:
    parts = ["publish", "stage", "pause", "step", "step during stage"]
    print(f"{'engine':10} {'way':8}" + "".join(f"{part:>19}" for part in parts) + "     (ms)")
    for dtype, one in raw.items():
        times = one["milliseconds"]
        for name in ("before", "now"):
            cells = "".join(f"{times[name].get(part, float('nan')):19.1f}" for part in parts)
            memory = {key: value >> 20 for key, value in one["memory_bytes"][name].items()}
            print(f"{dtype:10} {name:8}{cells}     MiB: {memory}")
        print(f"{dtype:10} floor    copy of {one['engine_bytes'] >> 20} MiB: "
              f"{times['floor']['memcpy']:.1f} ms")  # fmt: skip
    for name, value in ratios.items():
        print(f"{name:28} {value:.2f}")


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "7 versions of each kind, not 25")
    parser.add_argument(
        "--engine", choices=("torch", "vllm", "sglang"), help="only this one; default: torch, vllm"
    )
    parser.add_argument(
        "--part", choices=("engines", "chain", "broadcast", "proof"), help="only this one"
    )
    parser.add_argument("--gb", type=float, help="of the model of `--part proof`; default: 1")
    arguments = parser.parse_args(given)
    effort = SMOKE if arguments.smoke else QUICK if arguments.quick else FULL
    raw: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    if arguments.part in (None, "chain") and arguments.engine is None:
        raw["chain"] = weights_chain.measure(
            effort.nbytes,
            effort.chain_repeats,
            effort.delta_steps,
            effort.receivers,
            lambda folder: make_model(folder, hidden=effort.hidden // 2, layers=effort.layers // 2),
        )
        ratios |= weights_chain.ratios_of(raw["chain"])
        weights_chain.print_table(raw["chain"], ratios)
    if arguments.part in (None, "broadcast") and arguments.engine is None:
        raw["broadcast"] = weights_broadcast.measure(
            effort.nbytes, effort.broadcast_repeats, four=effort.receivers == 4
        )
        of_broadcasts = weights_broadcast.ratios_of(raw["broadcast"])
        ratios |= of_broadcasts
        weights_broadcast.print_table(raw["broadcast"], of_broadcasts)
    if arguments.part == "proof" or (arguments.part is None and arguments.engine is None):
        gb = arguments.gb or effort.proof_gb
        with TemporaryDirectory() as folder:
            path = make_model(Path(folder), hidden=effort.hidden, layers=_layers(gb, effort.hidden))
            raw["proof"] = weights_proof.measure(path, arguments.engine or "torch")
        ratios |= weights_proof.ratios_of(raw["proof"])
        weights_proof.print_table(raw["proof"], ratios)
    if arguments.part in (None, "engines"):
        kinds = (arguments.engine,) if arguments.engine else effort.kinds
        _measure_engines(kinds, effort, raw, ratios)
    if arguments.json:
        write_json(arguments.json, "weights", raw, ratios, smoke=arguments.smoke)


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
            print_table(found, ratios_of(found))
        for kind in (one for one in kinds if one != "torch"):
            raw[kind] = measure_remote(kind, path, torch.float32, effort.repeats)
            of_kind = remote_ratios(kind, raw[kind])
            print_remote_table(kind, raw[kind], of_kind)
            ratios |= of_kind


if __name__ == "__main__":
    main()
