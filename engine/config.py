"""Settings of a generator's engine and of sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from asyncrl.cores import usable_cores
from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.sglang.config import SglangConfig
from asyncrl.engine.torch.config import TorchConfig
from asyncrl.engine.vllm.config import VllmConfig
from asyncrl.rollout.truncation import MAX_TOP_K, Truncation
from asyncrl.wire.transport.paths import MAX_STOP_BYTES, MAX_THREADS, MAX_TOKENS

if TYPE_CHECKING:
    from asyncrl.engine.sampling.stopping import StopRule

EngineKind = Literal["torch", "vllm", "sglang"]
DType = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
WeightStaging = Literal["host", "device"]
LogitsDType = Literal["auto", "float32", "model"]

MAX_TOP_K_LOGPROBS = 64
"""Largest K: its log-probabilities travel with every token."""

StopString = Annotated[str, Field(min_length=1)]


class SamplingConfig(BaseModel):
    """Sampling of rollouts. The distribution after these settings is the policy."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """Divisor of the logits. 0 (greedy) is refused, because it has no behaviour probability."""
    top_p: float = Field(default=1.0, ge=0.01, le=1)
    """Probability mass of nucleus sampling: only the smallest set of most probable tokens whose
    mass reaches it is sampled from. 1 samples from all tokens."""
    top_k: int = Field(default=0, ge=0, le=MAX_TOP_K)
    """Number of most probable tokens to sample from, applied before `top_p`. 0 or null samples from
    all tokens; 1 is refused: all samples of a group would be the same."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drops tokens less than this many times as probable as the most probable one, after `top_p`. 0
    samples from all tokens."""
    stop: tuple[StopString, ...] = ()
    """Texts that end a response: it ends with the token that completes the first of them. That
    token is part of the response, is trained on, and its text is passed to the rewards. At most 256
    bytes together."""
    max_tokens: int = Field(default=256, ge=1, le=MAX_TOKENS)
    """Largest number of tokens in a response: with an environment, of all turns and observations of
    a conversation together."""

    @property
    def truncation(self) -> Truncation:
        """Truncation of the distribution; the trainer applies the same."""
        return Truncation(self.top_k, self.top_p, self.min_p)

    @field_validator("stop")
    @classmethod
    def _short_enough(cls, strings: tuple[str, ...]) -> tuple[str, ...]:
        size = len("".join(strings).encode())
        if size > MAX_STOP_BYTES:
            raise ValueError(f"has {size} bytes together; at most {MAX_STOP_BYTES} are allowed")
        return strings

    @field_validator("top_k", mode="before")
    @classmethod
    def _null_is_off(cls, value: object) -> object:
        return 0 if value is None else value

    @field_validator("top_k")
    @classmethod
    def _not_greedy(cls, value: int) -> int:
        if value == 1:
            raise ValueError(
                "1 is greedy decoding: all samples of a group would be the same, and nothing could "
                "be learned; use at least 2, or 0 to sample from all tokens"
            )
        return value

    def params(
        self, *, stop_tokens: tuple[int, ...], stop_rule: StopRule | None, top_k_logprobs: int
    ) -> SamplingParams:
        """Return the sampling parameters of one request; `stop_rule` is that of `stop`."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop_tokens=stop_tokens,
            stop_rule=stop_rule,
            top_k_logprobs=top_k_logprobs,
        )


class EngineConfig(BaseModel):
    """Which engine generates, and its bounds."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: EngineKind = "torch"
    """Engine that generates. `torch`: embedded, any HF causal LM. `vllm`: vLLM. `sglang`:
    SGLang."""
    kinds: tuple[EngineKind, ...] = ()
    """Engine kinds of a mixed fleet, for generator 0, 1, ...; repeated if there are more
    generators. []: `kind` for all."""
    slots: int = Field(default=64, ge=1, le=1 << 16)
    """Number of requests that run at once."""
    max_model_len: int = Field(default=1024, ge=2, le=MAX_TOKENS)
    """Largest number of tokens in a prompt and its response together."""
    dtype: DType = "auto"
    """Data type of weights and KV. `auto`: float32 on a CPU, otherwise bfloat16."""
    logits_dtype: LogitsDType = "auto"
    """Data type of logits. float32: the output layer multiplies in `dtype` and accumulates in
    float32, at almost no cost on a GPU. model: `dtype`; bfloat16 rounds a logit by up to 0.06,
    differently in decoding and verification. auto: float32 on a GPU, model on a CPU."""
    batch_invariant: bool = False
    """Make results independent of the rest of the batch, with vLLM and SGLang on NVIDIA GPUs of
    capability 8.0 or above: verification then rejects nothing for rounding. 20% to 40% slower
    (docs/trainer.md). The torch engine does this on a CPU with `run.repeatable`."""
    device: Device = "auto"
    """Device of the engine. `auto`: a GPU if torch sees one, otherwise the CPU."""
    weight_staging: WeightStaging = "host"
    """Place where new weights wait for their installation, as one more copy in `dtype`, if the
    engine is on a GPU. `host`: page-locked host memory; the pause is a copy over PCIe. `device`:
    the GPU's memory; the pause is a copy within it (docs/trainer.md has the sizes). vLLM and SGLang
    need further host memory for the tensors as they were published."""
    threads: int | None = Field(default=None, ge=1, le=MAX_THREADS)
    """Number of CPU threads of the engine's process. The ranks of a tensor-parallel engine, each of
    which is a process, divide them. null: torch's choice."""
    top_k_logprobs: int = Field(default=64, ge=0, le=MAX_TOP_K_LOGPROBS)
    """K: number of most probable tokens stored per position, 8 bytes each. A vocabulary of at most
    K tokens is stored whole. `scheduler.on_update: verify` judges these tokens one by one and all
    others together, as one symbol, so a larger K keeps more of them."""
    logits_mib: int = Field(default=512, ge=1, le=1 << 20)
    """Most memory, in MiB, that drawing and scoring hold at once for distributions over the
    vocabulary (12 bytes a logit, 64 with top-k, top-p or min-p). On a GPU it comes out of what
    vllm.gpu_memory_utilization or sglang.mem_fraction_static leaves free. It also bounds the tokens
    of a step that drafts."""
    torch: TorchConfig = TorchConfig()
    vllm: VllmConfig = VllmConfig()
    sglang: SglangConfig = SglangConfig()

    @model_validator(mode="after")
    def _batch_invariance_has_an_effect(self) -> Self:
        if not self.batch_invariant:
            return self
        if "torch" in (self.kinds or (self.kind,)):
            raise ValueError(
                "batch_invariant: true has no effect with the torch engine, which repeats on a CPU "
                "by run.repeatable: true; leave it out, or use kind: vllm or sglang on a GPU"
            )
        if self.device == "cpu":
            raise ValueError("batch_invariant: true needs a GPU, and device is cpu; leave it out")
        return self

    @property
    def logits_bytes(self) -> int:
        """`logits_mib` in bytes."""
        return self.logits_mib << 20

    def weights_dtype(self, *, on_cpu: bool) -> Literal["float32", "bfloat16"]:
        """Return the data type of the weights that the engine decodes with."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if on_cpu else "bfloat16"

    def has_float32_logits(self, *, on_cpu: bool) -> bool:
        """Return True if logits are float32 regardless of `dtype`."""
        return self.logits_dtype == "float32" or (self.logits_dtype == "auto" and not on_cpu)

    def of_generator(self, number: int) -> EngineConfig:
        """Return the settings of one generator, with `kind` resolved."""
        if not self.kinds:
            return self
        return self.model_copy(update={"kind": self.kinds[number % len(self.kinds)], "kinds": ()})

    def of_fleet(self, generators: int) -> list[EngineConfig]:
        """Return one configuration per engine kind in the fleet, in order of first use."""
        found: dict[EngineKind, EngineConfig] = {}
        for number in range(generators):
            one = self.of_generator(number)
            found.setdefault(one.kind, one)
        return list(found.values())

    def started_within(self, seconds: float) -> EngineConfig:
        """Return a copy whose process is killed if it is not ready after `seconds`."""
        return self.model_copy(
            update={
                "vllm": self.vllm.started_within(seconds),
                "sglang": self.sglang.started_within(seconds),
            }
        )

    @property
    def start_limit(self) -> float | None:
        """Longest wait for the engine's process, in seconds; None: it runs in the generator's."""
        if self.kind == "torch":
            return None
        return (self.vllm if self.kind == "vllm" else self.sglang).start_limit

    @property
    def rank_threads(self) -> int:
        """CPU threads of each rank's process, at least 1; for engines with their own processes."""
        return max(1, (self.threads or usable_cores()) // self.gpus)

    @property
    def gpus(self) -> int:
        """Number of GPUs of one generator, if it uses GPUs."""
        if self.kind == "torch":
            return 1
        return (self.vllm if self.kind == "vllm" else self.sglang).tensor_parallel_size
