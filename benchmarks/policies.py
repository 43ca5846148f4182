"""Successive policy versions, trained by this project, for benchmarks that need real drift.

The workload is the built-in task with summands of 4 to 6 digits: some 55 response tokens, twice as
many as the default 2 to 3 digits give, in the same format. The built-in model is warm-started on
those digits (`asyncrl.tasks.model.ensure_builtin_model`), taught to vary its answers
(`teach`), then trained by `asyncrl run examples/arithmetic.yaml` in a
separate process, with the example's learning rate, groups and staleness and 256 prompts, so that 16
steps are an epoch. The weights after the steps in `Recipe.keep` are stored in the cache directory
under a digest of the recipe, the example and the project's version; missing ones are made again.

The distance of two versions is measured, not assumed: the exact total variation per token, over
whole distributions, on texts that the earlier version has just generated.
"""

import asyncio
import hashlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.factory import create_engine
from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.rollout.trajectory import IntArray
from asyncrl.tasks.builtin.arithmetic import Problem, draw_problems, working
from asyncrl.tasks.builtin.warm_start_recipe import WarmStart
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import default_cache_dir, ensure_builtin_model
from asyncrl.tasks.prompts import Prompt, Task
from asyncrl.trainer.checkpoint.export import export
from asyncrl.trainer.checkpoint.format.files import path_of
from benchmarks.harness import output_of, run_command, table
from benchmarks.tiny_models import SMOKE_START


@dataclass(frozen=True)
class Variety:
    """How much the answers vary, and for how long that is taught."""

    ends: tuple[tuple[str, float], ...] = ((",", 0.7), (".", 0.2), (" ", 0.1))
    """Ends of a column, each with its probability."""
    steps: int = 160
    """Optimizer steps."""
    learning_rate: float = 1e-3
    """Peak; a short warm-up, linear decay over the second half."""

    def text(self, problem: Problem, rng: np.random.Generator, slip: float) -> str:
        """A worked answer with random column ends."""
        columns = working(problem, rng, slip).split(",")
        signs, shares = zip(*self.ends, strict=True)
        ends = rng.choice(signs, len(columns) - 1, p=shares)
        return "".join(f"{column}{end}" for column, end in zip(columns, [*ends, ""], strict=True))


def teach(source: Path, target: Path, recipe: WarmStart, variety: Variety) -> None:
    """Train the model in `source` on varied answers and save it to `target`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small matrices, and the same model on every machine
    try:
        _teach(source, target, recipe, variety)
    finally:
        torch.set_num_threads(threads)


def _teach(source: Path, target: Path, recipe: WarmStart, variety: Variety) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    rng = np.random.default_rng(recipe.seed + 2)
    problems = draw_problems(rng, recipe.digits, held_out=False)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(variety.steps):
        shape = min(1.0, (step + 1) / 20, 2.0 * (1.0 - step / variety.steps))
        for group in optimizer.param_groups:
            group["lr"] = variety.learning_rate * shape
        drawn = [next(problems) for _ in range(recipe.batch_size)]
        texts = [variety.text(problem, rng, recipe.slip) for problem in drawn]
        tokens, wanted = _batch(tokenizer, drawn, texts)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits[wanted[:, 1:]], tokens[:, 1:][wanted[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _batch(
    tokenizer: Any, problems: list[Problem], texts: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids `[B, T]`, padded on the right, and a `[B, T]` mask of the response."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for problem in problems
    ]
    starts = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    ends = tokenizer([t + tokenizer.eos_token for t in texts], add_special_tokens=False)[
        "input_ids"
    ]
    longest = max(len(s) + len(e) for s, e in zip(starts, ends, strict=True))
    tokens = torch.full((len(texts), longest), tokenizer.pad_token_id)
    wanted = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        length = len(start) + len(end)
        tokens[row, :length] = torch.tensor(start + end)
        wanted[row, len(start) : length] = True
    return tokens, wanted


WARM_START = WarmStart(
    digits=(4, 6), layers=3, steps=1300, slip=0.06, expected=(0.4, 0.9), extra_rounds=0
)
"""Longer numbers need a third layer, or several times as many steps."""
_ROOT = Path(__file__).resolve().parent.parent
TRAINING_SECONDS = 1800.0
"""Timeout of the training run."""
_RECORD = "policies.json"


@dataclass(frozen=True)
class Recipe:
    """How the versions are made; the digest of its fields names their directory."""

    warm_start: WarmStart = WARM_START
    variety: Variety = field(default_factory=Variety)
    example: str = "examples/arithmetic.yaml"
    overrides: tuple[str, ...] = ()
    """Further `--set` values of the run; digits, lengths and checkpoints have their own fields."""
    prompts: int = 256
    """Training prompts; with 16 groups a step an epoch has 16 steps."""
    keep: tuple[int, ...] = (0, 1, 16, 17)
    """Policy versions (optimizer steps) whose weights are kept; the first is 0."""
    max_tokens: int = 80
    max_model_len: int = 128
    version: int = 1
    """Incremented when the code changes what the fields above lead to."""

    def digest(self) -> str:
        """Digest of everything that determines the result."""
        content = [
            json.dumps(asdict(self), sort_keys=True),
            (_ROOT / self.example).read_text(encoding="utf-8"),
            metadata.version("asyncrl"),
        ]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()[:12]

    def task(self, size: int | None = None) -> TaskConfig:
        """The task that the run trains on; with a larger `size`, its prompts come first."""
        return TaskConfig(digits=self.warm_start.digits, train_size=size or self.prompts)


@dataclass(frozen=True)
class Policies:
    """Weights on disk, one HF directory per version, and the distances between versions."""

    paths: dict[int, Path]
    """Policy version to its directory."""
    drift: dict[str, float]
    """"EARLIER-LATER" to total variation per token, on texts of the earlier one."""
    certainty: dict[str, float]
    """Version to the mean probability of the tokens that it draws itself."""
    accuracy: dict[str, float]
    """Held-out accuracy, sampled as in training: "before" and "after" the run."""
    recipe: Recipe


def ensure_policies(recipe: Recipe | None = None, cache_dir: Path | None = None) -> Policies:
    """The versions of a recipe; they are made first if any is missing."""
    recipe = recipe or Recipe()
    place = (cache_dir or default_cache_dir()) / f"policies-{recipe.digest()}"
    paths = {step: place / f"step-{step}" for step in recipe.keep}
    if not (place / _RECORD).is_file() or not all(path.is_dir() for path in paths.values()):
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=place.parent) as made:
            making = Path(made)
            accuracy = _make(recipe, making, place.parent)
            record = {"accuracy": accuracy, **_compare(recipe, making)}
            (making / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            shutil.copytree(making, place)
    record = json.loads((place / _RECORD).read_text(encoding="utf-8"))
    return Policies(paths, record["drift"], record["certainty"], record["accuracy"], recipe)


def _make(recipe: Recipe, making: Path, cache_dir: Path) -> dict[str, float]:
    """Warm-start, train in a separate process, copy the weights; returns the accuracies."""
    start = making / "step-0"
    teach(
        ensure_builtin_model(cache_dir, None, recipe.warm_start),
        start,
        recipe.warm_start,
        recipe.variety,
    )
    run = making / "run"
    settings = (
        *("run.name=policies", f"run.directory={run}", f"run.steps={max(recipe.keep)}"),
        *(f"model.path={start}", f"task.train_size={recipe.prompts}"),
        f"task.digits={list(recipe.warm_start.digits)}",
        *(f"sampling.max_tokens={recipe.max_tokens}",),
        *(f"engine.max_model_len={recipe.max_model_len}", "evaluation.prompts=256"),
        *("trainer.checkpoint_every=1", f"trainer.keep_checkpoints={max(recipe.keep) + 1}"),
        *recipe.overrides,
    )
    command = run_command(_ROOT / recipe.example, settings)
    output_of(command, "training the policy versions", TRAINING_SECONDS)
    for step in recipe.keep[1:]:
        trained = path_of(run / "policies" / "checkpoints", step)
        export(trained, making / f"step-{step}")
    result = json.loads((run / "policies" / "result.json").read_text(encoding="utf-8"))
    shutil.rmtree(run)
    return {side: float(result[f"accuracy_{side}"]) for side in ("before", "after")}


def _compare(recipe: Recipe, folder: Path, prompts: int = 48) -> dict[str, dict[str, float]]:
    """Total variation of successive versions and of the first and each later one; certainties."""
    steps = sorted(recipe.keep)
    pairs = sorted({*itertools.pairwise(steps), *((steps[0], s) for s in steps[1:])})
    path = {step: folder / f"step-{step}" for step in steps}
    task = load_task(recipe.task(), str(path[0]), 0)
    asked = task.train[:prompts]
    drift, certainty = {}, {}
    for step in steps:
        texts = asyncio.run(generate(path[step], task, asked, recipe))
        own = distributions(path[step], asked, texts)
        certainty[str(step)] = float(own.square().sum(-1).mean())
        for later in (later for earlier, later in pairs if earlier == step):
            other = distributions(path[later], asked, texts)
            drift[f"{step}-{later}"] = total_variation(own, other)
    return {"drift": drift, "certainty": certainty}


async def generate(
    model: Path, task: Task, prompts: Sequence[Prompt], recipe: Recipe
) -> list[IntArray]:
    """One sample of each prompt from the torch engine, without drafts."""
    config = EngineConfig(slots=len(prompts), max_model_len=recipe.max_model_len)
    engine = create_engine(config, str(model), cache_config=CacheConfig(enabled=False), seed=0)

    async def one(index: int) -> IntArray:
        request = GenerateRequest(
            request_id=str(index),
            cache_key="",
            prompt_tokens=prompts[index].tokens,
            sampling=SamplingParams(
                max_tokens=recipe.max_tokens, stop_tokens=task.stop_tokens, seed=index
            ),
        )
        return np.concatenate([chunk.tokens async for chunk in engine.generate(request)])

    await engine.start()
    try:
        return list(await asyncio.gather(*(one(index) for index in range(len(prompts)))))
    finally:
        await engine.close()


@torch.no_grad()
def distributions(
    model: Path, prompts: Sequence[Prompt], texts: Sequence[IntArray]
) -> torch.Tensor:
    """Next-token distributions `[N, V]` before each of the texts' N tokens, text after text."""
    longest = max(len(p.tokens) + len(t) for p, t in zip(prompts, texts, strict=True))
    tokens = torch.zeros((len(texts), longest), dtype=torch.long)
    wanted = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        begin, end = len(prompt.tokens), len(prompt.tokens) + len(text)
        tokens[row, :end] = torch.from_numpy(np.concatenate([prompt.tokens, text])).long()
        wanted[row, begin - 1 : end - 1] = True  # a token's distribution is one position before it
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    # Padding is on the right, where a causal model does not see it.
    found: torch.Tensor = network(tokens).logits[wanted].softmax(-1)
    return found


def total_variation(p: torch.Tensor, q: torch.Tensor) -> float:
    """Half the L1 distance of two distributions per token `[N, V]`, mean over the tokens."""
    return float((p - q).abs().sum(-1).mean() / 2)


def drift_table(policies: Policies) -> Table:
    before, after = policies.accuracy["before"], policies.accuracy["after"]
    certain = ", ".join(f"{value:.3f} ({step})" for step, value in policies.certainty.items())
    return table(
        f"policy versions, trained here: accuracy {before:.2f} before, {after:.2f} after "
        f"{max(policies.paths)} steps",
        "versions,total variation per token",
        policies.drift.items(),
        caption=f"mean probability of a version's own tokens: {certain}",
    )


SMOKE = Recipe(
    warm_start=SMOKE_START,
    variety=Variety(steps=2),
    overrides=("scheduler.groups_per_step=2", "evaluation.prompts=4"),
    prompts=8,
    keep=(0, 1),
    max_tokens=8,
)
