"""The adapter to vLLM's `custom_class` drafting hook, experimental upstream (0.32.0).

vLLM builds `CacheDrafter` in the process of its engine core and calls `propose` after each step.
The hook passes no request ids, so the worker extension hands over the model runner once
(`attach`), whose batch names the rows. All knowledge of vLLM's insides that drafting needs is in
this file; what to draft is decided in `engine.vllm.rows`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.config import CacheConfig
from cache.trajectory import IntArray
from cache.tree import RolloutCache
from engine.vllm.rows import SECTION, Drafting, RowBook, RowView

CLASS_PATH = f"{__name__}.CacheDrafter"
"""What `speculative_config["model"]` names."""


class CacheDrafter:
    """Drafts from the cache of rollouts that this engine has written."""

    def __init__(self, vllm_config: Any) -> None:
        settings = vllm_config.additional_config[SECTION]
        config = CacheConfig.model_validate(settings["cache"])
        self._book = RowBook(
            RolloutCache(config),
            max_step_tokens=settings["max_step_tokens"],
            max_draft_tokens=config.max_draft_tokens,
        )
        self._runner: Any = None
        self._drafting: dict[str, Drafting | None] = {}

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """There is no model to load; compiled code is warmed up instead."""
        cache = RolloutCache(CacheConfig(max_bytes=1 << 20))
        context = np.arange(8, dtype=np.int32)
        cache.insert("warm-up", context, context)
        row = cache.open("warm-up", context)
        cache.draft(np.array([row], np.int32), np.array([2], np.int32))
        cache.close(row)

    def attach(self, runner: Any) -> None:
        """Take the model runner, whose batch says which request is in which row."""
        self._runner = runner

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.integer[Any]],
        token_ids_cpu: IntArray,
        slot_mappings: Any = None,  # noqa: ARG002  (vLLM passes it by this name)
    ) -> list[list[int]]:
        """Drafts for the next step.

        Args:
            sampled_token_ids: tokens that each row just got; none for a prompt not yet all in.
            num_tokens_no_spec: `[>= B]` tokens of each row, drafts not counted.
            token_ids_cpu: `[>= B, max_model_len]` tokens of each row.
            slot_mappings: unused.

        Returns:
            `[B]` drafts, of any lengths.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._runner is None:
            return drafts
        self._forget()
        batch = self._runner.input_batch
        at: list[int] = []
        views: list[RowView] = []
        for i, sampled in enumerate(sampled_token_ids):
            request_id = batch.req_ids[i]
            drafting = self._drafting_of(request_id)
            if drafting is None or not sampled:
                continue
            at.append(i)
            views.append(
                RowView(
                    request_id,
                    int(batch.num_prompt_tokens[i]),
                    token_ids_cpu[i, : num_tokens_no_spec[i]],
                    drafting,
                )
            )
        if views:
            other_rows = len(drafts) - len(views)
            for i, draft in zip(at, self._book.step(views, other_rows=other_rows), strict=True):
                drafts[i] = draft
        return drafts

    def _forget(self) -> None:
        alive = self._runner.requests
        if any(request_id not in alive for request_id in self._drafting):
            self._drafting = {r: d for r, d in self._drafting.items() if r in alive}
            self._book.forget(alive)

    def _drafting_of(self, request_id: str) -> Drafting | None:
        if request_id not in self._drafting:
            self._drafting[request_id] = _read(self._runner.requests[request_id])
        return self._drafting[request_id]


def _read(request: Any) -> Drafting | None:
    """A request's drafting part; None when it asks for no drafts (or is a scoring request)."""
    params = request.sampling_params
    section = (params.extra_args or {}).get(SECTION) if params is not None else None
    if not section:
        return None
    return Drafting(
        cache_key=section["cache_key"],
        limit=len(request.prompt_token_ids) + params.max_tokens,
        stop_tokens=frozenset(params.stop_token_ids or ()),
        old=np.array(section["old"], np.int32),
    )
