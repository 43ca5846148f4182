"""A small language model with a real vocabulary, trained here and cached.

The tokenizer is a byte-level BPE of this machine's text (`read_corpus`), the model a
Llama with tied embeddings (`benchmarks.vocabulary.training`). Both are saved as an ordinary HF
directory, together with prompts from documents that were not trained on.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.tasks.model import default_cache_dir
from benchmarks.vocabulary.training import TrainingRecipe, perplexity, train

_DOCSTRING = re.compile(r':\s*\n\s+[rR]?"""(.*?)"""', re.DOTALL)
_PACKAGES = ("numpy", "torch", "transformers", "pydantic", "msgspec", "rich", "sympy")
"""Their docstrings are read, after those of the standard library."""
_MANUAL_SECTIONS = ("7", "8", "5", "1", "3")
_DOCUMENTS = re.compile(r"^(README|NEWS|FAQ|copyright|.*\.(txt|md|rst))(\.gz)?$")
_LONGEST_FILE = 1 << 21
"""Bytes of a file that are read."""
_BREAKS = frozenset(("SH", "SS", "PP", "P", "LP", "TP", "IP", "HP", "sp", "RE", "RS", "Sh", "Pp"))
_FONTS = frozenset(("B", "I", "BR", "IR", "RB", "RI", "BI", "IB", "SM"))
_ROFF_ESCAPES = (
    (re.compile(r"\\f(\(..|\[\w*\]|.)"), ""),
    (re.compile(r"\\(\*?\((..)|\*?\[\w+\])"), "'"),
    (re.compile(r"\\s[-+]?\d"), ""),
    (re.compile(r"\\[&%:|^/,]"), ""),
    (re.compile(r"\\([-e ~'`.])"), r"\1"),
)


@dataclass(frozen=True)
class CorpusShape:
    """Which paragraphs are taken, and how many characters of each source."""

    docstrings: int = 9_000_000
    """Most characters of docstrings."""
    manuals: int = 7_000_000
    """Most characters of manual pages."""
    documents: int = 4_000_000
    """Most characters of files in /usr/share/doc."""
    shortest: int = 80
    """Characters of the shortest paragraph."""
    prose: float = 0.88
    """Smallest share of letters and spaces in a paragraph."""
    minimum: int = 6_000_000
    """With fewer characters in all there is no corpus."""


def read_corpus(shape: CorpusShape) -> list[str]:
    """Documents of paragraphs, one paragraph a line."""
    seen: set[bytes] = set()
    documents: list[str] = []
    sources: tuple[tuple[Callable[[], Iterator[Iterable[str]]], int], ...] = (
        (_docstrings, shape.docstrings),
        (_manuals, shape.manuals),
        (_documents, shape.documents),
    )
    for source, most in sources:
        taken = 0
        for paragraphs in source():
            if taken >= most:
                break
            chosen = [p for p in map(_one_line, paragraphs) if _is_new_prose(p, shape, seen)]
            if chosen:
                documents.append("\n".join(chosen))
                taken += len(documents[-1])
    total = sum(map(len, documents))
    if total < shape.minimum:
        raise RuntimeError(
            f"this machine has {total:,} characters of English text (docstrings of Python's "
            f"packages, /usr/share/man, /usr/share/doc) and {shape.minimum:,} are needed; install "
            "manual pages (Debian: apt-get install manpages manpages-dev)"
        )
    return documents


def _one_line(paragraph: str) -> str:
    return " ".join(paragraph.split())


def _is_new_prose(paragraph: str, shape: CorpusShape, seen: set[bytes]) -> bool:
    """Whether a paragraph is long enough, prose, and not there yet; remembers it."""
    if len(paragraph) < shape.shortest or not paragraph.isascii():
        return False
    letters = [c for c in paragraph if c.isalpha()]
    if len(letters) + paragraph.count(" ") < shape.prose * len(paragraph):
        return False
    # Without digits, case and punctuation: "version 1.2" repeats "version 1.1".
    mark = hashlib.blake2b("".join(letters).lower().encode(), digest_size=8).digest()
    if mark in seen:
        return False
    seen.add(mark)
    return True


def _docstrings() -> Iterator[list[str]]:
    """Paragraphs of the docstrings of each module, Python's language reference first."""
    from pydoc_data import topics

    for topic in sorted(topics.topics):
        yield re.split(r"\n\s*\n", topics.topics[topic])
    standard = Path(sysconfig.get_paths()["stdlib"])
    installed = Path(sysconfig.get_paths()["purelib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
    for folder in (standard, *(installed / name for name in _PACKAGES)):
        for path in sorted(folder.rglob("*.py")):
            if skipped.isdisjoint(path.relative_to(folder).parts):
                text = path.read_bytes()[:_LONGEST_FILE].decode("utf-8", "replace")
                yield [
                    paragraph
                    for docstring in _DOCSTRING.findall(text)
                    for paragraph in re.split(r"\n\s*\n", docstring)
                ]


def _manuals() -> Iterator[list[str]]:
    """Paragraphs of each English manual page; pages in the order of a digest of their names."""
    for section in _MANUAL_SECTIONS:
        pages = Path("/usr/share/man", f"man{section}").glob("*")
        for path in sorted(pages, key=lambda p: hashlib.blake2b(p.name.encode()).digest()):
            yield _roff_paragraphs(_read(path))


def _documents() -> Iterator[list[str]]:
    for path in sorted(Path("/usr/share/doc").rglob("*")):
        if _DOCUMENTS.match(path.name) and path.is_file():
            yield re.split(r"\n\s*\n", _read(path))


def _read(path: Path) -> str:
    """A text file, decompressed; empty if it cannot be read (a broken link, a damaged file)."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                return packed.read(_LONGEST_FILE).decode("utf-8", "replace")
        return path.read_bytes()[:_LONGEST_FILE].decode("utf-8", "replace")
    except (OSError, EOFError):
        return ""


def _roff_paragraphs(page: str) -> list[str]:
    """The running text of a manual page in roff (the `man` and the usual `mdoc` macros)."""
    paragraphs: list[list[str]] = [[]]
    for line in page.splitlines():
        if line.startswith((".", "'")):
            name, _, rest = line[1:].strip().partition(" ")
            if name in _BREAKS or not name:
                paragraphs.append([])
            elif name in _FONTS:
                paragraphs[-1].append(rest.replace('"', ""))
        else:
            paragraphs[-1].append(line)
    found = []
    for lines in paragraphs:
        text = "\n".join(lines)
        for pattern, replacement in _ROFF_ESCAPES:
            text = pattern.sub(replacement, text)
        found.append(text)
    return found


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
        tokenizer_object=bpe, pad_token=_PAD, eos_token=_END, clean_up_tokenization_spaces=False
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
