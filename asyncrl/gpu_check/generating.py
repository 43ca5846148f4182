"""Parts about engines: tokens per second, the noise floor, new weights.

All use one random model, with a trained model's spread of logits so that rounding acts alike.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError, EngineStartError
from asyncrl.engine.factory import create_engine
from asyncrl.engine.protocol import Engine, GenerateRequest, SamplingParams
from asyncrl.generator.background import BackgroundTasks
from asyncrl.generator.noise_floor import NoiseFloorProbe
from asyncrl.gpu_check.parts import Context, LeftOut, PartFailed, Said
from asyncrl.monitoring.terminal.formatting import size
from asyncrl.rollout.trajectory import SampleId, TrajectoryBuilder, VerifiableTrajectory
from asyncrl.simulation.lengths import Survival
from asyncrl.wire.records.noise_floor import NoiseFloor

LARGE = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
_SPREAD = 4.0
_WORST_NATS = 0.3
"""Mean log-probability difference above which decoding and scoring disagree."""


def random_model(context: Context) -> Path:
    """Return the folder of the parts' model; the first caller makes it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = context.folder / ("small-model" if context.small else "model")
    if path.exists():
        return path
    shape = SMALL if context.small else LARGE
    torch.manual_seed(0)
    with torch.device(context.device):
        model = Qwen3ForCausalLM(Qwen3Config(**shape, eos_token_id=None, bos_token_id=None))
    with torch.no_grad():
        output = model.get_output_embeddings().weight
        norm = _SPREAD / (output.float().std() * shape["hidden_size"] ** 0.5)
        model.model.norm.weight.fill_(float(norm))
    with tempfile.TemporaryDirectory(dir=context.folder) as unfinished:
        model.to(torch.bfloat16).save_pretrained(unfinished)
        Path(unfinished).rename(path)
        Path(unfinished).mkdir()  # for the clean-up to find
    return path


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an engine."""

    rows: int
    prompt: int
    tokens: int

    @classmethod
    def of(cls, context: Context) -> Self:
        """Return the work for the size of the check."""
        return cls(4, 8, 24) if context.small else cls(64, 64, 256)


def vllm(context: Context) -> Said:
    """Measure vLLM without drafts, and vLLM alone."""
    environment = dict(os.environ)  # an engine writes what vLLM reads into it
    said, numbers = _engine_part("vLLM", context, {"kind": "vllm"})
    alone = _vllm_alone(context, environment)
    share = numbers["tokens_a_second"] / alone if alone else None
    beside = f"{share:.0%} of `vllm bench latency`" if share else "`vllm bench latency` failed"
    return f"{said}; {beside}", {**numbers, "bench_tokens_a_second": alone, "share": share}


def sglang(context: Context) -> Said:
    """Measure SGLang without drafts."""
    from asyncrl.engine.sglang.config import check_interpreter

    try:
        check_interpreter(EngineConfig(kind="sglang").sglang)
    except EngineError as error:
        raise LeftOut(f"SGLang is not installed ({error})") from error
    return _engine_part("SGLang", context, {"kind": "sglang"})


def _engine_part(
    name: str, context: Context, settings: Mapping[str, Any], max_draft_tokens: int = 0
) -> Said:
    work = Work.of(context)
    config = EngineConfig(
        device=context.device, slots=work.rows, max_model_len=work.prompt + work.tokens,
        **settings,
    )  # fmt: skip
    cache = CacheConfig(max_draft_tokens=max_draft_tokens, enabled=max_draft_tokens > 0)
    made = create_engine(config, str(random_model(context)), cache_config=cache, seed=1)
    vocabulary = (SMALL if context.small else LARGE)["vocab_size"]
    numbers = asyncio.run(_speed(made, work, vocabulary))
    said = (
        f"{name}: {work.rows} rows, {numbers['tokens_a_second']:,.0f} tokens/s, "
        f"{numbers['ms_a_step']:.1f} ms a step ({numbers['steps']} steps); ready after "
        f"{numbers['start_seconds']:.0f} s, first round {numbers['first_round_seconds']:.1f} s"
    )
    return said, numbers


engine = partial(_engine_part, "the torch engine", settings={"kind": "torch"})
_VLLM = {"kind": "vllm"}
vllm_drafts = partial(_engine_part, "vLLM with drafts", settings=_VLLM, max_draft_tokens=16)
"""The second round repeats the first."""
_TWO_GPUS = {**_VLLM, "vllm": {"tensor_parallel_size": 2}}
vllm_tp2 = partial(_engine_part, "vLLM on two GPUs", settings=_TWO_GPUS)


async def _speed(made: Engine, work: Work, vocabulary: int) -> dict[str, Any]:
    """Run two rounds of the same requests; the first one compiles and warms up."""
    began = time.perf_counter()
    await made.start()
    ready = time.perf_counter()
    try:
        first = await _round(made, work, vocabulary)
        warm, before = time.perf_counter(), made.stats().steps
        second = await _round(made, work, vocabulary)
        seconds, steps = time.perf_counter() - warm, made.stats().steps - before
    finally:
        await made.close()
    tokens = sum(map(len, second))
    if tokens != work.rows * work.tokens:
        raise PartFailed(f"{tokens} tokens were generated, not {work.rows * work.tokens}")
    if not all(np.isfinite(one).all() for one in (*first, *second)):
        raise PartFailed("log-probabilities of drawn tokens are not finite")
    return {
        "rows": work.rows, "tokens": tokens, "steps": steps, "seconds": seconds,
        "tokens_a_second": tokens / seconds, "ms_a_step": 1000 * seconds / max(steps, 1),
        "start_seconds": ready - began, "first_round_seconds": warm - ready,
    }  # fmt: skip


async def _round(made: Engine, work: Work, vocabulary: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, vocabulary, (work.rows, work.prompt)).astype(np.int32)

    async def response(index: int) -> np.ndarray[Any, Any]:
        sampling = SamplingParams(work.tokens, seed=index)
        asked = GenerateRequest(f"r{index}", f"p{index}", prompts[index], sampling)
        chunks = [chunk.logprobs async for chunk in made.generate(asked)]
        return np.concatenate(chunks)

    return list(await asyncio.gather(*map(response, range(work.rows))))


def _vllm_alone(context: Context, environment: Mapping[str, str]) -> float | None:
    """Return tokens per second of `vllm bench latency` with the same work; None if it fails."""
    work, result = Work.of(context), context.folder / "vllm-bench.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "latency"),
            *("--model", str(random_model(context)), "--skip-tokenizer-init"),
            "--disable-detokenize",
            *("--batch-size", str(work.rows), "--input-len", str(work.prompt)),
            *("--output-len", str(work.tokens), "--max-model-len", str(work.prompt + work.tokens)),
            *("--num-iters-warmup", "1", "--num-iters", "2", "--output-json", str(result)),
        ],
        check=False,
        env=environment,
    )  # what it prints stands in the part's log
    if done.returncode or not result.exists():
        return None
    seconds: float = json.loads(result.read_text(encoding="utf-8"))["avg_latency"]
    return work.rows * work.tokens / seconds


@dataclass(frozen=True)
class Case:
    """The conditions of a noise floor measurement."""

    model: str
    kind: Literal["torch", "vllm"]
    dtype: Literal["auto", "float32", "bfloat16"]
    top_k: int
    responses: int
    length: int
    engine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """The measured noise floor."""

    measured: NoiseFloor
    outside: float
    model: float
    """Rejected share by the simulator's model."""


async def measure(case: Case, path: Path) -> Found:
    """Generate responses with an engine and verify each of them again."""
    config = EngineConfig(
        kind=case.kind, dtype=case.dtype, slots=32, max_model_len=case.length + 16,
        top_k_logprobs=case.top_k, **case.engine,
    )  # fmt: skip
    made = create_engine(config, str(path), cache_config=CacheConfig(), seed=1)
    await made.start()
    try:
        sampling = SamplingParams(max_tokens=case.length, top_k_logprobs=case.top_k)
        numbers = range(case.responses)
        responses = await asyncio.gather(*(_response(made, sampling, number) for number in numbers))
        probe, tasks = NoiseFloorProbe(made, sampling, every=1), BackgroundTasks()
        for response in responses:
            probe.consider(response, tasks)
            await probe.idle()
        tasks.raise_failure()
    finally:
        await made.close()
    listed = [(one.topk_ids == one.tokens[:, None]).any(axis=1).mean() for one in responses]
    outside = 1.0 - float(np.mean(listed))
    noise = (probe.measured.abs_mean or 0.0) / 2
    model = Survival("block", decisive=1.0, outside=outside, noise=noise)
    return Found(probe.measured, outside, 1.0 - model.expected([case.length], 0.0))


async def _response(made: Engine, sampling: SamplingParams, index: int) -> VerifiableTrajectory:
    prompt = np.array([1 + index % 8, 2, 3], np.int32)
    builder = TrajectoryBuilder(SampleId(index, 0), f"prompt {index % 8}", prompt)
    own = replace(sampling, seed=index)
    async for chunk in made.generate(GenerateRequest(f"r{index}", builder.prompt_id, prompt, own)):
        chunk.append_to(builder)
    return builder.finish("length")


def _noise_floor_part(context: Context, kind: Literal["torch", "vllm"]) -> Said:
    """Measure what verification rejects under unchanged weights, with the remedies that exist."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if context.gpus else "float32"
    responses, length = (2, 16) if context.small else (32, 1024)
    numbers: dict[str, Any] = {"dtype": dtype, "responses": responses, "length": length}
    sentences, path = [], random_model(context)
    for name, settings in _variants().items():
        try:
            EngineConfig(kind=kind, **settings)
        except ValueError as error:  # the configuration refuses it
            numbers[name] = f"refused: {error}"
            continue
        case = Case("random", kind, dtype, 64, responses, length, settings)
        try:
            found = asyncio.run(measure(case, path)).measured
        except EngineError as error:
            if not _lacks_capability(error, settings):
                raise PartFailed(f"{name}: {type(error).__name__}: {error}", numbers) from error
            numbers[name] = f"refused: {error}"
            continue
        nats, share = found.abs_mean or 0.0, found.share or 0.0
        numbers[name] = {"nats": nats, "rejected": share, "cut": found.cut_samples}
        sentences.append(f"{name}: {nats:.1e} nats a token, {share:.1%} rejected")
        if nats > _WORST_NATS:
            raise PartFailed(f"{name}: decoding and scoring differ by {nats:.2f} nats", numbers)
    if not sentences:
        raise PartFailed("the engine refused all of these settings", numbers)
    return f"{dtype}, {length} tokens; {'; '.join(sentences)}", numbers


noise_floor = partial(_noise_floor_part, kind="torch")
vllm_noise_floor = partial(_noise_floor_part, kind="vllm")


def _lacks_capability(error: EngineError, settings: Mapping[str, Any]) -> bool:
    """Return True if the GPU is too old for batch invariance; other errors are faults."""
    asked = settings.get("batch_invariant", False) and isinstance(error, EngineStartError)
    return asked and "capability" in str(error).lower()


def _variants() -> dict[str, dict[str, Any]]:
    ways: dict[str, dict[str, Any]] = {
        "logits in the model's type": {"logits_dtype": "model"},
        "float32 logits": {"logits_dtype": "float32"},
        "batch-invariant": {"batch_invariant": True},
    }
    known = {name: way for name, way in ways.items() if set(way) <= set(EngineConfig.model_fields)}
    return known or {"as it is": {}}


def _weights_part(name: str, context: Context, kind: Literal["torch", "vllm"]) -> Said:
    """Install new weights twice; vLLM's first installation is proved against a reload."""
    work = Work.of(context)
    config = EngineConfig(
        kind=kind, device=context.device, slots=work.rows, max_model_len=work.prompt + work.tokens
    )
    path = random_model(context)
    cache = CacheConfig(max_draft_tokens=0, enabled=False)
    made = create_engine(config, str(path), cache_config=cache, seed=1)
    numbers = asyncio.run(_installed(made, config, path, context))
    one, other = numbers["installations"]
    said = (
        f"{name}: {size(1e9 * numbers['gb'])}, staged and installed in {sum(one):.2f} s the "
        f"first time and {sum(other):.2f} s the second (pauses {one[1]:.3f} and {other[1]:.3f} s)"
    )
    return said, numbers


weights = partial(_weights_part, "the torch engine", kind="torch")
vllm_weights = partial(_weights_part, "vLLM", kind="vllm")


async def _installed(
    made: Engine, config: EngineConfig, path: Path, context: Context
) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl.wire.weights.fingerprint import fingerprint
    from asyncrl.wire.weights.layout import SHARED_MEMORY
    from asyncrl.wire.weights.writer import WeightPublisher

    dtype = getattr(torch, config.weights_dtype(on_cpu=context.device == "cpu"))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    tensors = {one: value.detach() for one, value in model.named_parameters()}
    await made.start()
    installations = []
    try:
        with WeightPublisher(SHARED_MEMORY, f"gpu-check-{time.monotonic_ns()}") as publisher:
            for version in (1, 2):
                for value in tensors.values():
                    value.mul_(1.0 + 2.0**-6)  # not rounded away in bfloat16
                manifest = publisher.publish(tensors.items(), version)
                began = time.perf_counter()
                await made.stage_weights(manifest)
                staged = time.perf_counter()
                await made.pause()
                await made.install_weights(version)
                await made.resume()
                installations.append((staged - began, time.perf_counter() - staged))
                wanted = fingerprint(model.state_dict().items()).tensors
                found = (await made.fingerprint()).tensors
                other = [name for name in found if not found[name].agrees_with(wanted[name])]
                if other or not found:
                    raise PartFailed(
                        f"after installation {version} {len(other)} of {len(found)} tensors are "
                        f"not what was published: {', '.join(other[:3])}"
                    )
    finally:
        await made.close()
    nbytes = sum(value.nbytes for value in tensors.values())
    return {"gb": nbytes / 1e9, "installations": installations}
