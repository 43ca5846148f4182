"""What a whole loop's trajectories must look like: enumerated laws, and how far samples are off.

Everything that can be said about a trajectory of a tiny policy is enumerated by plain Hugging Face
forward passes in float32 (log-softmax in float64): the law of whole responses for each prompt, that
of their lengths, and the distribution of each token given those before it, also where the weights
changed in the middle of a response and the tokens before the change left their KV behind.

Chi-square tests are stratified: the number of responses to each prompt is given, not drawn, so each
prompt has its own degrees of freedom. Cells that expect fewer than `LEAST` are pooled.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2

LEAST = 10.0
"""A cell of a chi-square test expects at least so many."""

Text = tuple[int, ...]
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Way:
    """How responses are drawn."""

    length: int
    """Most tokens."""
    stop: int
    vocabulary: int
    temperature: float = 1.0
    top_p: float = 1.0


class Laws:
    """The laws of two policies, which take turns, for some prompts."""

    def __init__(self, policies: Sequence[Any], prompts: Sequence[Sequence[int]], way: Way) -> None:
        self.policies = policies
        self.prompts = [list(map(int, prompt)) for prompt in prompts]
        self.way = way
        self._given: dict[tuple[int, int], dict[Text, Doubles]] = {}
        self._across: dict[tuple[int, int, int], dict[Text, Doubles]] = {}

    def given(self, policy: int, prompt: int) -> dict[Text, Doubles]:
        """`[V]` distribution of the next token after each text that can go on."""
        key = (policy, prompt)
        if key not in self._given:
            table: dict[Text, Doubles] = {}
            for size in range(self.way.length):
                texts = self._open_texts(size)
                table |= zip(texts, self._forward(policy, prompt, texts), strict=True)
            self._given[key] = table
        return self._given[key]

    def across(self, old: int, prompt: int, swap: int) -> dict[Text, Doubles]:
        """The same behind a swap of weights: `old` drew the first `swap` tokens.

        The KV of a token is made by the step that draws the next one: that of the prompt and of
        all but the last of those tokens is the old policy's, and stays.
        """
        key = (old, prompt, swap)
        if key not in self._across:
            table: dict[Text, Doubles] = {}
            for size in range(swap, self.way.length):
                texts = self._open_texts(size)
                rows = self._forward(1 - old, prompt, texts, before=(old, swap))
                table |= zip(texts, rows, strict=True)
            self._across[key] = table
        return self._across[key]

    def law(self, policy: int, prompt: int) -> dict[Text, float]:
        """Probability of every response."""
        given = self.given(policy, prompt)
        out: dict[Text, float] = {}
        mass: dict[Text, float] = {(): 1.0}
        for text, row in given.items():  # shorter ones come first
            for token in np.flatnonzero(row):
                longer = (*text, int(token))
                ended = token == self.way.stop or len(longer) == self.way.length
                (out if ended else mass)[longer] = mass.get(text, 0.0) * float(row[token])
        assert abs(sum(out.values()) - 1) < 1e-9
        return out

    def per_token(self, prompt: int) -> float:
        """Mean total variation of the two policies at a token of the first one's texts."""
        mine, other = self.given(0, prompt), self.given(1, prompt)
        mass: dict[Text, float] = {(): 1.0}
        for text, row in mine.items():
            for token in np.flatnonzero(row):
                if token != self.way.stop:
                    mass[(*text, int(token))] = mass.get(text, 0.0) * float(row[token])
        away = sum(
            mass.get(t, 0.0) * 0.5 * float(np.abs(row - other[t]).sum()) for t, row in mine.items()
        )
        return away / sum(mass.get(t, 0.0) for t in mine)

    def _open_texts(self, size: int) -> list[Text]:
        """Every text of this size that has not ended."""
        alphabet = [t for t in range(self.way.vocabulary) if t != self.way.stop]
        grid = np.stack(np.meshgrid(*[alphabet] * size, indexing="ij"), -1) if size else [()]
        return [tuple(map(int, row)) for row in np.reshape(grid, (-1, size))] if size else [()]

    @torch.no_grad()
    def _forward(
        self,
        policy: int,
        prompt: int,
        texts: Sequence[Text],
        before: tuple[int, int] | None = None,
    ) -> Doubles:
        from transformers import DynamicCache

        ids = torch.tensor([[*self.prompts[prompt], *text] for text in texts])
        model, known, cache = self.policies[policy], 0, DynamicCache()
        if before is not None:
            old, swap = before
            known = len(self.prompts[prompt]) + swap - 1
            self.policies[old](ids[:, :known], past_key_values=cache, use_cache=True)
        logits = model(ids[:, known:], past_key_values=cache, use_cache=True).logits[:, -1].double()
        return self._processed((logits / self.way.temperature).softmax(-1).numpy())

    def _processed(self, rows: Doubles) -> Doubles:
        if self.way.top_p >= 1:
            return rows
        order = np.argsort(-rows, axis=1, kind="stable")
        ranked = np.take_along_axis(rows, order, 1)
        kept = np.cumsum(ranked, 1) - ranked < self.way.top_p
        out = np.zeros_like(rows)
        np.put_along_axis(out, order, ranked * kept, 1)
        return np.asarray(out / out.sum(1, keepdims=True))


@dataclass(frozen=True)
class Verdict:
    """Of a stratified chi-square test, and the distance that it saw."""

    samples: int
    p_value: float
    cells: int
    tv: float
    """Total variation of the pooled cells' frequencies."""
    tv_by_chance: float
    """Its mean for an exact sampler, by the normal approximation."""

    def __str__(self) -> str:
        return (
            f"p = {self.p_value:.3g}, TV {self.tv:.4f} (chance {self.tv_by_chance:.4f}), "
            f"{self.cells} cells, {self.samples} samples"
        )


def judge(
    drawn: Iterable[tuple[Hashable, Hashable]],
    law: Mapping[Any, Mapping[Any, float]],
    pool: Any = None,
) -> Verdict:
    """Compare (stratum, outcome) pairs with each stratum's law.

    Args:
        drawn: the number of each stratum is taken as given.
        law: probability of every outcome, by stratum.
        pool: outcome to the name of the pool that it falls into if it is rare; None: one pool.

    Rare cells of a stratum whose pools stay rare share one cell; a stratum with one cell says
    nothing.
    """
    strata: dict[Hashable, Counter[Any]] = {}
    for stratum, outcome in drawn:
        strata.setdefault(stratum, Counter())[outcome] += 1
    statistic, freedom, away, chance, total, cells = 0.0, 0, 0.0, 0.0, 0, 0
    for stratum, counts in strata.items():
        n = counts.total()
        total += n
        impossible = [outcome for outcome in counts if law[stratum].get(outcome, 0.0) <= 0.0]
        if impossible:
            return Verdict(n, 0.0, 1, 1.0, 0.0)
        want, have = _pooled(counts, law[stratum], n, pool)
        if len(want) < 2:
            continue
        statistic += float(((have - want) ** 2 / want).sum())
        freedom += len(want) - 1
        cells += len(want)
        away += float(np.abs(have - want).sum()) / 2
        chance += float(np.sqrt(want * (1 - want / n)).sum()) * np.sqrt(2 / np.pi) / 2
    p = float(chi2.sf(statistic, freedom)) if freedom else 1.0
    return Verdict(total, p, cells, away / max(total, 1), chance / max(total, 1))


def _pooled(
    counts: Counter[Any], law: Mapping[Any, float], n: int, pool: Any
) -> tuple[Doubles, Doubles]:
    want: defaultdict[Any, float] = defaultdict(float)
    have: Counter[Any] = Counter()
    for outcome, mass in law.items():
        cell = outcome
        if mass * n < LEAST:
            cell = ("rare", None if pool is None else pool(outcome))
        want[cell] += mass * n
        have[cell] += counts[outcome]
    for cell in [c for c in want if want[c] < LEAST]:
        want["rest"] += want.pop(cell)
        have["rest"] += have.pop(cell)
    if 0 < want["rest"] < LEAST and len(want) > 1:
        least = min((c for c in want if c != "rest"), key=lambda c: want[c])
        want[least] += want.pop("rest")
        have[least] += have.pop("rest")
    names = [c for c in want if want[c] > 0]
    return np.array([want[c] for c in names]), np.array([have[c] for c in names], float)
