"""The drafters that the cache is compared with: a naive one, and ArcticInference's.

ArcticInference (`pip install 'asyncrl[bench]'`, optional) is called as vLLM 0.32 calls it for
`method: suffix` (its `SuffixDecodingProposer`): `start_request(id, prompt)` builds a tree of the
prompt; `add_active_response(id, list)` appends the response to that tree and to a global one;
`speculate(id, last tokens)` matches them in both and takes the better draft; `stop_request(id)`
drops the prompt's tree. vLLM's settings are the faster ones: trees of depth 24, a draft no longer
than its match. They cannot draft 32 tokens, so the package's own default of 64 is measured as well.
"""

import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable
from importlib import metadata
from typing import Any, Protocol

import numpy as np

from asyncrl.rollout.trajectory import IntArray

PROMPT = np.arange(900_000, 900_020, dtype=np.int32)
GROUP, BUDGET, ACCEPTED = 8, 32, 5


class Drafter(Protocol):
    """The part of `asyncrl.cache.tree.rollout_tree.RolloutCache` that engines use."""

    def open(self, key: str, context: IntArray) -> int:
        """As `RolloutCache.open`."""

    def close(self, row: int) -> None:
        """As `RolloutCache.close`."""

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        """As `RolloutCache.extend`."""

    def draft(self, rows: IntArray, budgets: IntArray) -> Any:
        """As `RolloutCache.draft`."""


def rollouts(prompts: int, epochs: int, length: int, seed: int = 0) -> list[list[IntArray]]:
    """`[epoch][prompt * GROUP + sample]` token arrays `[length]`, all from one policy.

    Each prompt has a text with branches that rejoin it, and 1% of the tokens are random, so
    drafting has to re-synchronise.
    """
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, 5000, (prompts, length), dtype=np.int32)
    forks = rng.random((prompts, length)) < 0.1
    forks[:, -5:] = False
    targets = np.arange(length)[None, :, None] + rng.integers(-4, 20, (prompts, length, 3))
    targets = np.where(forks[:, :, None], targets, np.arange(1, length + 1)[None, :, None])
    targets = np.clip(targets, 0, length - 1).astype(np.int32)
    odds = rng.dirichlet([2, 1, 0.5], (prompts, length)).cumsum(-1)
    prompt = np.tile(np.repeat(np.arange(prompts), GROUP), epochs)
    state = np.zeros(len(prompt), np.int64)
    out = np.empty((len(prompt), length), np.int32)
    for at in range(length):
        strange = rng.random(len(prompt)) < 0.01
        out[:, at] = np.where(strange, rng.integers(5000, size=len(prompt)), texts[prompt, state])
        choice = (rng.random(len(prompt))[:, None] > odds[prompt, state, :2]).sum(-1)
        state = targets[prompt, state, choice].astype(np.int64)
    return [list(part) for part in np.split(out, epochs)]


def insert_speed(drafter: Drafter, samples: list[IntArray]) -> float:
    """Tokens per second, one rollout after the other."""
    start = time.process_time()
    for index, tokens in enumerate(samples):
        row = drafter.open(f"prompt {index // GROUP}", PROMPT)
        drafter.extend(np.array([row]), tokens, np.array([0, len(tokens)]))
        drafter.close(row)
    return sum(map(len, samples)) / (time.process_time() - start)


def step_speed(drafter: Drafter, samples: list[IntArray], steps: int) -> dict[str, float]:
    """Microseconds per row and step: every row adds 5 tokens and asks for up to 32."""
    rows = np.array([drafter.open(f"prompt {i // GROUP}", PROMPT) for i in range(len(samples))])
    offsets = np.arange(len(rows) + 1) * ACCEPTED
    budgets = np.full(len(rows), BUDGET)
    extending = drafting = drafted = 0.0
    for step in range(steps):
        tokens = np.concatenate([s[step * ACCEPTED : (step + 1) * ACCEPTED] for s in samples])
        start = time.process_time()
        drafter.extend(rows, tokens, offsets)
        middle = time.process_time()
        drafts = drafter.draft(rows, budgets)
        end = time.process_time()
        extending += middle - start
        drafting += end - middle
        drafted += len(drafts.tokens)
    for row in rows.tolist():
        drafter.close(row)
    return step_numbers(extending, drafting, drafted, steps * len(rows))


def step_numbers(
    extending: float, drafting: float, drafted: float, row_steps: int
) -> dict[str, float]:
    """Seconds and tokens of all row-steps as numbers per row-step."""
    scale = 1e6 / row_steps
    return {
        "extend_us": extending * scale,
        "draft_us": drafting * scale,
        "total_us": (extending + drafting) * scale,
        "drafted_tokens": drafted / row_steps,
    }


def replay(drafter: Drafter, samples: list[IntArray], budget: int) -> dict[str, float]:
    """Decode given rollouts with drafts; returns tokens per row-step and the share accepted."""
    steps = drafted = 0
    for first in range(0, len(samples), GROUP):
        live = {
            drafter.open(f"prompt {first // GROUP}", PROMPT): (tokens, 0)
            for tokens in samples[first : first + GROUP]
        }
        while live:
            rows = np.array(list(live))
            left = np.array([len(tokens) - at - 1 for tokens, at in live.values()])
            drafts = drafter.draft(rows, np.minimum(left, budget))
            chunks = []
            for index, (row, (tokens, at)) in enumerate(list(live.items())):
                draft = drafts.tokens[drafts.offsets[index] : drafts.offsets[index + 1]]
                agree = tokens[at : at + len(draft)] == draft
                kept = int(agree.cumprod().sum())
                chunks.append(tokens[at : at + kept + 1])
                live[row] = (tokens, at + kept + 1)
                drafted += len(draft)
            steps += len(rows)
            offsets = np.cumsum([0, *map(len, chunks)])
            drafter.extend(rows, np.concatenate(chunks), offsets)
            for row in [row for row, (tokens, at) in live.items() if at == len(tokens)]:
                drafter.close(row)
                del live[row]
    total = sum(map(len, samples))
    return {"tokens_per_step": total / steps, "accepted_share": (total - steps) / max(1, drafted)}


VLLM_DEPTH, OWN_DEPTH = 24, 64
MAX_REQUESTS = 10_000
"""vLLM's setting; the work here never has as many."""


class NaiveDrafter:
    """Majority vote over the tokens that followed the last n tokens, n = 8, 4, 2."""

    ORDERS = (8, 4, 2)

    def __init__(self) -> None:
        self.counts: dict[tuple[Any, ...], Counter[int]] = defaultdict(Counter)
        self.rows: dict[int, tuple[str, list[int]]] = {}
        self.next = 0

    def open(self, key: str, context: IntArray) -> int:
        """A row consists of the key and all tokens so far."""
        self.next += 1
        self.rows[self.next] = (key, context[-8:].tolist())
        return self.next

    def close(self, row: int) -> None:
        del self.rows[row]

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        """Count the tokens that followed each of the last n-grams."""
        for at, row in enumerate(rows.tolist()):
            key, past = self.rows[row]
            for token in tokens[offsets[at] : offsets[at + 1]].tolist():
                for order in self.ORDERS:
                    self.counts[key, *past[-order:]][token] += 1
                past.append(token)

    def draft(self, rows: IntArray, budgets: IntArray) -> Any:
        """Append the most frequent follower of the longest known n-gram, repeatedly."""
        tokens: list[int] = []
        offsets = [0]
        for row, budget in zip(rows.tolist(), budgets.tolist(), strict=True):
            key, past = self.rows[row]
            ahead = past[-8:]
            for _ in range(budget):
                found = (self.counts.get((key, *ahead[-order:])) for order in self.ORDERS)
                votes = next((counter for counter in found if counter), None)
                if votes is None:
                    break
                ahead.append(votes.most_common(1)[0][0])
                tokens.append(ahead[-1])
            offsets.append(len(tokens))
        return Namespace(tokens=np.array(tokens, np.int32), offsets=offsets)


class ArcticDrafter:
    """ArcticInference's cache as a `Drafter`, for `replay`; the timed loops call it directly."""

    def __init__(self, make: Callable[..., Any], depth: int) -> None:
        self.cache = make(max_tree_depth=depth, max_cached_requests=MAX_REQUESTS)
        self.depth = depth
        self.past: dict[int, list[int]] = {}
        self.next = 0

    def open(self, key: str, context: IntArray) -> int:  # noqa: ARG002  (it has no keys)
        """The cache finds prompts by their tokens alone."""
        self.next += 1
        self.cache.start_request(self.next, context)
        self.past[self.next] = context.tolist()
        return self.next

    def close(self, row: int) -> None:
        """The response stays in the global tree."""
        self.cache.stop_request(row)
        del self.past[row]

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        for at, row in enumerate(rows.tolist()):
            new = tokens[offsets[at] : offsets[at + 1]].tolist()
            self.cache.add_active_response(row, new)
            self.past[row] += new

    def draft(self, rows: IntArray, budgets: IntArray) -> Any:
        """With vLLM's factor 1.0 and minimum probability 0.1, the package's defaults."""
        tokens: list[int] = []
        offsets = [0]
        for row, budget in zip(rows.tolist(), budgets.tolist(), strict=True):
            pattern = np.array(self.past[row][-self.depth :], np.int32)
            tokens += self.cache.speculate(row, pattern, max_spec_tokens=budget).token_ids
            offsets.append(len(tokens))
        return Namespace(tokens=np.array(tokens, np.int32), offsets=offsets)

    def insert_speed(self, samples: list[IntArray]) -> float:
        """Tokens per second, one rollout after the other, as lists: its fastest input."""
        lists = [tokens.tolist() for tokens in samples]
        first = self.next
        self.next += len(lists)
        start = time.process_time()
        for request, tokens in enumerate(lists, first):
            self.cache.start_request(request, PROMPT)
            self.cache.add_active_response(request, tokens)
            self.cache.stop_request(request)
        return sum(map(len, lists)) / (time.process_time() - start)

    def step_speed(self, samples: list[IntArray], steps: int) -> dict[str, float]:
        """As `step_speed`; what vLLM has ready anyway is prepared outside the timing."""
        first = self.next
        self.next += len(samples)
        whole = [np.concatenate([PROMPT, tokens]).astype(np.int32) for tokens in samples]
        for request in range(first, self.next):
            self.cache.start_request(request, PROMPT)
        extending = drafting = drafted = 0.0
        for step in range(1, steps + 1):
            new = [s[(step - 1) * ACCEPTED : step * ACCEPTED].tolist() for s in samples]
            stop = len(PROMPT) + step * ACCEPTED
            patterns = [tokens[max(0, stop - self.depth) : stop] for tokens in whole]
            start = time.process_time()
            for request, tokens in enumerate(new, first):
                self.cache.add_active_response(request, tokens)
            middle = time.process_time()
            drafts = [
                self.cache.speculate(request, pattern, max_spec_tokens=BUDGET)
                for request, pattern in enumerate(patterns, first)
            ]
            end = time.process_time()
            extending += middle - start
            drafting += end - middle
            drafted += sum(len(draft.token_ids) for draft in drafts)
        for request in range(first, self.next):
            self.cache.stop_request(request)
        return step_numbers(extending, drafting, drafted, steps * len(samples))


def arctic() -> tuple[Callable[..., Any], str] | None:
    """ArcticInference's cache class and its version; None if it is not installed."""
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except ImportError:
        return None
    return SuffixDecodingCache, metadata.version("arctic-inference")
