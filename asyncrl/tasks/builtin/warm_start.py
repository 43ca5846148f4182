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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from asyncrl.rewards.functions import arithmetic
from asyncrl.tasks.builtin.arithmetic import Problem, draw_problems, working
from asyncrl.tasks.builtin.warm_start_recipe import POSITIONS, RECIPE, WarmStart

log = logging.getLogger(__name__)

Lesson = tuple[list[int], list[bool]]
"""Token ids, and a flag for each that is True if it is learned."""
Lessons = Callable[[float], list[Lesson]]


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
    started = time.monotonic()
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = new_model(tokenizer, recipe)
        trainer = _Trainer(model, tokenizer.pad_token_id, recipe, _lessons(tokenizer, recipe))
        steps = 0
        for steps in range(1, recipe.steps + 1):
            trainer.step(recipe.slip if steps > recipe.clean_share * recipe.steps else 0.0)
            if advance is not None:
                advance(steps, recipe.steps)
        if recipe.task == "agent":
            return WarmStartResult(model, None, time.monotonic() - started, steps)
        accuracy = sampled_accuracy(model, tokenizer, recipe)
        for _ in range(recipe.extra_rounds):
            if accuracy >= recipe.expected[0]:
                break
            for _ in range(recipe.extra_steps):
                trainer.step(recipe.slip)
            steps += recipe.extra_steps
            accuracy = sampled_accuracy(model, tokenizer, recipe)
    if not recipe.expected[0] <= accuracy <= recipe.expected[1]:
        text = "the built-in model's sampled accuracy is %.2f; expected is %.2f to %.2f"
        log.warning(text, accuracy, *recipe.expected)
    return WarmStartResult(model, accuracy, time.monotonic() - started, steps)


def new_model(tokenizer: Any, recipe: WarmStart) -> Any:
    """Return an untrained float32 model with the tokenizer's vocabulary."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size, num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads, num_key_value_heads=recipe.heads,
        head_dim=recipe.head_dim, tie_word_embeddings=True, max_position_embeddings=POSITIONS,
        initializer_range=0.05, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, dtype="float32",
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(torch.float32)


def _lessons(tokenizer: Any, recipe: WarmStart) -> Lessons:
    if recipe.task == "agent":
        from asyncrl.tasks.builtin.agent_lessons import agent_lessons

        lessons: Lessons = agent_lessons(tokenizer, recipe)
        return lessons
    rng = np.random.default_rng(recipe.seed)
    source = draw_problems(rng, recipe.digits, held_out=False)

    def draw(slip: float) -> list[Lesson]:
        problems = [next(source) for _ in range(recipe.batch_size)]
        prompts = _prompt_ids(tokenizer, problems)
        texts = [working(p, rng, slip) + tokenizer.eos_token for p in problems]
        responses = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [
            (prompt + response, [False] * len(prompt) + [True] * len(response))
            for prompt, response in zip(prompts, responses, strict=True)
        ]

    return draw


class _Trainer:
    def __init__(self, model: Any, pad: int, recipe: WarmStart, lessons: Lessons) -> None:
        self._model, self._pad, self._recipe, self._lessons = model, pad, recipe, lessons
        rate, betas, decay = recipe.learning_rate, (0.9, recipe.beta2), recipe.weight_decay
        parameters = model.parameters()
        self._optimizer = torch.optim.AdamW(parameters, lr=rate, betas=betas, weight_decay=decay)
        self._done = 0

    def step(self, slip: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        tokens, is_response = self._batch(slip)
        logits = self._model(input_ids=tokens[:, :-1], use_cache=False).logits
        wanted = is_response[:, 1:]
        loss = functional.cross_entropy(logits[wanted], tokens[:, 1:][wanted])
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._done += 1

    def _learning_rate(self) -> float:
        done, recipe = self._done, self._recipe
        rising = (done + 1) / recipe.warmup_steps
        falling = 2.0 * (1.0 - done / recipe.steps)
        return recipe.learning_rate * max(0.02, min(1.0, rising, falling))

    def _batch(self, slip: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids `[B, T]`, padded on the right, and the bool response mask `[B, T]`."""
        lessons = self._lessons(slip)
        longest = max(len(tokens) for tokens, _ in lessons)
        tokens = torch.full((len(lessons), longest), self._pad)
        is_response = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, (ids, learned) in enumerate(lessons):
            tokens[row, : len(ids)] = torch.tensor(ids)
            is_response[row, : len(ids)] = torch.tensor(learned)
        return tokens, is_response


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
    model.eval()
    out = model.generate(
        input_ids=tokens, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=12 * recipe.digits[1], pad_token_id=pad,
    )  # fmt: skip
    model.train()
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


def _prompt_ids(tokenizer: Any, problems: list[Problem]) -> list[list[int]]:
    asked = [[{"role": "user", "content": p.question}] for p in problems]
    texts = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(texts, add_special_tokens=False)["input_ids"])
