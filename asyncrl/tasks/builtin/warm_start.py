"""Supervised training of the built-in model, which leaves room for RL to improve it.

A 2-layer Qwen3 (0.33 M parameters, float32) imitates worked additions: first correct ones, so that
it learns the procedure, then ones with a slip in one column in nine. The result can add but is
careless: greedy decoding is almost always right, a sample at temperature 1 two times in three. The
slips bound the accuracy from above and the training has converged, so this number depends little on
the machine. RL then has a suitable task: to avoid the slips, which appear in every group of samples
(examples/arithmetic.yaml: held-out accuracy 0.67 at step 0, 0.91 at step 40).
"""

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncrl.rewards.functions import arithmetic
from asyncrl.tasks.builtin.arithmetic import Problem, draw_problems, working
from asyncrl.tasks.builtin.warm_start_recipe import POSITIONS, RECIPE, WarmStart
from asyncrl.tasks.examples import Example
from asyncrl.tasks.model import no_transformers_bars
from asyncrl.tasks.sft_config import ALGORITHM
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.learner import Learner

log = logging.getLogger(__name__)

Lessons = Callable[[float], list[Example]]
"""Draws a batch with a given probability of a slip."""
_REWARD = np.zeros(1, np.float32)


@dataclass(frozen=True, slots=True)
class WarmStartResult:
    """A trained model and its accuracy."""

    model: Any
    sampled_accuracy: float | None
    """Accuracy at temperature 1 on training-side problems; None for a model that plays games."""
    seconds: float
    steps: int


def warm_start(
    tokenizer: Any, recipe: WarmStart = RECIPE, advance: Callable[[int, int], None] | None = None
) -> WarmStartResult:
    """Create and train the model, leaving torch's random state; `advance(done, total)` per step."""
    started, accuracy, lessons = time.monotonic(), None, _lessons(tokenizer, recipe)
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = new_model(tokenizer, recipe)
        learner = _learner(model, recipe)

        def train(steps: int) -> None:
            for _ in range(steps):
                done = learner.policy_version
                examples = lessons(
                    recipe.slip if done + 1 > recipe.clean_share * recipe.steps else 0
                )
                groups = [([one.trajectory(n, done)], _REWARD) for n, one in enumerate(examples)]
                learner.add_groups(groups)
                learner.step()
                if advance is not None:
                    advance(min(done + 1, recipe.steps), recipe.steps)
            model.load_state_dict(learner.policy.model.state_dict())

        train(recipe.steps)
        if recipe.task != "agent":
            accuracy = sampled_accuracy(model, tokenizer, recipe)
            for _ in range(recipe.extra_rounds):
                if accuracy >= recipe.expected[0]:
                    break
                train(recipe.extra_steps)
                accuracy = sampled_accuracy(model, tokenizer, recipe)
    if accuracy is not None and not recipe.expected[0] <= accuracy <= recipe.expected[1]:
        text = "the built-in model's sampled accuracy is %.2f; expected is %.2f to %.2f"
        log.warning(text, accuracy, *recipe.expected)
    return WarmStartResult(model, accuracy, time.monotonic() - started, learner.policy_version)


def new_model(tokenizer: Any, recipe: WarmStart) -> Any:
    """Return an untrained float32 model with the tokenizer's vocabulary."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=POSITIONS,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).to(torch.float32)


def _lessons(tokenizer: Any, recipe: WarmStart) -> Lessons:
    if recipe.task == "agent":
        from asyncrl.tasks.builtin.agent_lessons import agent_lessons

        return agent_lessons(tokenizer, recipe)
    rng = np.random.default_rng(recipe.seed)
    source = draw_problems(rng, recipe.digits, held_out=False)

    def draw(slip: float) -> list[Example]:
        problems = [next(source) for _ in range(recipe.batch_size)]
        prompts = _prompt_ids(tokenizer, problems)
        texts = [working(p, rng, slip) + tokenizer.eos_token for p in problems]
        responses = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [
            Example("", np.array(prompt), np.array(response), np.ones(len(response), np.bool_))
            for prompt, response in zip(prompts, responses, strict=True)
        ]

    return draw


def _learner(model: Any, recipe: WarmStart) -> Learner:
    """Return the learner of `asyncrl sft` with the recipe's learning rate, for an untrained model.

    The rate rises over `warmup_steps` and falls over the second half.
    """
    config = TrainerConfig(
        algorithm=ALGORITHM,
        correction="none",
        advantage_normalization="none",
        learning_rate=recipe.learning_rate,
        betas=(0.9, recipe.beta2),
        weight_decay=recipe.weight_decay,
        device="cpu",
        threads=1,
    )
    with tempfile.TemporaryDirectory() as initial, no_transformers_bars():
        model.save_pretrained(initial)
        learner = Learner(config, initial, group_size=1, seed=recipe.seed)
    learner.peak_rates = {
        step: recipe.learning_rate
        * max(0.02, min(1.0, (step + 1) / recipe.warmup_steps, 2.0 * (1.0 - step / recipe.steps)))
        for step in range(recipe.steps + recipe.extra_rounds * recipe.extra_steps)
    }
    return learner


@torch.no_grad()
def sampled_accuracy(model: Any, tokenizer: Any, recipe: WarmStart) -> float:
    """Return the share of correct samples at temperature 1 on training-side problems."""
    rng = np.random.default_rng(recipe.seed + 1)
    source = draw_problems(rng, recipe.digits, held_out=False)
    problems = [next(source) for _ in range(recipe.dev_problems)]
    prompts = _prompt_ids(tokenizer, problems)
    longest = max(map(len, prompts))
    pad = tokenizer.pad_token_id
    # Padded on the left, so that all rows continue at the same column.
    tokens = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with _evaluating(model):
        out = model.generate(
            input_ids=tokens,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=12 * recipe.digits[1],
            pad_token_id=pad,
        )
    texts = tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
    pairs = zip(problems, texts, strict=True)
    right = [arithmetic(p.question, text, {"answer": p.answer}) for p, text in pairs]
    return float(np.mean(right))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch with one thread, which gives the same model on every machine.

    Matrices this small gain little from more, and waiting threads spin on a busy machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


def _prompt_ids(tokenizer: Any, problems: list[Problem]) -> list[list[int]]:
    asked = [[{"role": "user", "content": p.question}] for p in problems]
    texts = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids
