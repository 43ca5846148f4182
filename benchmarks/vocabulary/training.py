"""Training of a small language model in minutes on two cores.

Embeddings start as factors of the tokens' co-occurrence counts (positive pointwise mutual
information, Levy and Goldberg 2014), so that rare tokens, which training hardly meets, have
neighbours. The matrices of the layers are trained by Muon (Jordan et al. 2024).

The loss is over the whole vocabulary in every step: a sampled softmax is faster, but what it says
about rare tokens is rough, and the tail is what this model is for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from rich.progress import track
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.rollout.trajectory import IntArray

_VECTOR_LENGTH = 0.4
"""Mean length of the first embeddings, about that of random ones."""


@dataclass(frozen=True)
class TrainingRecipe:
    """The model and how it is trained."""

    hidden_size: int = 192
    intermediate_size: int = 512
    layers: int = 3
    heads: int = 6
    steps: int = 700
    """Optimizer steps; 0 leaves a flat model that has learned nothing."""
    rows: int = 8
    """Sequences of a step."""
    sequence: int = 128
    """Tokens of a sequence."""
    learning_rate: float = 2e-3
    """Of the embeddings and norms (AdamW)."""
    matrix_learning_rate: float = 0.02
    """Of the matrices of the layers (Muon)."""
    seed: int = 0


def train(recipe: TrainingRecipe, sequences: Tensor, vocabulary: int) -> LlamaForCausalLM:
    """Train a new model on `[n, sequence]` tokens; torch's random state stays the caller's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = _new_model(recipe, vocabulary)
        if recipe.steps:
            run = _Training(model, recipe, sequences[torch.randperm(len(sequences))])
            for step in track(range(recipe.steps), description="Training a language model (once)"):
                run.step(step)
    return model


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, sequences: Tensor) -> float:
    parts = torch.split(sequences, 8)
    losses = [float(model(input_ids=part, labels=part).loss) for part in parts]
    return math.exp(sum(losses) / len(losses))


def _new_model(recipe: TrainingRecipe, vocabulary: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=1024,
            initializer_range=0.03,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    ).to(torch.float32)


class _Training:
    """The optimizers and the order of the text."""

    def __init__(self, model: LlamaForCausalLM, recipe: TrainingRecipe, sequences: Tensor) -> None:
        self._model, self._recipe, self._sequences = model, recipe, sequences
        self._embeddings = model.get_input_embeddings().weight
        with torch.no_grad():
            vectors = word_vectors(
                sequences.reshape(-1).numpy(), len(self._embeddings), recipe.hidden_size
            )
            self._embeddings.copy_(vectors)
        named = list(model.named_parameters())
        layers = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        rest = [p for name, p in named if p.ndim < 2 or "embed" in name]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(layers, lr=recipe.matrix_learning_rate, weight_decay=0.0),
            torch.optim.AdamW(
                rest, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            ),
        ]
        self._groups = [group for one in self._optimizers for group in one.param_groups]
        self._peaks = [float(group["lr"]) for group in self._groups]

    def step(self, step: int) -> None:
        """One optimizer step: a short warm-up, a linear decay over the last 70%."""
        recipe = self._recipe
        done = step / recipe.steps
        for group, peak in zip(self._groups, self._peaks, strict=True):
            group["lr"] = peak * min(1.0, (step + 1) / 50, (1.0 - done) / 0.7)
        first = step * recipe.rows % (len(self._sequences) - recipe.rows)
        batch = self._sequences[first : first + recipe.rows]
        with torch.autocast("cpu", torch.bfloat16):
            out = self._model.model(input_ids=batch[:, :-1], use_cache=False)
        loss = functional.linear_cross_entropy(
            out.last_hidden_state.reshape(-1, recipe.hidden_size).bfloat16(),
            self._embeddings.bfloat16(),
            batch[:, 1:].reshape(-1),
        )
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()


def word_vectors(tokens: IntArray, vocabulary: int, size: int) -> Tensor:
    """`[vocabulary, size]` vectors from the co-occurrence of near tokens.

    With M the symmetric matrix of positive pointwise mutual information of tokens one or two apart
    (the right one's frequency smoothed by the power 0.75), the vectors are its leading eigenvectors
    times the root of the absolute eigenvalues, found by subspace iteration.
    """
    flat = tokens.astype(np.int64)
    pairs = np.concatenate([flat[:-gap] * vocabulary + flat[gap:] for gap in (1, 2)])
    both, counts = np.unique(pairs, return_counts=True)
    left, right = np.divmod(both, vocabulary)
    frequency = np.bincount(flat, minlength=vocabulary) + 1.0
    smoothed = frequency**0.75
    chance = frequency[left] / frequency.sum() * smoothed[right] / smoothed.sum()
    information = np.maximum(np.log(counts / len(pairs) / chance), 0.0) / 2
    places = torch.from_numpy(np.stack([np.r_[left, right], np.r_[right, left]]))
    values = torch.from_numpy(np.r_[information, information]).float()
    shape = (vocabulary, vocabulary)
    matrix = torch.sparse_coo_tensor(places, values, shape, check_invariants=False).coalesce()
    width = min(size + 8, vocabulary)
    basis = torch.linalg.qr(matrix @ torch.randn(vocabulary, width))[0]
    for _ in range(2):
        basis = torch.linalg.qr(matrix @ basis)[0]
    eigenvalues, rotation = torch.linalg.eigh(basis.T @ (matrix @ basis))
    largest = eigenvalues.abs().argsort(descending=True)[:size]
    vectors = (basis @ rotation[:, largest]) * eigenvalues[largest].abs().sqrt()
    scaled: Tensor = _VECTOR_LENGTH * vectors / vectors.norm(dim=1).mean()
    return scaled
