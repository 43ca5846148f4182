"""Policy versions of a language model, trained by this project.

`asyncrl run benchmarks/vocabulary/run.yaml` takes real steps (GRPO, on-policy, the reward is the
share of short words) in a process of its own. The weights after some of the steps are kept in the
cache directory, under a digest of all that leads to them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.factory import create_engine
from asyncrl.engine.protocol import Engine, GenerateRequest, SamplingParams
from asyncrl.rollout.trajectory import IntArray, KeptTokens, Provenance, SampleId, TrajectoryBuilder
from asyncrl.tasks.model import default_cache_dir
from asyncrl.trainer.checkpoint.export import export
from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.wire.weights.writer import published
from benchmarks.harness import output_of, run_command
from benchmarks.vocabulary.language_model import PROMPTS, LanguageModel, ensure_language_model
from benchmarks.vocabulary.training import TrainingRecipe


@dataclass(frozen=True)
class Job:
    texts: int
    length: int
    """Tokens of each text; no token ends one."""
    k: int
    """`engine.top_k_logprobs`"""
    temperature: float = 1.0
    repeats: int = 4
    """Verifications of every text, each with its own random numbers."""


@dataclass(frozen=True)
class EngineShare:
    """Texts of the earlier policy, and what verification under the later one keeps."""

    texts: list[tuple[IntArray, IntArray]]
    """Prompt and response of each."""
    kept: list[int]
    """Kept tokens of each verification."""
    share: float
    """Of all tokens."""
    outside: float
    """Share of the tokens that were drawn outside their list."""


async def measure(earlier: Path, later: Path, prompts: Sequence[IntArray], job: Job) -> EngineShare:
    """Generate under one policy, install the next, verify."""
    longest = max(map(len, prompts)) + job.length + 1
    config = EngineConfig(slots=64, max_model_len=longest, top_k_logprobs=job.k)
    engine = create_engine(config, str(earlier), cache_config=CacheConfig(enabled=False), seed=0)
    chosen = [prompts[index % len(prompts)] for index in range(job.texts)]
    await engine.start()
    try:
        drawn = await asyncio.gather(
            *(_generate(engine, prompt, index, job) for index, prompt in enumerate(chosen))
        )
        with published(load_file(later / "model.safetensors").items(), 1) as manifest:
            await engine.stage_weights(manifest)
        await engine.install_weights(1)
        kept: list[int] = []
        for repeat in range(job.repeats):
            first_seed = job.texts * (repeat + 1)
            kept += await asyncio.gather(
                *(
                    _verify(engine, prompt, tokens, first_seed + index, job)
                    for index, (prompt, tokens) in enumerate(zip(chosen, drawn, strict=True))
                )
            )
    finally:
        await engine.close()
    outside = [(one.topk_ids != one.tokens[:, None]).all(axis=1).mean() for one in drawn]
    return EngineShare(
        texts=[(prompt, one.tokens) for prompt, one in zip(chosen, drawn, strict=True)],
        kept=kept,
        share=sum(kept) / (job.repeats * job.texts * job.length),
        outside=float(np.mean(outside)),
    )


def _request(
    prompt: IntArray, seed: int, job: Job, kept: KeptTokens | None = None
) -> GenerateRequest:
    sampling = SamplingParams(
        max_tokens=job.length + (kept is not None),
        temperature=job.temperature,
        seed=seed,
        top_k_logprobs=job.k,
    )
    return GenerateRequest(str(seed), "", prompt, sampling, kept=kept)


async def _generate(engine: Engine, prompt: IntArray, seed: int, job: Job) -> KeptTokens:
    builder = TrajectoryBuilder(SampleId(seed, 0), "", prompt)
    async for chunk in engine.generate(_request(prompt, seed, job)):
        chunk.append_to(builder)
    return builder.kept()


async def _verify(engine: Engine, prompt: IntArray, kept: KeptTokens, seed: int, job: Job) -> int:
    """Kept tokens that stay; what is generated after them is not waited for."""
    stream = engine.generate(_request(prompt, seed, job, kept))
    async for chunk in stream:
        if len(chunk.tokens):
            await stream.aclose()  # type: ignore[attr-defined]
            return int((chunk.provenance == Provenance.VERIFIED).sum())
    raise AssertionError("an engine reports the first tokens of every request")


_ROOT = Path(__file__).resolve().parent.parent.parent
_RUN = ("benchmarks/vocabulary/run.yaml", "benchmarks/vocabulary/reward.py")
_RECORD = "policies.json"
TRAINING_SECONDS = 1800.0
"""Timeout of the run."""


@dataclass(frozen=True)
class Steps:
    """A model and the policy versions of it that are kept."""

    model: LanguageModel
    keep: tuple[int, ...]
    """Versions (optimizer steps); 0 is the model itself."""
    temperature: float
    """Of sampling, and so of the policy."""
    overrides: tuple[str, ...] = ()
    """Further `--set` values of the run."""

    def digest(self) -> str:
        """Digest of everything that determines the result."""
        content = [self.model.digest(), json.dumps([self.keep, self.temperature, self.overrides])]
        content += [(_ROOT / name).read_text(encoding="utf-8") for name in _RUN]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()[:12]


LANGUAGE = Steps(LanguageModel(), keep=(4, 5, 8), temperature=0.8)
"""A trained language model of 32,000 tokens. At temperature 1 so small a model leaves a fifth of
its mass outside the 64 most probable tokens; at 0.8 it is some per cent, as of a large one. Adam's
first steps are not typical and not used. Ten times the learning rate of run.yaml would move the
policy by a total variation of 0.05 a token and step."""
FLAT = Steps(
    LanguageModel(vocabulary=5_000, training=TrainingRecipe(steps=0)),
    keep=(4, 5),
    temperature=1.0,
    overrides=("trainer.learning_rate=1e-4",),
)
"""A vocabulary of 5,000 tokens that are almost equally probable: the model has learned nothing."""


@dataclass(frozen=True)
class PolicyVersions:
    paths: dict[int, Path]
    """Policy version to its HF directory."""
    prompts: Path
    """JSON lines with the field `prompt`."""
    record: dict[str, float]
    """`seconds` it took, and the mean reward of a step by its number, `reward_1` and so on."""


def ensure_versions(steps: Steps, cache_dir: Path | None = None) -> PolicyVersions:
    """The versions of a recipe; what is missing is made first."""
    folder = cache_dir or default_cache_dir()
    model = ensure_language_model(steps.model, folder)
    place = folder / f"vocabulary-policies-{steps.digest()}"
    if not (place / _RECORD).is_file():
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as made:
            _make(steps, model, Path(made))
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(made, place)
    record = json.loads((place / _RECORD).read_text(encoding="utf-8"))
    paths = {version: place / f"step-{version}" for version in steps.keep if version}
    return PolicyVersions({0: model} | paths, model / PROMPTS, record)


def _make(steps: Steps, model: Path, making: Path) -> None:
    began = time.monotonic()
    run = making / "run"
    last = max(steps.keep)
    settings = (
        *(f"run.directory={run}", f"run.steps={last}", f"model.path={model}"),
        *(f"task.path={model / PROMPTS}", f"trainer.keep_checkpoints={last + 1}"),
        *(f"sampling.temperature={steps.temperature}", *steps.overrides),
    )
    command = run_command(_ROOT / _RUN[0], settings)
    sys.stdout.write(f"taking {last} policy steps with {model.name} (once)\n")
    output_of(command, "taking policy steps", TRAINING_SECONDS, cwd=_ROOT)
    for version in steps.keep:
        if version:
            trained = path_of(run / "policies" / "checkpoints", version)
            export(trained, making / f"step-{version}")
    lines = (run / "policies" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [json.loads(line)["learning"]["reward_mean"] for line in lines]
    shutil.rmtree(run)
    record = {f"reward_{step}": reward for step, reward in enumerate(rewards, 1)}
    record["seconds"] = round(time.monotonic() - began, 1)
    (making / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
