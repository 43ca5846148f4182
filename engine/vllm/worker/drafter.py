"""The adapter to vLLM's `custom_class` drafting hook, experimental upstream (0.32.0).

vLLM calls `make_drafter` in each rank of its model, and `propose` after each step. The hook passes
no request ids, so the worker extension hands over the model runner once (`attach`), whose batch
names the rows. `worker.drafting` decides what to draft, `asyncrl.engine.drafting.planner` how much.
`prepare_plainly` makes a step without drafts as cheap as one without speculation.
"""

import time
from collections.abc import Container
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import from_json, open_at, save_at
from asyncrl.engine.remote.worker.drafting import NO_SLOT, RowBook, StepTimer, planner_of, warm_up
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.vllm.remote import CoreSettings
from asyncrl.engine.vllm.worker.sampling import CoreSampler, RunnerBatch
from asyncrl.rollout.trajectory import IntArray


def prepare_plainly(runner: Any) -> None:
    """Hide speculation from `runner._prepare_inputs` in steps that have no drafts."""
    if runner.model_config.is_hybrid:
        return  # recurrent layers need the speculative path for rows without drafts as well
    prepare = runner._prepare_inputs  # noqa: SLF001

    def prepare_inputs(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.scheduled_spec_decode_tokens:
            return prepare(scheduler_output, *args, **kwargs)
        config, runner.speculative_config = runner.speculative_config, None
        try:
            return prepare(scheduler_output, *args, **kwargs)
        finally:
            runner.speculative_config = config

    runner._prepare_inputs = prepare_inputs  # noqa: SLF001


class FollowingDrafter:
    """The drafter of ranks other than 0: rank 0's drafts come with the scheduler's output."""

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: there is no model."""

    def propose(self, sampled_token_ids: list[list[int]], *_args: Any, **_kwargs: Any) -> Any:
        """Return no drafts; vLLM asks rank 0 only."""
        return [[] for _ in sampled_token_ids]


class CacheDrafter:
    """Drafts from the cache of this engine's earlier rollouts."""

    def __init__(self, vllm_config: Any) -> None:
        settings = CoreSettings.from_config(vllm_config.additional_config).drafter
        assert settings is not None  # noqa: S101 - vLLM makes a drafter only if it is set
        config = CacheConfig.model_validate(settings.cache)
        self.planner = planner_of(
            settings, config.draft_tokens, vllm_config.model_config.get_vocab_size()
        )
        self._place = from_json(settings.place)
        self._cache = open_at(config, self._place)
        self._book = RowBook(self._cache, self.planner)
        self._runner: Any = None
        self._batch: RunnerBatch | None = None
        self._sampler: CoreSampler | None = None
        self._changes = -1
        self._slots: NDArray[np.int64] = np.empty(0, np.int64)
        self._empty: list[list[int]] = []
        self._proposed: dict[str, list[int]] = {}
        self.timer = StepTimer(self.planner, guess_breaks=True)  # vLLM does not signal a pause

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """Warm up the cache's compiled code; there is no model to load."""
        warm_up()

    def advance(self, policy_version: int) -> None:
        """Label later tokens with this policy version."""
        if self._batch is not None:
            self._record(self._batch, set(self._batch.ids))
        self._cache.advance(policy_version)

    def save(self) -> int:
        """Write the cache's snapshot, if it has a path for one; return its bytes."""
        return save_at(self._cache, self._place)

    def attach(self, runner: Any, batch: RunnerBatch, sampler: CoreSampler) -> None:
        """Hook into the model runner, whose batch maps requests to rows."""
        self._runner, self._batch, self._sampler = runner, batch, sampler
        execute, take = runner.execute_model, runner.take_draft_token_ids

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.begin(scheduler_output, time.perf_counter())
            return execute(scheduler_output, *args, **kwargs)

        def take_draft_token_ids() -> Any:
            drafts = take() if self._proposed else None
            if drafts is not None:
                # The scheduler loops over all named rows, most of which have no draft.
                drafts.req_ids = list(self._proposed)
                drafts.draft_token_ids = list(self._proposed.values())
            return drafts

        runner.execute_model = execute_model
        runner.take_draft_token_ids = take_draft_token_ids

    def begin(self, scheduler_output: Any, now: float) -> None:
        """Note the start of a step, and report the time of the previous one to the planner."""
        self.timer.begin(now)
        if self._batch is not None and scheduler_output.finished_req_ids:
            # Their rows of vLLM's table are about to be used again.
            self._record(self._batch, scheduler_output.finished_req_ids)
        fed: dict[str, int] = scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        running = scheduler_output.scheduled_cached_reqs.req_ids
        drafted = sum(map(len, drafts.values())) if drafts else 0
        tokens: int = scheduler_output.total_num_scheduled_tokens
        decoding = len(running)
        if tokens > len(fed) + drafted:  # some rows take in more than a token and its drafts
            decoding = sum(fed[name] == 1 + len(drafts.get(name, ())) for name in running)
        if not self._runner.num_prompt_logprobs:
            self.timer.note(now, tokens=tokens, rows=decoding, drafted=drafted)
        if not tokens and self._batch is not None:
            self._follow(self._batch)  # nothing is running: close the rows of ended requests

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.integer[Any]],
        token_ids_cpu: IntArray,
        slot_mappings: Any = None,  # noqa: ARG002
    ) -> list[list[int]]:
        """Draft for the next step; return `[B]` drafts, of any lengths.

        Each row just got `sampled_token_ids` (none for an unfinished prompt). `token_ids_cpu` is
        `[>= B, max_model_len]`, with `num_tokens_no_spec` `[>= B]` tokens of each row.
        `slot_mappings` is unused.
        """
        rows, self._proposed = len(sampled_token_ids), {}
        drafts = self._no_drafts(rows)
        batch, sampler = self._batch, self._sampler
        if batch is None or sampler is None:
            return drafts
        self._follow(batch)
        if sampler.fed is not None or not self.planner.declines(rows):
            got = np.fromiter(map(len, sampled_token_ids), np.int64, rows)
            if sampler.fed is not None:
                self._book.judge(self._slots, sampler.fed, got - 1)
            chosen = self._choose(got, batch.lengths(), token_ids_cpu)
            if chosen:
                drafts = list(drafts)
                for row, draft in chosen.items():
                    drafts[row] = self._proposed[batch.ids[row]] = draft
        if self.timer.noted:
            self.timer.drawn(int(np.add.reduce(num_tokens_no_spec[:rows])))
        return drafts

    def _no_drafts(self, rows: int) -> list[list[int]]:
        """Return `[B]` empty drafts. Neither vLLM nor we change them, so they are made once."""
        if len(self._empty) != rows:
            self._empty = [[] for _ in range(rows)]
        return self._empty

    def _choose(
        self, got: NDArray[np.int64], lengths: NDArray[np.int64], table: IntArray
    ) -> dict[int, list[int]]:
        """Return drafts by row of the batch; rows without one are missing."""
        if not ((self._slots != NO_SLOT) & (got > 0)).any():
            return {}
        decode = np.flatnonzero(got)
        chosen = self._book.draft(
            self._slots[decode],
            decode,
            lengths[decode],
            table,
            other_tokens=self._other_tokens(got),
        )
        return {int(decode[at]): draft for at, draft in chosen.items()}

    def _follow(self, batch: RunnerBatch) -> None:
        batch.refresh()
        if batch.changes != self._changes:
            self._changes = batch.changes
            self._book.forget(batch.runner.requests)
            self._slots = self._book.slots(batch.ids, batch.entry)

    def _record(self, batch: RunnerBatch, names: Container[str]) -> None:
        """Add to the cache what those of these requests that have rows have generated."""
        self._follow(batch)
        rows = np.array([row for row, name in enumerate(batch.ids) if name in names], np.int64)
        if len(rows):
            table = batch.runner.input_batch.token_ids_cpu
            self._book.record(self._slots[rows], rows, batch.lengths()[rows], table)

    def _other_tokens(self, got: NDArray[np.int64]) -> int:
        """Return the tokens of unfinished prompts that the next step takes in."""
        waiting = np.flatnonzero(got == 0)
        if not len(waiting):
            return 0
        table = self._runner.input_batch
        rest = table.num_prompt_tokens[waiting] - table.num_computed_tokens_cpu[waiting]
        return int(min(rest.sum(), self._runner.scheduler_config.max_num_batched_tokens))


def make_drafter(vllm_config: Any) -> CacheDrafter | FollowingDrafter:
    """Make vLLM's drafter: rank 0 drafts for all."""
    from asyncrl.engine.vllm.worker.api import get_tp_group

    leads = Ranks.of_group(get_tp_group()).leads
    return CacheDrafter(vllm_config) if leads else FollowingDrafter()
