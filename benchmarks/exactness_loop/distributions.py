"""The exact distributions of responses and tokens, enumerated for two tiny policies.

Everything that can be said about a trajectory of a tiny policy is enumerated with plain Hugging
Face forward passes in float32 (softmax in float64): the distribution of whole responses to each
prompt and of their lengths, and the distribution of each token given the tokens before it. The
latter is also enumerated for responses during which the weights changed and whose earlier tokens
left the KV of the old weights behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.sampling.stopping import StopRule

Text = tuple[int, ...]
"""Response tokens."""
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class ResponseSpace:
    max_tokens: int
    stop: int
    """The stop token."""
    vocabulary: int
    """Number of token ids."""
    strings: StopRule | None = None
    """Ends a response as well."""

    def ends(self, text: Text) -> bool:
        """Whether a text is a whole response."""
        stopped = self.strings is not None and (
            self.strings.follow(self.strings.start, np.array(text, np.int64))[0] is not None
        )
        return stopped or text[-1:] == (self.stop,) or len(text) == self.max_tokens


class ResponseDistributions:
    """Distributions of two policies that take turns, for some prompts. Tables are computed once."""

    def __init__(
        self, policies: Sequence[Any], prompts: Sequence[Sequence[int]], space: ResponseSpace
    ) -> None:
        self.policies = policies
        self.prompts = [list(map(int, prompt)) for prompt in prompts]
        self.space = space
        self._next_token: dict[tuple[int, int], dict[Text, Doubles]] = {}
        self._on_old_kv: dict[tuple[int, int, int], dict[Text, Doubles]] = {}
        self._responses: dict[tuple[int, int], dict[Text, float]] = {}

    def next_token(self, policy: int, prompt: int) -> dict[Text, Doubles]:
        """`[V]` distribution of the next token after each unfinished text."""
        key = (policy, prompt)
        if key not in self._next_token:
            table: dict[Text, Doubles] = {}
            for size in range(self.space.max_tokens):
                texts = self._unfinished_texts(size)
                table |= zip(texts, self._forward(policy, prompt, texts), strict=True)
            self._next_token[key] = table
        return self._next_token[key]

    def next_token_on_old_kv(self, old: int, prompt: int, swap: int) -> dict[Text, Doubles]:
        """The same for the other policy, after weights were swapped and `old` drew `swap` tokens.

        A token's KV is computed by the step that draws the next token. So the KV of the prompt and
        of all of these tokens but the last is the old policy's.
        """
        key = (old, prompt, swap)
        if key not in self._on_old_kv:
            table: dict[Text, Doubles] = {}
            for size in range(swap, self.space.max_tokens):
                texts = self._unfinished_texts(size)
                rows = self._forward(1 - old, prompt, texts, before=(old, swap))
                table |= zip(texts, rows, strict=True)
            self._on_old_kv[key] = table
        return self._on_old_kv[key]

    def responses(self, policy: int, prompt: int) -> dict[Text, float]:
        key = (policy, prompt)
        if key not in self._responses:
            self._responses[key] = self._enumerate(policy, prompt)
        return self._responses[key]

    def _enumerate(self, policy: int, prompt: int) -> dict[Text, float]:
        finished: dict[Text, float] = {}
        mass: dict[Text, float] = {(): 1.0}
        for text, row in self.next_token(policy, prompt).items():  # shorter texts come first
            for token in np.flatnonzero(row):
                longer = (*text, int(token))
                (finished if self.space.ends(longer) else mass)[longer] = mass.get(
                    text, 0.0
                ) * float(row[token])
        assert abs(sum(finished.values()) - 1) < 1e-9
        return finished

    def policy_distance(self, prompt: int) -> float:
        """Mean total variation between the policies at a token of the first one's responses."""
        mine, other = self.next_token(0, prompt), self.next_token(1, prompt)
        mass: dict[Text, float] = {(): 1.0}
        for text, row in mine.items():
            for token in np.flatnonzero(row):
                if not self.space.ends((*text, int(token))):
                    mass[(*text, int(token))] = mass.get(text, 0.0) * float(row[token])
        total = sum(
            mass.get(t, 0.0) * 0.5 * float(np.abs(row - other[t]).sum()) for t, row in mine.items()
        )
        return total / sum(mass.get(t, 0.0) for t in mine)

    def _unfinished_texts(self, size: int) -> list[Text]:
        """Every text of this many tokens that has not ended."""
        if not size:
            return [()]
        alphabet = [t for t in range(self.space.vocabulary) if t != self.space.stop]
        grid = np.stack(np.meshgrid(*[alphabet] * size, indexing="ij"), -1)
        texts = [tuple(map(int, row)) for row in np.reshape(grid, (-1, size))]
        return [text for text in texts if not self.space.ends(text)]

    @torch.no_grad()
    def _forward(
        self,
        policy: int,
        prompt: int,
        texts: Sequence[Text],
        before: tuple[int, int] | None = None,
    ) -> Doubles:
        """`[N, V]` distributions after texts; `before`: (old policy, tokens that it drew)."""
        from transformers import DynamicCache

        ids = torch.tensor([[*self.prompts[prompt], *text] for text in texts])
        model, known, cache = self.policies[policy], 0, DynamicCache()
        if before is not None:
            old, swap = before
            known = len(self.prompts[prompt]) + swap - 1
            self.policies[old](ids[:, :known], past_key_values=cache, use_cache=True)
        logits = model(ids[:, known:], past_key_values=cache, use_cache=True).logits[:, -1].double()
        return np.asarray(logits.softmax(-1).numpy())
