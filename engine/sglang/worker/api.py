# ruff: noqa: F401
# mypy: implicit-reexport
"""Everything of SGLang 0.5.23 that our side of its processes uses, and why.

Nothing of its installed files is changed.

    HookRegistry             puts our subclass in place of SGLang's scheduler, after plug-ins are
                             loaded
    Scheduler                overridden: the source of messages, the use of outputs, the work
                             between two steps
    Sampler                  overridden: draws
    LogitsProcessor          a forward pre-hook takes the hidden states of scored positions, and the
                             private `_get_logits` computes their logits over all ranks
    DefaultModelLoader       the functions that `begin_weight_update` and `end_weight_update` call,
                             which know only the model that decodes, not its twin
"""

from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_TOKEN,
    Req,
    ScheduleBatch,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.model_runner_components.weight_updater import (
    _unsupported_derived_weight_cache_error as unsupported_derived_weight_cache_error,
)
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel, get_serving
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.utils import TypeBasedDispatcher

SCHEDULER_NAME = "sglang.srt.managers.scheduler.Scheduler"
"""The class that `run_scheduler_process` instantiates."""
