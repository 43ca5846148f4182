# ruff: noqa: F401
# mypy: implicit-reexport
"""Everything of vLLM that the generator's process touches, by name. Pinned to 0.32.0.

When vLLM is updated, check these names first, then their uses. Importing this takes seconds, as
vLLM does: modules that are imported without an engine import it in functions.
"""

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase
