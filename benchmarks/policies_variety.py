"""A second supervised phase that teaches the built-in model to vary its answers.

The built-in model has exactly one format, so its only uncertainty is in its slips: a draft of its
own text is accepted with a mean probability of 0.99 per token, which natural language never
reaches. Here it learns to end a column with a comma, a full stop or a blank:
`5+8+0=13.9+3+1=13,2+0+1=03:333`. Answer and reward stay the same, the text does not. There is now a
free choice every ten tokens, and the mean probability is about 0.95, close to the 0.96 that was
measured on a model whose answers vary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.tasks.builtin.arithmetic import Problem, draw_problems, working
from asyncrl.tasks.builtin.warm_start_recipe import WarmStart


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
