# ruff: noqa: F401
# mypy: implicit-reexport
"""Everything of vLLM that is used in its engine core's process, by name. Pinned to 0.32.0.

When vLLM is updated, check these names first, then their uses, and the methods that `sampling`,
`scoring`, `drafter` and `scheduler` replace. Importing this takes seconds, so modules that tests
use without an engine import it in functions.
"""

from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import inplace
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, SamplerOutput
from vllm.v1.request import RequestStatus
