"""DecodeCore: the whole torch engine without asyncio. Requests in, steps, token chunks out.

One step is one forward pass (`step`):

    admit    waiting requests take free slots; siblings of a prompt share its prefill (admission)
    draft    every decoding row gets a token tree, as much as the planner allows (drafting)
    forward  last tokens and trees of decoding rows, and whole contexts of new ones with their kept
             tokens, packed (model)
    draw     a fresh token at every position, from (seed, position in the response) (step_sampling)
    judge    the kept tokens that the current policy accepts, and a draw after them (step_sampling)
    choose   draws that stay in the tree, and the first that leaves it; all other KV is void
    report   first tokens, rows with enough unreported ones, and rows that ended (reports)
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.config import WeightStaging
from asyncrl.engine.drafting.planner import DraftPlanner, Planner
from asyncrl.engine.drafting.trees import TokenTrees
from asyncrl.engine.errors import RequestError, WeightsError
from asyncrl.engine.protocol import GenerateRequest, Score, ScoreRequest, TokenChunk
from asyncrl.engine.requests import Limits, SeedStream
from asyncrl.engine.sampling.drawing import UNREPORTED_K
from asyncrl.engine.sampling.logits import distributions_of
from asyncrl.engine.sampling.truncation import SamplingColumns
from asyncrl.engine.sampling.verification import KeptColumns, ranges_of
from asyncrl.engine.torch.admission import Admission
from asyncrl.engine.torch.drafting import Drafter
from asyncrl.engine.torch.model import SlotModel
from asyncrl.engine.torch.reports import Unreported, choose, moved_places
from asyncrl.engine.torch.rows import Rows, Waiting
from asyncrl.engine.torch.slots import StepInputs
from asyncrl.engine.torch.step_sampling import Draws, draw_step, judge_rows
from asyncrl.engine.weights import MergingBuffer, ModelShapes, NamedTensors, StagedWeights
from asyncrl.rollout.trajectory import FinishReason
from asyncrl.wire.errors import WeightsReadError
from asyncrl.wire.records.step import EngineStats, TokenCounts
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest
from asyncrl.wire.weights.reader import WeightBuffer


def _length(request: ScoreRequest) -> int:
    return len(request.prompt_tokens) + len(request.tokens)


class ModuleWeights:
    """Replaces the parameters of a loaded module in place, and so all views of them.

    `staging` is the location of a staged version, for a module on a GPU.
    """

    def __init__(self, module: torch.nn.Module, staging: WeightStaging = "host") -> None:
        self._module = module
        self._own = dict(module.state_dict(keep_vars=True))
        self._shapes = ModelShapes.of_module(module)
        self._device = next((one.device for one in self._own.values()), torch.device("cpu"))
        self._staging = self._device if staging == "device" else torch.device("cpu")
        self._pins = self._device.type != "cpu" and staging == "host"
        own = {name: tensor.dtype for name, tensor in self._own.items()}
        self._whole = WeightBuffer(
            lambda name, published: own.get(name, published),
            device=self._staging,
            pinned=self._pins,
            engine_device=self._device,
        )
        self._staged = StagedWeights(self._check_tied, MergingBuffer(self._whole, self._base))
        self._fingerprint: Fingerprint | None = None

    def stage(self, manifest: WeightManifest) -> None:
        """Copy a published version into staging memory, as `StagedWeights.stage`."""
        self._staged.clear()
        self._shapes.check(manifest)
        self._staged.stage(manifest)

    def install(self, policy_version: int) -> None:
        """Overwrite the parameters with the staged version, or raise WeightsError."""
        with self._staged.install(policy_version) as tensors, torch.no_grad():
            self._fingerprint = None
            for name, tensor in tensors:
                self._own[name].copy_(tensor, non_blocking=True)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # the staging memory may be overwritten now

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the live parameters, computed once after each installation."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self._module.state_dict(keep_vars=True).items())
        return self._fingerprint

    def _base(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return copies of the module's initial weights, in the memory that stages versions."""
        if self._whole.policy_version is not None:
            raise WeightsReadError(
                "cannot merge an adapter: whole weights have replaced those it was made for"
            )
        found = {name: self._own[name].detach() for name in names}
        copies = {name: one.to(self._staging, copy=True) for name, one in found.items()}
        return {n: one.pin_memory() for n, one in copies.items()} if self._pins else copies

    def _check_tied(self, tensors: NamedTensors) -> None:
        given = dict(tensors)
        for name, first in self._shapes.tied.items():
            both = name in given and first in given
            if both and not torch.equal(given[name], given[first]):
                raise WeightsError(f"{first!r} and {name!r} are one tied weight but differ")


_STEP_TOKENS = 4096
"""Most tokens of a decoding step if the planner decides and their logits fit into memory."""


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Bounds of the core; see `TorchConfig` and `EngineConfig`."""

    max_step_tokens: int | None
    """None: as many as the planner wants, within `_STEP_TOKENS` and `logits_bytes`."""
    max_draft_tokens: int
    max_prefill_tokens: int
    chunk_tokens: int
    top_k: int
    draft_trees: bool = True
    weight_staging: WeightStaging = "host"
    logits_bytes: int = 512 << 20
    """Memory for a step's float32 logits, and as much to process them; one request may exceed
    it."""

    def max_logits_rows(self, vocab_size: int) -> int:
        """Return the most rows of float32 logits of one step."""
        return self.logits_bytes // (4 * vocab_size)

    @property
    def listed(self) -> int:
        """Tokens that a draw lists at each position; a fast number if none is reported."""
        return self.top_k or UNREPORTED_K


class DecodeCore:
    """Continuous batching with exact drafting over a loaded model. Not thread-safe.

    `source` proposes drafts (None: requests' earlier continuations only). `seed` is that of
    `SeedStream`. `planner` decides how much to draft (None: it learns from this core's steps).
    """

    def __init__(
        self,
        model: SlotModel,
        settings: CoreSettings,
        source: RolloutCache | None,
        *,
        seed: int,
        planner: Planner | None = None,
    ) -> None:
        self._model = model
        self._weights = ModuleWeights(model.module, settings.weight_staging)
        self._settings = settings
        cache = model.cache
        affordable = min(_STEP_TOKENS, max(settings.max_logits_rows(model.vocab_size), cache.slots))
        planner = planner or DraftPlanner(
            max_step_tokens=settings.max_step_tokens or affordable,
            max_draft_tokens=settings.max_draft_tokens,
        )
        self._rows = Rows(cache.slots, cache.max_len)
        buffer = settings.chunk_tokens + settings.max_draft_tokens + 1
        self._unreported = Unreported(cache.slots, buffer, settings.listed)
        self._drafter = Drafter(
            self._rows, source, planner, branching=settings.draft_trees, vocab_size=model.vocab_size
        )
        self._seeds = SeedStream(seed)
        self._admission = Admission(self._rows, cache, self._drafter, self._unreported, self._seeds)
        self._limits = Limits(cache.max_len, model.vocab_size, settings.top_k)
        self._waiting = Waiting()
        self._generated = self._drafted = self._accepted = self._steps = 0
        self._busy_seconds = 0.0
        self.policy_version = 0
        self._installations = 0
        """Number of installed weights: a version may come twice, from two trainers."""

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises RequestError if it cannot be served or its id is in use."""
        self._limits.check_generate(request)
        name = request.request_id
        if name in self._waiting or name in self._rows:
            raise RequestError(f"request {name!r}: a request with this id is being served")
        if request.kept is not None and not len(request.kept):
            request = replace(request, kept=None)
        self._waiting.add(request)

    @torch.inference_mode()
    def abort(self, request_id: str) -> None:
        """Forget a request and free its slot; does nothing if it has ended already."""
        if self._waiting.drop(request_id) is None and request_id in self._rows:
            self._admission.release(self._rows.row_of(request_id), self._installations)

    @torch.inference_mode()
    def interrupt(self, request_id: str) -> list[TokenChunk]:
        """End a request and free its slot; return its last chunk, with all that it has drawn."""
        waiting = self._waiting.drop(request_id)
        if waiting is not None:
            return [TokenChunk.empty_abort(waiting, self.policy_version)]
        if request_id not in self._rows:
            return []
        return [self._end(self._rows.row_of(request_id), "abort")]

    def end_session(self, session: str) -> None:
        """Forget the KV parked for another turn of this response."""
        self._admission.parked.drop(session)

    @torch.inference_mode()
    def close(self) -> list[TokenChunk]:
        """Abort everything. Return each request's last chunk."""
        chunks = [self._end(row, "abort") for row in reversed(range(self._rows.n))]
        waiting = self._waiting.drain()
        self.check()
        return chunks + [TokenChunk.empty_abort(one, self.policy_version) for one in waiting]

    @property
    def has_work(self) -> bool:
        """True if a step would do anything."""
        return len(self._waiting) > 0 or self._rows.n > 0

    def flush(self) -> list[TokenChunk]:
        """Report every token that was drawn and not reported yet."""
        rows = np.flatnonzero(self._unreported.count[: self._rows.n]).tolist()
        return self._chunks(rows, [None] * len(rows))

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score given tokens under the current weights. Raises RequestError.

        Contexts go through the model packed, sorted by length. One pass has at most
        `max_prefill_tokens` and `logits_bytes` of float32 logits, and as much to process them; a
        single longer request runs alone. The model's slots are not used.
        """
        for request in requests:
            self._limits.check_score(request)
        scores: dict[int, Score] = {}
        batch: list[int] = []
        tokens = logits = 0
        for i in sorted(range(len(requests)), key=lambda i: _length(requests[i])):
            wanted = 4 * len(requests[i].tokens) * self._model.vocab_size
            full = tokens + _length(requests[i]) > self._settings.max_prefill_tokens
            if batch and (full or logits + wanted > self._settings.logits_bytes):
                scores |= self._score_batch(requests, batch)
                batch, tokens, logits = [], 0, 0
            batch.append(i)
            tokens += _length(requests[i])
            logits += wanted
        if batch:
            scores |= self._score_batch(requests, batch)
        return [scores[i] for i in range(len(requests))]

    def _score_batch(self, requests: Sequence[ScoreRequest], batch: list[int]) -> dict[int, Score]:
        chosen = [requests[i] for i in batch]
        lengths = np.array([_length(r) for r in chosen], np.int32)
        counts = np.array([len(r.tokens) for r in chosen], np.int64)
        # The logits of a token are those of the position before it.
        wanted = ranges_of(np.cumsum(lengths, dtype=np.int64) - counts - 1, counts)
        parts = [part for r in chosen for part in (r.prompt_tokens, r.tokens)]
        packed = np.concatenate(parts).astype(np.int32)
        k = max(1, *(r.sampling.top_k_logprobs for r in chosen))
        sampling = SamplingColumns.of([r.sampling for r in chosen])
        distributions = distributions_of(
            self._model.forward_fresh(packed, lengths, wanted),
            sampling.at(np.repeat(np.arange(len(chosen)), counts)),
            self._settings.listed,
            self._settings.logits_bytes,
        )
        targets = KeptColumns.only_tokens(packed[wanted + 1], 0)
        picked = distributions.read(np.arange(len(wanted)), targets).own
        lists = distributions.top_k(k)
        ids, values = lists.ids.cpu().numpy(), lists.logprobs.cpu().numpy()
        spans = [slice(end - n, end) for end, n in zip(np.cumsum(counts), counts, strict=True)]
        return {
            i: Score(
                request_id=request.request_id,
                logprobs=picked[span].copy(),
                topk_ids=ids[span, : request.sampling.top_k_logprobs].copy(),
                topk_logprobs=values[span, : request.sampling.top_k_logprobs].copy(),
                policy_version=self.policy_version,
            )
            for i, request, span in zip(batch, chosen, spans, strict=True)
        }

    def stage_weights(self, manifest: WeightManifest) -> None:
        """Copy published weights into staging memory, as `StagedWeights.stage`, during steps."""
        self._weights.stage(manifest)

    def install_weights(self, policy_version: int) -> list[TokenChunk]:
        """Replace the weights under the running requests, which keep their KV.

        Returns unreported tokens of the old version. Raises WeightsError if this one is not staged.
        """
        self._weights.install(policy_version)
        chunks = self.flush()
        self.policy_version = policy_version
        self._installations += 1
        self._admission.parked.clear()
        self._rows.advance(policy_version)
        self._drafter.advance(policy_version)
        return chunks

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint the parameters in use; may run during a step, not an installation."""
        return self._weights.fingerprint()

    def stats(self) -> EngineStats:
        """Return counters and gauges."""
        n, cache = self._rows.n, self._model.cache
        return EngineStats(
            tokens=TokenCounts(
                generated=self._generated, drafted=self._drafted, accepted=self._accepted
            ),
            steps=self._steps,
            busy_seconds=self._busy_seconds,
            running=n,
            waiting=len(self._waiting),
            slots=cache.slots,
            kv_used=float(self._rows.total[:n].sum() / (cache.slots * cache.max_len)),
            policy_version=self.policy_version,
        )

    def check(self) -> None:
        """Raise EngineError unless free + held == slots and nothing is counted twice."""
        self._rows.check()
        self._waiting.check()
        self._admission.parked.check()

    @torch.inference_mode()
    def step(self) -> list[TokenChunk]:
        """Run one forward pass: admit, draft, verify, draw. Return the chunks that are due."""
        began = time.perf_counter()
        rows = self._rows
        requests = self._waiting.take(
            rows.slots - rows.n,
            self._settings.max_prefill_tokens,
            self._settings.max_logits_rows(self._model.vocab_size),
            self._admission.parked.known,
        )
        new = self._admission.admit(requests, self._installations)
        if not rows.n:
            self.check()
            return []
        prompts = int(new.lengths.sum())
        trees = self._drafter.draft(new.decoding, prompts)
        context = int((rows.kv_length[: new.decoding] + trees.counts).sum())
        logits = self._model.forward(StepInputs.of(rows, trees, new))
        self._admission.share_prefill(new)
        draws = draw_step(
            rows,
            trees,
            new,
            logits,
            k=self._settings.listed,
            max_bytes=self._settings.logits_bytes,
            policy_version=self.policy_version,
        )
        if len(draws.judged):
            judge_rows(rows, draws, self.policy_version)
        chunks = self._generate(trees, draws)
        seconds = time.perf_counter() - began
        fed = int(trees.counts.sum()) + prompts
        observe = self._drafter.planner.observe
        observe(tokens=fed, rows=new.decoding, context=context, seconds=seconds)
        self._steps += 1
        self._busy_seconds += seconds
        return chunks

    def _generate(self, trees: TokenTrees, draws: Draws) -> list[TokenChunk]:
        """Append to each row what it generates, keep only its KV in place, and report."""
        rows, decoding = self._rows, trees.rows
        walks = None
        if len(trees.tokens):
            walks = self._drafter.judge(trees, draws.tokens[: len(trees.tokens) + decoding])
        paths = choose(rows, draws, walks)
        if trees.forked:
            moved, source, target = moved_places(draws, paths, decoding)
            first = rows.kv_length[moved]
            self._model.cache.move(moved, first + source, first + target)
        going, gone = self._unreported.record(draws, paths, rows, self._settings.chunk_tokens)
        self._drafter.record(draws, paths)
        judged = draws.judged
        given = np.minimum(draws.accepted[judged], paths.kept[judged])
        self._generated += len(paths.chosen) - int(given.sum())
        self._drafted += len(trees.tokens)
        if walks is not None:
            self._accepted += int(np.minimum(walks.accepted, paths.kept[:decoding]).sum())
        reasons: list[FinishReason | None] = [None] * len(going)
        reasons += ["stop" if paths.stopped[row] else "length" for row in gone]
        chunks = self._chunks(going + gone, reasons)
        # From the last row down: the row that moves into a freed place is then never an ended one.
        for row in gone:
            self._admission.release(row, self._installations)
        return chunks

    def _end(self, row: int, reason: FinishReason) -> TokenChunk:
        [chunk] = self._chunks([row], [reason])
        self._admission.release(row, self._installations)
        return chunk

    def _chunks(self, rows: list[int], reasons: Sequence[FinishReason | None]) -> list[TokenChunk]:
        requests = [self._rows.requests[row] for row in rows]
        return self._unreported.chunks(rows, requests, self.policy_version, reasons)
