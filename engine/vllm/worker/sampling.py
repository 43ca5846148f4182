"""Draws tokens inside vLLM's model runner, the same ones with drafts and without.

A draw depends on the distribution, the request's seed, the policy version and the position only
(`engine.sampling.drawing`), not on batch, row, preemption or drafts. At each drafted position a
token is drawn as without drafts, and the draft is accepted as far as it equals the draws
(`asyncrl.rollout.acceptance.accept_chain`, exact for any draft).

`CoreSampler` replaces `GPUModelRunner._sample` (vLLM 0.32.0), which gets one row of logits per
request, and one more per draft token when the step has drafts. `CoreScorer` scores given tokens and
verifies kept ones as tokens are sampled: it replaces `GPUModelRunner._get_prompt_logprobs_dict`,
which computes without temperature and truncation. The result replaces vLLM's table: a row for each
reported token, with the columns of `asyncrl.engine.remote.extras.ScoreColumns`. Imports no vLLM.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.remote.worker.entries import Batch, Entry
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.remote.worker.scoring import Scorer
from asyncrl.engine.sampling.drawing import UNREPORTED_K, Streams
from asyncrl.engine.sampling.logits import LogitDraws, draw_from_logits
from asyncrl.engine.vllm.remote import from_extra_args
from asyncrl.rollout.acceptance import accept_chain
from asyncrl.rollout.trajectory import FloatArray, IntArray


class RunnerBatch(Batch):
    """Follows the batch of vLLM's `GPUModelRunner`; draws have lists of `listed` ids."""

    def __init__(self, runner: Any, listed: int = UNREPORTED_K) -> None:
        super().__init__(listed)
        self.runner = runner

    def refresh(self) -> None:
        """Follow the runner's rows."""
        self.follow(self.runner.input_batch.req_ids, self.runner.requests)

    def read(self, request_id: str) -> Entry:
        """Read an entry from the runner's state of a request."""
        return entry_of(self.runner.requests[request_id])

    def lengths(self) -> NDArray[np.int64]:
        """Return `[B]` tokens of each row, without drafts."""
        return np.array(self.runner.input_batch.num_tokens_no_spec[: len(self.ids)], np.int64)


def entry_of(request: Any) -> Entry:
    """Read an entry from the runner's state of a request, or raise KeyError."""
    params = request.sampling_params
    return Entry.of(
        from_extra_args(params.extra_args),
        np.array(request.prompt_token_ids, np.int32),
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        stop_tokens=tuple(params.stop_token_ids or ()),
    )


_NO_TOKEN = -1


class CoreSampler:
    """Draws for a model runner, in place of `runner._sample`, in rank 0, within `max_bytes`."""

    def __init__(self, runner: Any, batch: RunnerBatch, ranks: Ranks, max_bytes: int) -> None:
        self._runner = runner
        self._batch = batch
        self._ranks = ranks
        self._max_bytes = max_bytes
        self.fed: NDArray[np.int64] | None = None
        """`[B]` draft tokens that each row had in the last step; None: no row had any."""
        self._table: Any = None
        self._result: Any = None

    def install(self) -> None:
        """Replace the method on this runner."""
        from asyncrl.engine.vllm.worker.api import LogprobsTensors, SamplerOutput

        self._table, self._result = LogprobsTensors, SamplerOutput
        self._runner._sample = self.__call__  # noqa: SLF001

    def __call__(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        """Return vLLM's `SamplerOutput` for the step's logits."""
        drafted = spec_decode_metadata is not None and spec_decode_metadata.max_spec_len
        if not self._ranks.leads:
            width = 1 + (spec_decode_metadata.max_spec_len if drafted else 0)
            return self._follow(self._runner.input_batch.num_reqs, width, logits.device)
        self._batch.refresh()
        if not drafted:
            self.fed = None
            return self._plain(logits)
        self.fed = np.array(spec_decode_metadata.num_draft_tokens, np.int64)
        return self._drafted(logits, spec_decode_metadata, self.fed)

    def _follow(self, rows: int, width: int, device: torch.device) -> Any:
        """Receive what rank 0 has drawn, without a table."""
        tokens = torch.empty((rows, width), dtype=torch.int32, device=device)
        shared = self._ranks.share_tokens(tokens)
        return self._result(sampled_token_ids=shared, logprobs_tensors=None)

    def _plain(self, logits: torch.Tensor) -> Any:
        batch = self._batch
        streams = Streams(batch.seed, batch.lengths() - batch.start, batch.noise_seed)
        drawn = draw_from_logits(
            logits, batch.sampling, batch.listed, streams, max_bytes=self._max_bytes
        )
        return self._output(drawn.ids[:, :1], drawn, batch.ticket)

    def _drafted(self, logits: torch.Tensor, metadata: Any, fed: NDArray[np.int64]) -> Any:
        batch, device = self._batch, logits.device
        counts = fed + 1
        starts = np.cumsum(counts) - counts
        row = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(row)) - starts[row]
        position = (batch.lengths() - batch.start)[row] + place
        width = int(metadata.max_spec_len) + 1
        place_of = row * width + place
        # vLLM picks from a table with every place of every row.
        drawn = draw_from_logits(
            logits,
            batch.sampling.at(row),
            batch.listed,
            Streams(batch.seed[row], position, batch.noise_seed[row]),
            max_bytes=self._max_bytes,
            places=place_of,
            table_rows=len(counts) * width,
        )
        samples = drawn.ids[:, 0].view(-1, width)
        drafted = torch.from_numpy(place_of[place < fed[row]]).to(device)
        drafts = torch.full((samples.numel(),), _NO_TOKEN, dtype=torch.int32, device=device)
        drafts[drafted] = metadata.draft_token_ids.to(torch.int32)
        kept = accept_chain(
            samples, drafts.view(-1, width)[:, :-1], torch.from_numpy(fed).to(device)
        )
        outside = torch.arange(width, device=device) > kept[:, None]
        out = samples.masked_fill(outside, _NO_TOKEN)
        return self._output(out, drawn, np.repeat(batch.ticket, width))

    def _output(self, tokens: torch.Tensor, drawn: LogitDraws, tickets: NDArray[np.int64]) -> Any:
        reported = slice(1 + self._batch.top_k_logprobs)
        # In place of vLLM's ranks. Nothing on the device reads them, and vLLM only brings them to
        # the host (0.32.0, `LogprobsTensors`), so they stay there: a copy would be waited for.
        ranks = torch.from_numpy(tickets)
        tensors = self._table(drawn.ids[:, reported], drawn.logprobs[:, reported], ranks)
        shared = self._ranks.share_tokens(tokens)
        return self._result(sampled_token_ids=shared, logprobs_tensors=tensors)


class CoreScorer:
    """Computes prompt log-probabilities for a model runner from now on, within `max_bytes`."""

    def __init__(self, runner: Any, batch: RunnerBatch, ranks: Ranks, max_bytes: int) -> None:
        self._runner = runner
        self._batch = batch
        self._scorer = Scorer(
            runner.model.compute_logits,
            runner.model_config.get_vocab_size(),
            ranks,
            max_bytes,
            batch.listed,
        )
        runner._get_prompt_logprobs_dict = self.compute  # noqa: SLF001

    @torch.inference_mode()
    def compute(self, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        """Return vLLM's tables of requests whose prompts are complete; empty in other ranks."""
        pending: dict[str, int] = self._runner.num_prompt_logprobs
        self._scorer.forget(pending)
        if not pending:
            return {}
        rows = [
            self._row(name, k, scheduled[name])
            for name, k in pending.items()
            if name in scheduled  # not preempted in the middle of its prompt
        ]
        tables = self._scorer.score(hidden_states, rows, self._batch.policy_version)
        for name, *_ in rows:
            if name not in self._scorer.requests:
                del pending[name]
        return {name: _as_vllm(*table) for name, table in tables.items()}

    def _row(self, name: str, k: int, count: int) -> tuple[str, Entry, int, int, int, int]:
        runner = self._runner
        begin = int(runner.requests[name].num_computed_tokens)
        offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
        return name, self._batch.entry(name), k, begin, count, offset


def _as_vllm(ids: IntArray, values: FloatArray) -> Any:
    from asyncrl.engine.vllm.worker.api import LogprobsTensors

    ranks = torch.zeros(len(ids), dtype=torch.int32)
    return LogprobsTensors(torch.from_numpy(ids), torch.from_numpy(values), ranks)
