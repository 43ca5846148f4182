"""Which tokens a decode step of vLLM added to which request, and what to draft for each.

vLLM shows its batch as rows that move; a request is known here by its id, and the tokens already
told to the cache are counted, so a step costs only its new tokens. Nothing here imports vLLM.

A request's row in the cache opens when its first token appears and closes when vLLM has forgotten
the request. A wrong draft costs time, never exactness.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cache.trajectory import IntArray
from engine.budget import draft_budgets

SECTION = "asyncrl"
"""Key of our part in vLLM's `additional_config` and in a request's `extra_args`."""


def request_extra(cache_key: str, old: IntArray) -> dict[str, Any]:
    """What a request carries in `SamplingParams.extra_args` so that it is drafted for."""
    return {SECTION: {"cache_key": cache_key, "old": old.tolist()}}


class Drafts(Protocol):
    """What the cache proposes, ragged: row i has `tokens[offsets[i]:offsets[i + 1]]`."""

    @property
    def tokens(self) -> IntArray:
        """`[offsets[-1]]`"""

    @property
    def offsets(self) -> IntArray:
        """`[n + 1]`"""


class DraftSource(Protocol):
    """The part of `cache.tree.RolloutCache` that is used."""

    def open(self, key: str, context: IntArray) -> int:
        """Begin a response to `context`; gives its row."""

    def close(self, row: int) -> None:
        """End a response."""

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        """Append each row's new tokens."""

    def draft(self, rows: IntArray, budgets: IntArray) -> Drafts:
        """Propose up to `budgets[i]` tokens for each row."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a request says about drafting; travels beside its sampling parameters."""

    cache_key: str
    """Its tree."""
    limit: int
    """Most tokens in all, the prompt included."""
    stop_tokens: frozenset[int]
    """Nothing after one of these belongs to the response."""
    old: IntArray
    """`[D]` an old continuation, drafted from while the response follows it."""


@dataclass(frozen=True, slots=True)
class RowView:
    """One request of the step just taken."""

    request_id: str
    prompt_length: int
    """Tokens that vLLM was given: the prompt and what a response resumes from."""
    tokens: IntArray
    """`[T]` all its tokens now."""
    drafting: Drafting


@dataclass(slots=True)
class _Request:
    handle: int
    prompt_length: int
    known: int
    """Tokens already told to the cache."""
    drafting: Drafting
    follows_old: bool
    over: bool = False
    """A stop token or the limit was met: vLLM is about to end it."""


class RowBook:
    """The open requests of an engine and their rows in the cache."""

    def __init__(self, source: DraftSource, *, max_step_tokens: int, max_draft_tokens: int) -> None:
        self._source = source
        self._max_step_tokens = max_step_tokens
        self._max_draft_tokens = max_draft_tokens
        self._open: dict[str, _Request] = {}

    def __len__(self) -> int:
        return len(self._open)

    def step(self, views: Sequence[RowView], *, other_rows: int) -> list[list[int]]:
        """Tell the cache what each row has written, then draft.

        Args:
            views: the rows that draft; each has at least one token after its prompt.
            other_rows: rows of the same step that do not draft; they take part of the budget.

        Returns:
            For each view its draft, possibly empty.
        """
        requests = [self._request(view) for view in views]
        self._extend(views, requests)
        lasting = [i for i, request in enumerate(requests) if not request.over]
        left = [requests[i].drafting.limit - len(views[i].tokens) for i in lasting]
        budgets = draft_budgets(
            np.array(left, np.int32),
            max_step_tokens=max(self._max_step_tokens - other_rows, 0),
            max_draft_tokens=self._max_draft_tokens,
        )
        drafts: list[list[int]] = [[] for _ in views]
        ask: list[int] = []
        asked: list[int] = []
        for i, budget in zip(lasting, budgets.tolist(), strict=True):
            if budget <= 0:
                continue
            old = self._from_old(requests[i], views[i], budget)
            if old:
                drafts[i] = old
            else:
                ask.append(i)
                asked.append(budget)
        if ask:
            rows = np.array([requests[i].handle for i in ask], np.int32)
            found = self._source.draft(rows, np.array(asked, np.int32))
            tokens, offsets = found.tokens.tolist(), found.offsets.tolist()
            for at, i in enumerate(ask):
                drafts[i] = tokens[offsets[at] : offsets[at + 1]]
        return drafts

    def forget(self, alive: Container[str]) -> None:
        """Close the rows of requests that are not `alive` any more."""
        for request_id in [r for r in self._open if r not in alive]:
            self._source.close(self._open.pop(request_id).handle)

    def _request(self, view: RowView) -> _Request:
        request = self._open.get(view.request_id)
        if request is None:
            drafting = view.drafting
            context = np.array(view.tokens[: view.prompt_length], np.int32)
            request = _Request(
                handle=self._source.open(drafting.cache_key, context),
                prompt_length=view.prompt_length,
                known=view.prompt_length,
                drafting=drafting,
                follows_old=len(drafting.old) > 0,
            )
            self._open[view.request_id] = request
        return request

    def _extend(self, views: Sequence[RowView], requests: Sequence[_Request]) -> None:
        parts: list[IntArray] = []
        rows: list[int] = []
        for view, request in zip(views, requests, strict=True):
            if request.over or request.known >= len(view.tokens):
                continue
            new = self._new_tokens(view, request)
            if request.follows_old:
                self._follow(request, new)
            request.known += len(new)
            rows.append(request.handle)
            parts.append(new)
        if rows:
            offsets = np.zeros(len(rows) + 1, np.int32)
            np.cumsum([len(part) for part in parts], out=offsets[1:])
            tokens = np.concatenate(parts).astype(np.int32)
            self._source.extend(np.array(rows, np.int32), tokens, offsets)

    def _new_tokens(self, view: RowView, request: _Request) -> IntArray:
        """The unseen tokens, cut after a stop token and at the limit, as vLLM will cut them."""
        drafting = request.drafting
        new = view.tokens[request.known : drafting.limit]
        if drafting.stop_tokens:
            for at, token in enumerate(new.tolist()):
                if token in drafting.stop_tokens:
                    request.over = True
                    return new[: at + 1]
        if len(view.tokens) >= drafting.limit:
            request.over = True
        return new

    def _follow(self, request: _Request, new: IntArray) -> None:
        at = request.known - request.prompt_length
        expected = request.drafting.old[at : at + len(new)]
        request.follows_old = bool(np.array_equal(expected, new))

    def _from_old(self, request: _Request, view: RowView, budget: int) -> list[int]:
        if not request.follows_old:
            return []
        at = len(view.tokens) - request.prompt_length
        rest: list[int] = request.drafting.old[at : at + budget].tolist()
        return rest
