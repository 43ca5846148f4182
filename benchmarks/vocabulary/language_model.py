"""A small language model with a real vocabulary, trained here and cached.

The tokenizer is a byte-level BPE of this machine's text (`benchmarks.vocabulary.corpus`), the model
a Llama with tied embeddings (`benchmarks.vocabulary.training`). Both are saved as an ordinary HF
directory, together with prompts from documents that were not trained on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.tasks.model import default_cache_dir
from benchmarks.vocabulary.corpus import CorpusShape, read_corpus
from benchmarks.vocabulary.training import TrainingRecipe, perplexity, train

PROMPTS = "prompts.jsonl"
"""File of the model's directory with one prompt a line, in the field `prompt`."""
_RECORD = "language_model.json"
_PAD, _END = "<pad>", "<end>"


@dataclass(frozen=True)
class LanguageModel:
    """How a model is made; the digest of the fields names its directory."""

    corpus: CorpusShape = field(default_factory=CorpusShape)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    vocabulary: int = 32_000
    """Tokens of the BPE, `<pad>` and `<end>` among them."""
    reads: int = 160_000
    """Tokens of the first documents, which the model reads again and again, and of those held out.
    A model that reads little text often is soon as sure of its own text as a large model is."""
    held_out: float = 0.1
    """Share of the documents that is held out; their paragraphs' beginnings are the prompts."""
    prompts: int = 256
    prompt_tokens: int = 16
    version: int = 1
    """Incremented when the code changes what the fields above lead to."""

    def digest(self) -> str:
        """Digest of everything that determines the result, apart from the machine's text."""
        content = json.dumps(asdict(self), sort_keys=True) + metadata.version("asyncrl")
        return hashlib.sha256(content.encode()).hexdigest()[:12]


def ensure_language_model(recipe: LanguageModel, cache_dir: Path | None = None) -> Path:
    """The model's directory. If it is not cached it is made first, whole or not at all."""
    folder = cache_dir or default_cache_dir()
    place = folder / f"language-model-{recipe.digest()}"
    if not (place / _RECORD).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as made:
            _make(recipe, Path(made))
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(made, place)
    return place


def model_record(place: Path) -> dict[str, Any]:
    """What is known of a model that was made: tokens, perplexity, seconds, digest of the text."""
    found: dict[str, Any] = json.loads((place / _RECORD).read_text(encoding="utf-8"))
    return found


def train_tokenizer(documents: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_PAD, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=_PAD,
        eos_token=_END,
        clean_up_tokenization_spaces=False,
    )


def _make(recipe: LanguageModel, folder: Path) -> None:
    began = time.monotonic()
    documents = read_corpus(recipe.corpus)
    tokenizer = train_tokenizer(documents, recipe.vocabulary)
    encoded = tokenizer(documents)["input_ids"]
    first = int(np.searchsorted(np.cumsum([len(ids) for ids in encoded]), recipe.reads)) + 1
    order = np.random.default_rng(recipe.training.seed).permutation(min(first, len(documents)))
    held_out, trained = np.split(order, [max(1, int(recipe.held_out * len(order)))])
    _write_prompts(folder / PROMPTS, tokenizer, [documents[i] for i in held_out], recipe)
    length = recipe.training.sequence
    read, unread = (_sequences([encoded[i] for i in part], length) for part in (trained, held_out))
    model = train(recipe.training, read, len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    made = {
        "vocabulary": len(tokenizer),
        "parameters": sum(p.numel() for p in model.parameters()),
        "characters": sum(map(len, documents)),
        "tokens": sum(map(len, encoded)),
        "text_sha256": hashlib.sha256("\0".join(documents).encode()).hexdigest(),
        "tokens_read": read.numel(),
        "epochs": recipe.training.steps * recipe.training.rows / len(read),
        "perplexity": perplexity(model, read[:64]),
        "held_out_perplexity": perplexity(model, unread[:64]),
        "seconds": round(time.monotonic() - began, 1),
    }
    (folder / _RECORD).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


def _sequences(documents: Sequence[Sequence[int]], length: int) -> torch.Tensor:
    """`[n, length]` tokens of documents one after the other, with the id of `<end>` between."""
    flat = np.concatenate([np.array([*document, 1], np.int64) for document in documents])
    whole = len(flat) // length
    return torch.from_numpy(flat[: whole * length].reshape(whole, length))


def _write_prompts(
    path: Path, tokenizer: Any, documents: Sequence[str], recipe: LanguageModel
) -> None:
    paragraphs = [line for document in documents for line in document.splitlines()]
    length = recipe.prompt_tokens
    starts = [ids[:length] for ids in tokenizer(paragraphs)["input_ids"] if len(ids) > length]
    lines = [json.dumps({"prompt": tokenizer.decode(ids)}) for ids in starts[: recipe.prompts]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
