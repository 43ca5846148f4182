"""Verification and drawing under a real vocabulary.

    python -m benchmarks.vocabulary [--quick] [--json FILE]

    language  a small language model of 32,000 tokens, trained here on this machine's documentation,
              and policy steps taken with it by `asyncrl run`: mass outside the top K, and the share
              of a text that verification keeps one and four optimizer steps later
    flat      the same for a model of 5,000 tokens that has learned nothing: 31,312 tokens
    cost      drawing and verification per token, next to the head (`benchmarks.vocabulary.cost`)

Shares "by the engine" are those of the torch engine, which generates, takes the later weights and
verifies; the others are expectations (`benchmarks.vocabulary.expected`). The first run also makes
the models, which takes some minutes; they stay in the cache directory.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from asyncrl.rollout.trajectory import IntArray
from benchmarks.harness import parser_of, pick, report
from benchmarks.vocabulary import cost
from benchmarks.vocabulary.expected import expected
from benchmarks.vocabulary.findings import Findings, Pair, tables
from benchmarks.vocabulary.language_model import CorpusShape, LanguageModel, model_record
from benchmarks.vocabulary.policies import (
    FLAT,
    LANGUAGE,
    Job,
    PolicyVersions,
    Steps,
    ensure_versions,
    measure,
)
from benchmarks.vocabulary.training import TrainingRecipe

KS = (4, 8, 16, 64)
LENGTHS = (64, 256)
K = 64
"""Of the engine, and of the ratios."""
FLAT_TEXTS, FLAT_LENGTH = 103, 304
"""31,312 tokens."""


class Effort(NamedTuple):
    texts: int
    """Of the language model, 256 tokens each."""
    rounds: int
    """Of the costs."""
    language: Steps = LANGUAGE
    flat: Steps = FLAT
    flat_texts: int = FLAT_TEXTS
    flat_length: int = FLAT_LENGTH
    lengths: tuple[int, ...] = LENGTHS
    vocabularies: tuple[int, ...] = cost.VOCABULARIES
    """Of the costs."""
    cached: bool = True
    """Whether the models are kept."""


QUICK, FULL = Effort(32, 9), Effort(256, 31)
_SMALL = LanguageModel(
    corpus=CorpusShape(docstrings=150_000, manuals=0, documents=0, minimum=100_000),
    training=TrainingRecipe(32, 64, layers=1, heads=2, steps=2, rows=4, sequence=32),
    vocabulary=600,
    reads=20_000,
    prompts=8,
)
_FEW = ("scheduler.groups_per_step=2", "sampling.max_tokens=8", "engine.slots=16",
        "task.evaluation_size=1", "evaluation.prompts=1")  # fmt: skip
_TWO = Steps(_SMALL, (1, 2), 0.9, _FEW)
SMOKE = Effort(2, 1, _TWO, _TWO, 2, 8, lengths=(8,), vocabularies=(600,), cached=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "3 minutes on two cores; in full some 20")
    options = parser.parse_args(arguments)
    effort = pick(options, FULL, QUICK, SMOKE)
    disable_progress_bar()
    with TemporaryDirectory() as folder:
        models = None if effort.cached else Path(folder)
        made = [ensure_versions(steps, models) for steps in (effort.language, effort.flat)]
        findings = find(effort, *made)
    report(options, "vocabulary", asdict(findings), findings.ratios(), *tables(findings))
    return 0


def find(effort: Effort, language: PolicyVersions, flat: PolicyVersions) -> Findings:
    first, second, *others = effort.language.keep
    last = others[-1] if others else second
    earlier, later = effort.flat.keep
    lengths = effort.lengths
    return Findings(
        model=model_record(language.paths[0]),
        rewards=language.record,
        language=[
            measure_pair(
                language, versions, Job(effort.texts, max(lengths), K, temperature), lengths
            )
            for versions, temperature in (
                ((first, second), effort.language.temperature),
                ((first, last), effort.language.temperature),
                ((first, second), 1.0),
            )
        ],
        flat=measure_pair(
            flat,
            (earlier, later),
            Job(effort.flat_texts, effort.flat_length, K),
            (effort.flat_length,),
        ),
        costs=[
            cost.measure(vocabulary, k, effort.rounds)
            for vocabulary in effort.vocabularies
            for k in (8, K)
        ],
    )


def measure_pair(
    made: PolicyVersions, versions: tuple[int, int], job: Job, lengths: Sequence[int]
) -> Pair:
    """Texts of one version, verified under another by the engine and in expectation."""
    earlier, later = (made.paths[version] for version in versions)
    began = time.monotonic()
    found = asyncio.run(measure(earlier, later, prompts_of(made), job))
    old, new = (AutoModelForCausalLM.from_pretrained(path) for path in (earlier, later))
    expectation = expected(old, new, found.texts, KS, lengths, job.temperature)
    sys.stdout.write(
        f"{job.texts} texts of {earlier.parent.name} judged in {time.monotonic() - began:.0f} s\n"
    )
    return Pair(
        earlier=versions[0],
        later=versions[1],
        temperature=job.temperature,
        tokens=job.texts * job.length,
        k=job.k,
        engine_share=found.share,
        engine_outside=found.outside,
        expected=expectation,
    )


def prompts_of(made: PolicyVersions) -> list[IntArray]:
    tokenizer = AutoTokenizer.from_pretrained(made.paths[0])
    lines = made.prompts.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    return [np.array(ids, np.int32) for ids in tokenizer(texts)["input_ids"]]
