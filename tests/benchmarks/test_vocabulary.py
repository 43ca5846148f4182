"""benchmarks.vocabulary on tiny cases: text, model, expectations, and the engine they describe."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.rollout.acceptance import verify_kept
from benchmarks.vocabulary import cost, language_model
from benchmarks.vocabulary.expected import (
    TextRatios,
    block_weights,
    expected,
    kept_shares,
)
from benchmarks.vocabulary.findings import Findings, Pair, tables
from benchmarks.vocabulary.language_model import (
    PROMPTS,
    LanguageModel,
    ensure_language_model,
    model_record,
)
from benchmarks.vocabulary.policies import Job, measure
from benchmarks.vocabulary.reward import plain_words
from benchmarks.vocabulary.training import TrainingRecipe

TINY = LanguageModel(
    corpus=language_model.CorpusShape(docstrings=150_000, manuals=0, documents=0, minimum=100_000),
    training=TrainingRecipe(
        hidden_size=32, intermediate_size=64, layers=1, heads=2, steps=40, rows=4, sequence=32
    ),
    vocabulary=600,
    reads=20_000,
    prompts=8,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where language models are kept."""
    return tmp_path_factory.mktemp("models")


def test_the_text_is_prose_and_nothing_is_there_twice() -> None:
    shape = TINY.corpus
    paragraphs = [line for text in language_model.read_corpus(shape) for line in text.splitlines()]
    assert len(paragraphs) == len(set(paragraphs)) > 300
    assert all(len(p) >= shape.shortest and p.isascii() for p in paragraphs)
    letters = sum(sum(c.isalpha() or c == " " for c in p) for p in paragraphs)
    assert letters >= shape.prose * sum(map(len, paragraphs))
    with pytest.raises(RuntimeError, match=r"characters of English text .* 9,000,000 are needed"):
        language_model.read_corpus(replace(shape, minimum=9_000_000))


def test_manual_pages_lose_their_markup() -> None:
    page = """.\\" a comment
.TH LS 1
.SH NAME
ls \\- list \\fBdirectory\\fR contents
.PP
List information about the
.I FILEs
(the current directory by default).
"""
    found = [" ".join(p.split()) for p in language_model._roff_paragraphs(page)]
    assert [p for p in found if p] == [
        "ls - list directory contents",
        "List information about the FILEs (the current directory by default).",
    ]


def test_a_model_is_made_once_learns_and_is_made_again_when_its_record_is_missing(
    models: Path,
) -> None:
    place = ensure_language_model(TINY, models)
    made = model_record(place)
    assert made["vocabulary"] == 600
    assert made["perplexity"] < 400  # an even guess has 600
    assert len((place / PROMPTS).read_text().splitlines()) == 8
    weights = place / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert ensure_language_model(TINY, models) == place
    assert weights.stat().st_mtime_ns == before
    (place / "language_model.json").unlink()  # as if it had been interrupted
    ensure_language_model(TINY, models)
    assert weights.stat().st_mtime_ns > before
    assert model_record(place)["text_sha256"] == made["text_sha256"]
    other = replace(TINY, reads=10_000)
    assert other.digest() != TINY.digest()


def test_weights_are_the_acceptance_probabilities_of_the_rule_that_runs() -> None:
    """Twelve symbols in each of 20,000 texts: as many are accepted as the weights add up to."""
    rng = np.random.default_rng(0)
    rows, length, size = 20_000, 12, 6
    q, p = (rng.dirichlet(np.full(size, 2.0), length) for _ in range(2))
    p = 0.8 * q + 0.2 * p
    uniforms = rng.random((rows, length, 1))
    tokens = (q.cumsum(-1)[None, :, :-1] < uniforms).sum(-1)
    accepted = verify_kept(
        tokens.reshape(-1).astype(np.int32),
        *(np.tile(np.log(values), (rows, 1)) for values in (q, p)),
        offsets=np.arange(rows + 1) * length,
        uniforms=rng.random((rows * length, 2)),
    ).accepted
    wanted = block_weights((p / q)[np.arange(length), tokens]).sum(1)
    difference = accepted - wanted
    assert abs(difference.mean()) < 5 * difference.std() / math.sqrt(rows)
    assert 0.5 * length < accepted.mean() < 0.9 * length


def test_a_tail_token_keeps_its_name_as_often_as_the_formula_says() -> None:
    """400,000 draws of shared noise against the closed form, for two K."""
    rng = np.random.default_rng(1)
    size, draws = 9, 400_000
    q, p = rng.dirichlet(np.ones(size), 2)
    noise = rng.gumbel(size=(draws, size))
    order = np.argsort(-q)
    model = _Fixed(q), _Fixed(p)
    for k in (2, 4):
        outside = order[k:]
        old, new = (outside[(np.log(d[outside]) + noise[:, outside]).argmax(1)] for d in (q, p))
        for token in outside[:3]:
            mine = old == token
            seen = float((new[mine] == token).mean())
            response = np.full(2, token, np.int32)
            found = expected(*model, [(response[:1], response)], (k,), (1,))
            # The share of a text of one tail token: its weight times this probability.
            ratio = (1 - p[order[:k]].sum()) / (1 - q[order[:k]].sum())
            share = found.kept[1][k]["tail"] / min(1.0, ratio)
            assert abs(share - seen) < 5 * 0.5 / math.sqrt(mine.sum())


class _Fixed(torch.nn.Module):
    """A policy whose distribution is the same everywhere."""

    def __init__(self, distribution: np.ndarray) -> None:
        super().__init__()
        self._logits = torch.log(torch.tensor(distribution, dtype=torch.float32))

    def forward(self, tokens: torch.Tensor, logits_to_keep: int) -> object:
        del tokens

        class _Output:
            logits = self._logits.expand(1, logits_to_keep, -1)

        return _Output


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two Llamas of 300 tokens with much mass outside their top 8, close to each other."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    paths = [tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")]
    model.save_pretrained(paths[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.003)
    model.save_pretrained(paths[1])
    return paths


def test_the_engine_keeps_what_is_expected(
    versions: list[Path],
) -> None:
    job = Job(texts=64, length=40, k=8, repeats=4)
    prompts = [np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)]
    found = asyncio.run(measure(*versions, prompts, job))
    assert len(found.kept) == 256
    models = [LlamaForCausalLM.from_pretrained(path) for path in versions]
    expectation = expected(*models, found.texts, (4, 8), (20, 40))
    shares = expectation.kept[40][8]
    assert found.outside == pytest.approx(expectation.outside[8], abs=0.03)
    assert found.outside > 0.3
    assert shares["all"] > 0.8
    # Each text's share lies in [0, 1]; the noise of 64 texts and 4 x 64 verifications.
    assert abs(found.share - shares["tail"]) < 4 * 0.4 / math.sqrt(64)
    assert expectation.kept[20][8]["tail"] > shares["tail"] > expectation.kept[40][4]["tail"]


def test_costs_and_findings_are_reported(versions: list[Path]) -> None:
    one = cost.measure(2_000, 8, rounds=2)
    assert all(value > 0 for value in one.parts.values())
    models = [LlamaForCausalLM.from_pretrained(path) for path in versions]
    text = np.arange(3, 12, dtype=np.int32)
    pair = Pair(0, 1, 1.0, 9, 8, 0.5, 0.4, expected(*models, [(text[:2], text)], (4, 8), (5, 9)))
    made = {"vocabulary": 300, "parameters": 1, "perplexity": 2.0, "held_out_perplexity": 3.0}
    findings = Findings(made, {}, [pair], pair, [one])
    assert findings.ratios()["kept_flat"] == 0.5
    shares = pair.expected.kept[9][8]
    ratios_ = findings.ratios()
    assert ratios_["kept_tail_vs_all"] == pytest.approx(shares["tail"] / shares["all"])
    assert ratios_["engine_vs_expected"] == pytest.approx(0.5 / shares["tail"])
    assert [table.row_count for table in tables(findings)][:3] == [4, 4, 1]


def test_plain_words_are_counted() -> None:
    assert plain_words("", "The cat understands, I say.", {}) == 4 / 5
    assert plain_words("", "123 ...", {}) == 0.0


def test_ratios_of_the_first_tokens() -> None:
    ratios = TextRatios(*(np.ones((2, 5)) * part for part in (0.5, 2.0, 0.0, 1.0)))
    assert ratios.first(3).token.shape == (2, 3)
    assert kept_shares(ratios.first(1))["all"] == 0.5
