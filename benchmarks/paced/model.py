"""The model of benchmarks.paced: a Markov chain of letters with heavy-tailed lengths, set by hand.

A response is of one of three classes, which its first letter tells. Each class has three letters,
the first of which is likely, and ends after each of them with the same probability. So lengths are
a mixture of three geometric distributions (`LENGTHS`). A table of logits is the head of a real
Transformer; its small random layers change the logits a little with the context.
"""

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncrl.tasks.model import END, builtin_tokenizer

MEDIAN = 1000.0
"""Tokens of the median response that the lengths stand for."""
LONGEST = 16_000
"""Most tokens of a response."""
LENGTHS = ((0.50, 930.0), (0.38, 2000.0), (0.12, 4700.0))
"""(probability, mean) of each class of responses: median 1,000, mean 1,790, 1% above 11,900."""
CLASSES = ("abc", "def", "ghi")
LETTERS = (0.85, 0.10, 0.05)
"""Probabilities of the letters of a class. A rejected continuation is accepted as a draft with the
sum of their squares, 0.735 a token."""
_NEVER = -12.0
"""Logit of the tokens that do not follow; one token in 3,000 is one of them."""
_SIZE = 64


@dataclass(frozen=True)
class Lengths:
    """Response lengths of a paced run, in its tokens."""

    scale: float
    """Tokens that one of these stands for."""

    @property
    def longest(self) -> int:
        return round(LONGEST / self.scale)

    def ends(self, kind: int) -> float:
        """Probability with which a response of a class ends after a letter."""
        return min(1.0, self.scale / LENGTHS[kind][1])

    def draw(self, rng: random.Random) -> int:
        """Draw a length; the end counts as a token, as in a response."""
        (kind,) = rng.choices(range(len(LENGTHS)), [share for share, _ in LENGTHS])
        letters = 1 + math.floor(math.log(1.0 - rng.random()) / math.log1p(-self.ends(kind)))
        return min(letters + 1, self.longest)

    @property
    def mean(self) -> float:
        """Mean number of tokens of a response."""
        rng = random.Random(0)
        return sum(self.draw(rng) for _ in range(20_000)) / 20_000


def make_model(folder: Path, lengths: Lengths) -> None:
    tokenizer = builtin_tokenizer()
    model = _model(len(tokenizer), tokenizer.convert_tokens_to_ids(END))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                weak = "o_proj" in name or "down_proj" in name
                parameter.copy_((0.002 if weak else 0.1) * torch.randn_like(parameter))
            else:
                parameter.fill_(1.0)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.zero_()
        embedding.fill_diagonal_(1.0)
        # The final norm scales the embedding of a token to the length sqrt(_SIZE).
        head.zero_()
        head[:, : len(tokenizer)] = _logits(tokenizer, lengths).T / math.sqrt(_SIZE)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _model(vocabulary: int, end: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=_SIZE,
            num_hidden_layers=1,
            intermediate_size=_SIZE,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            eos_token_id=end,
            bos_token_id=None,
        )
    ).float()


def _logits(tokenizer: Any, lengths: Lengths) -> torch.Tensor:
    """`[V, V]` logits of the next token by the present one."""
    size = len(tokenizer)
    token = tokenizer.convert_tokens_to_ids
    start = torch.full((size,), _NEVER)
    for letters, (share, _) in zip(CLASSES, LENGTHS, strict=True):
        for letter, probability in zip(letters, LETTERS, strict=True):
            start[token(letter)] = math.log(share * probability)
    logits = start.repeat(size, 1)
    for kind, letters in enumerate(CLASSES):
        following = torch.full((size,), _NEVER)
        ends = lengths.ends(kind)
        following[token(END)] = math.log(ends)
        for letter, probability in zip(letters, LETTERS, strict=True):
            following[token(letter)] = math.log((1.0 - ends) * probability)
        for letter in letters:
            logits[token(letter)] = following
    return logits
