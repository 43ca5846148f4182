"""Runs inside vLLM's engine-core process on our behalf, called by `collective_rpc`.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`).

Scores given tokens and verifies kept ones inside vLLM's model runner, as tokens are sampled.

vLLM computes `prompt_logprobs` one request after the other, for all of a prompt, from raw logits:
it leaves out temperature and truncation (`GPUModelRunner._get_prompt_logprobs_dict`, 0.32.0).
`CoreScorer` replaces that method. `asyncrl.engine.remote.worker.scoring` does the work.

The result replaces vLLM's table: a row for each token that is reported, with the columns of
`asyncrl.engine.remote.extras.ScoreColumns`.

Where vLLM's layers hold the weights that a fingerprint is taken of.

On a CPU vLLM multiplies by packed copies, whose numbers only a product with unit vectors shows. The
packed copy of a head that is tied to the embedding can be left behind, so its product is looked at
too. The experts of a mixture are compared where vLLM's kernel takes them as they are loaded.

New weights in vLLM's process: how vLLM loads them (`asyncrl.engine.remote.worker.staging`).
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import torch

from asyncrl.engine.errors import WeightsError
from asyncrl.engine.remote.worker.held_weights import HeldWeights
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.remote.worker.scored import ScoredPart, ScoredRequest
from asyncrl.engine.remote.worker.scoring import Scorer
from asyncrl.engine.remote.worker.shadow_model import Twin, like
from asyncrl.engine.remote.worker.shards import Shape, Shard, probes_within
from asyncrl.engine.remote.worker.staging import WorkerWeights
from asyncrl.engine.sampling.drawing import UNREPORTED_K
from asyncrl.engine.sampling.logits import warm_up as warm_up_drawing
from asyncrl.engine.vllm.remote import VllmWorker
from asyncrl.engine.vllm.worker.adapter import AdapterWeights, ServedAdapter
from asyncrl.engine.vllm.worker.api import get_tp_group
from asyncrl.engine.vllm.worker.drafter import CacheDrafter, prepare_plainly
from asyncrl.engine.vllm.worker.sampling import CoreSampler, RunnerBatch
from asyncrl.rollout.acceptance import warm_up_verification
from asyncrl.rollout.trajectory import FloatArray, IntArray
from asyncrl.wire.weights.fingerprint import MatrixSums, TensorSums, name_of, probe_columns, sums_of
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest


class VllmLoader:
    """Loads with vLLM's `reload_weights`; satisfies `asyncrl.engine.remote.worker.staging.Loader`.

    Args:
        worker: vLLM's.
    """

    name = "vLLM"

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.device: torch.device = worker.device
        self.dtype: torch.dtype = worker.model_config.dtype

    @property
    def model(self) -> torch.nn.Module:
        """That decodes."""
        model: torch.nn.Module = self._worker.model_runner.get_model()
        return model

    @property
    def model_path(self) -> str:
        """As `Loader`."""
        return str(self._worker.model_config.model)

    def load(self, model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors, named as in the HF state dict, into the model or its twin, in place."""
        load(self._worker, model, tensors)

    def adopt(self, twin: Twin) -> None:
        """Give vLLM what it has noted of the model's modules at their first loading."""
        from asyncrl.engine.vllm.worker.api import (
            LAYERWISE_INFO,
            LayerReloadingInfo,
            get_layerwise_info,
        )

        on_device = any(one.device.type != "cpu" for one in twin.model.parameters())
        for module, other in twin.pairs:
            info = get_layerwise_info(module)
            LAYERWISE_INFO[other] = LayerReloadingInfo(
                restore_metadata=tuple(
                    {name: like(one, _no_numbers(one), module, other) for name, one in kind.items()}
                    for kind in info.restore_metadata
                ),
                restore_device=info.restore_device if on_device else torch.device("cpu"),
            )

    def forget(self, twin: Twin) -> None:
        """Take a twin out of vLLM's notes, which would keep its memory."""
        from asyncrl.engine.vllm.worker.api import LAYERWISE_INFO

        for _, other in twin.pairs:
            LAYERWISE_INFO.pop(other, None)

    def check_unchanged(self, names: Collection[str]) -> None:
        """Do nothing: vLLM raises for tensors that it does not know."""

    def installed(self, policy_version: int) -> None:  # noqa: ARG002
        """Drop what vLLM derived from the old weights."""
        runner = self._worker.model_runner
        runner.reset_lora_state()
        runner.reset_encoder_cache()
        runner.reset_mm_cache()


def load(worker: Any, model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Have vLLM load a checkpoint's tensors into a model, or its twin, in place."""
    from asyncrl.engine.vllm.worker.api import inplace, set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        inplace.reload_weights(worker.vllm_config, model, iter(tensors), None, True)
    _repack_tied(model)


def _no_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )


def check_reloadable(model: torch.nn.Module) -> None:
    """Raise WeightsError if vLLM cannot load new weights into this model.

    On a CPU it packs the experts of a mixture after the first loading only (0.32.0). New ones are
    copied unpacked in the place of the packed ones, and the model then computes something else.
    """
    for name, layer in model.named_modules():
        backend = getattr(getattr(layer, "quant_method", None), "unquantized_backend", None)
        if getattr(backend, "name", "") == "CPU":
            raise WeightsError(
                f"vLLM cannot load new weights into the experts {name!r} on a CPU: it packs them "
                "once. Use engine.kind: torch for mixture-of-experts models, or a GPU"
            )


def _repack_tied(model: torch.nn.Module) -> None:
    """Repack output layers that share the embedding's weight.

    On a CPU vLLM multiplies by a packed copy and packs again only those layers whose own weights
    are loaded. A tied weight comes once, under the embedding's name, so the output layer would keep
    its old copy (0.32.0). On a GPU there is no packed copy, and this does nothing.
    """
    from asyncrl.engine.vllm.worker.api import ParallelLMHead, UnquantizedEmbeddingMethod

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            method = layer.quant_method
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(layer)


_EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""Names of the experts' tensors in the HF state dict, `[E, 2I, H]` and `[E, H, I]`, and in vLLM."""
_INNER = ".base_layer"
_AS_LOADED = ("TRITON", "BATCHED_TRITON")
"""vLLM's kernels for experts that take them in the layout in which they are loaded."""


class VllmHeldWeights(HeldWeights):
    """Finds the tensors of an HF state dict in a loaded vLLM model.

    Args:
        model: vLLM's.
        shapes: of the HF state dict, tied names included.
        ranks: that the model is split among; all of them must take the fingerprint.
        adapter: that is kept apart from the model; None: there is none.
    """

    def __init__(
        self,
        model: Any,
        shapes: Mapping[str, Shape],
        ranks: Ranks | None = None,
        adapter: ServedAdapter | None = None,
    ) -> None:
        self._adapter = adapter
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        super().__init__(
            model,
            shapes,
            ranks,
            packed=getattr(model, "packed_modules_mapping", None) or {},
            # Renames only: how parts are stacked is in `packed_modules_mapping`.
            renamed=None if mapper is None else mapper.get_rename_mapper().map_name,
        )

    def modules(self) -> dict[str, Any]:
        """All modules by path; where vLLM has put one for adapters around another, the inner."""
        found = super().modules()
        inner = {path: one for path, one in found.items() if path.endswith(_INNER)}
        return found | {path.removesuffix(_INNER): one for path, one in inner.items()}

    def further(self) -> list[tuple[str, TensorSums]]:
        """Those of A and B of an adapter that is kept apart."""
        if self._adapter is None:
            return []
        return [(name, sums_of(one)) for name, one in self._adapter.held()]

    def tensor_of(self, module: Any, leaf: str) -> Any:
        """The tensor of a module that a checkpoint calls `leaf`."""
        return _experts(module, leaf) if leaf in _EXPERTS else super().tensor_of(module, leaf)

    def sums_by_product(
        self, module: Any, name: str, shard: Shard, shape: Shape
    ) -> TensorSums | None:
        """The sums of a packed weight; None if the module has none."""
        is_packed = name.rpartition(".")[2] == "weight" and hasattr(module, "cpu_linear")
        if not is_packed or _looks_up(module, name):
            return None
        return _sums_by_product(module, shard, shape)


def _experts(runner: Any, leaf: str) -> torch.Tensor | None:
    """All experts' weights of one kind; None if vLLM keeps them in another layout."""
    routed = getattr(runner, "routed_experts", None)
    backend = getattr(getattr(routed, "quant_method", None), "unquantized_backend", None)
    if getattr(backend, "name", "") not in _AS_LOADED:
        return None
    return getattr(routed, _EXPERTS[leaf], None)


def _looks_up(module: Any, name: str) -> bool:
    """Whether this name of a tensor is that of an embedding, which is not multiplied by."""
    from asyncrl.engine.vllm.worker.api import ParallelLMHead, VocabParallelEmbedding

    embeds = isinstance(module, VocabParallelEmbedding)
    return embeds and not isinstance(module, ParallelLMHead) and "lm_head" not in name


def _sums_by_product(module: Any, shard: Shard, shape: Shape) -> TensorSums:
    """The probe of a packed weight's block: its columns, exactly, by a product."""
    rows, columns = shape
    height, width = shard.shape
    chosen, first = probes_within(columns, shard.column, width)
    dtype = module.weight.dtype
    units = torch.zeros(len(chosen), width, dtype=dtype)
    units[torch.arange(len(chosen)), torch.tensor(chosen, dtype=torch.int64)] = 1
    probe = MatrixSums(rows, len(probe_columns(columns)), units.device)
    if chosen:
        products = module.cpu_linear(units, module.weight, None)  # [P, N]
        probe.add(products[:, shard.first : shard.first + height].t(), shard.row, first)
    return TensorSums(name_of(dtype), None, probe.value * shard.factor)


class CoreScorer:
    """Computes prompt log-probabilities for a model runner.

    Args:
        runner: vLLM's `GPUModelRunner`.
        batch: its requests.
        ranks: of this worker; rank 0 scores, the others take part in the output layer.
        max_bytes: memory that scoring may hold at once (`asyncrl.engine.sampling.logits`).
    """

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
        self._requests: dict[str, ScoredRequest] = {}

    def install(self) -> None:
        """Replace the method on this runner."""
        self._runner._get_prompt_logprobs_dict = self.compute  # noqa: SLF001

    @torch.inference_mode()
    def compute(self, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        """The tables of the requests whose prompts are complete after this step, as vLLM's.

        Empty in ranks other than 0.
        """
        pending: dict[str, int] = self._runner.num_prompt_logprobs
        if not pending:
            self._requests.clear()  # their prompts were aborted
            return {}
        parts: list[ScoredPart] = []
        done: list[str] = []
        for request_id, k in pending.items():
            count = scheduled.get(request_id)
            if count is None:
                continue  # preempted in the middle of its prompt
            part, whole = self._part(request_id, k, count)
            parts.append(part)
            if whole:
                done.append(request_id)
        self._scorer.read(hidden_states, parts)
        for request_id in done:
            del pending[request_id]
        scored = {request_id: self._requests.pop(request_id) for request_id in done}
        tables = self._scorer.tables(scored, self._batch.policy_version)
        self._requests = {name: one for name, one in self._requests.items() if name in pending}
        return {name: _as_vllm(*table) for name, table in tables.items()}

    def _part(self, request_id: str, k: int, count: int) -> tuple[ScoredPart, bool]:
        runner, entry = self._runner, self._batch.entry(request_id)
        begin = int(runner.requests[request_id].num_computed_tokens)
        row = runner.input_batch.req_id_to_index[request_id]
        if request_id not in self._requests:
            self._requests[request_id] = ScoredRequest(entry, k)
        offset = int(runner.query_start_loc.np[row])
        return self._requests[request_id].part(begin, count, offset)


def _as_vllm(ids: IntArray, values: FloatArray) -> Any:
    from asyncrl.engine.vllm.worker.api import LogprobsTensors

    ranks = torch.zeros(len(ids), dtype=torch.int32)
    return LogprobsTensors(torch.from_numpy(ids), torch.from_numpy(values), ranks)


_ORPHANED = 3
"""Exit status of an engine core whose generator has ended."""
_PIECE = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Elements of weights that are looked at between two steps, some 10 ms; a tensor is never cut."""


class WorkerExtension(VllmWorker):
    """The calls of `VllmWorker`. `self` is also vLLM's worker."""

    model_runner: Any
    device: Any
    _batch: RunnerBatch
    _weights: WorkerWeights
    _adapter: ServedAdapter | None
    _fingerprint: Iterator[Fingerprint | None]

    def asyncrl_attach(
        self, parent: int, top_k: int, logits_bytes: int, stage_on_device: bool
    ) -> None:
        """Install our drawing, scoring and drafting, and exit when process `parent` has ended.

        It also proves how new weights are installed: minutes, for large models.

        Args:
            parent: id of the generator's process.
            top_k: K of the reported lists; 0: none is reported.
            logits_bytes: memory that drawing and scoring may hold at once (engine.logits_mib).
            stage_on_device: whether new weights wait on the model's device (engine.weight_staging).
        """
        _exit_with(parent)
        runner = self.model_runner
        check_reloadable(runner.get_model())
        ranks = Ranks.of_group(get_tp_group())
        batch = self._batch = RunnerBatch(runner, top_k or UNREPORTED_K)
        sampler = CoreSampler(runner, batch, ranks, logits_bytes)
        sampler.install()
        CoreScorer(runner, batch, ranks, logits_bytes).install()
        self._adapter = None if runner.lora_config is None else ServedAdapter(runner)
        if self._adapter is None:
            self._weights = WorkerWeights(VllmLoader(self), on_device=stage_on_device)
        else:
            self._weights = AdapterWeights(VllmLoader(self), self._adapter)
        self._weights.prove()
        if runner.speculative_config is not None:
            prepare_plainly(runner)
        drafter = _drafter_of(runner)
        if drafter is not None:
            drafter.attach(runner, batch, sampler)
        if ranks.leads:
            model = runner.model_config
            warm_up_drawing(
                torch.empty(1, model.get_vocab_size(), dtype=model.head_dtype, device=self.device),
                batch.listed,
            )
            warm_up_verification()

    def asyncrl_begin_staging(self, manifest: dict[str, Any]) -> None:
        """Begin to copy the weights of a manifest in a thread; generation continues."""
        self._weights.begin(msgspec.convert(manifest, WeightManifest))

    def asyncrl_staging(self) -> dict[str, Any]:
        """A `StagingReport` of the staging begun last."""
        report: dict[str, Any] = msgspec.to_builtins(self._weights.report())
        return report

    def asyncrl_install(self, policy_version: int) -> str:
        """Put the staged weights of this version in place, while generation is paused.

        Returns:
            Why vLLM had to load them in the pause, "" if it had not.
        """
        why_reloaded = self._weights.install(policy_version)
        self._batch.advance(policy_version)
        drafter = _drafter_of(self.model_runner)
        if drafter is not None:
            drafter.advance(policy_version)
        return why_reloaded

    def asyncrl_begin_fingerprint(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Begin a `Fingerprint` of the weights in use, by the names of the HF state dict."""
        held = VllmHeldWeights(
            self.model_runner.get_model(),
            {name: tuple(shape) for name, shape in shapes.items()},
            Ranks.of_group(get_tp_group()),
            self._adapter,
        )
        self._fingerprint = held.fingerprint(_PIECE[self.device.type])

    def asyncrl_fingerprint(self) -> dict[str, Any] | None:
        """Continue it for a few milliseconds; the fingerprint when it is done."""
        found = next(self._fingerprint)
        return None if found is None else dict(msgspec.to_builtins(found))

    def asyncrl_save_cache(self) -> int:
        """Write the snapshot of the cache of rollouts; returns its bytes."""
        drafter = _drafter_of(self.model_runner)
        return 0 if drafter is None else drafter.save()


def _drafter_of(runner: Any) -> CacheDrafter | None:
    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, CacheDrafter) else None


def _exit_with(parent: int) -> None:
    """Exit when the generator ends, however it ends: vLLM's core would otherwise run forever."""
    fd = os.pidfd_open(parent)
    name = "asyncrl-parent-watch"
    threading.Thread(target=partial(_wait_and_exit, fd), name=name, daemon=True).start()


def _wait_and_exit(fd: int) -> None:
    select.select([fd], [], [])
    os._exit(_ORPHANED)
