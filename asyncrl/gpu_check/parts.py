"""The parts of a check, in the order of their value, with their inputs and results."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Word = Literal["ok", "failed", "left out"]
Said = tuple[str, Mapping[str, Any]]
"""Result of a successful part: a sentence, and numbers with units in the keys."""


@dataclass(frozen=True, slots=True)
class Context:
    """The input of a part."""

    folder: Path
    """Folder for files that all parts share, such as a model."""
    gpus: int
    small: bool
    """True to take the smallest size, which exercises all code and measures nothing."""

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """The device of a part's computation."""
        return "cuda" if self.gpus else "cpu"


class LeftOut(Exception):  # noqa: N818 - it is not an error
    """A part cannot be run here; the message says why."""


class PartFailed(Exception):  # noqa: N818 - a verdict
    """A part found something wrong; `numbers` were measured all the same."""

    def __init__(self, sentence: str, numbers: Mapping[str, Any] | None = None) -> None:
        super().__init__(sentence)
        self.numbers = dict(numbers or {})


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a check."""

    name: str
    what: str
    function: str
    """`module:function`. It takes a `Context`, returns `Said`, raises `LeftOut` or `PartFailed`."""
    seconds: float
    packages: tuple[str, ...] = ()
    """Imported modules that may be missing."""
    gpus: int = 0
    or_cpu: bool = False
    """True if it also runs without a GPU, although it needs `gpus` of them if there are any."""

    def lacks(self, gpus: int, missing: Iterable[str]) -> str:
        """Say why it cannot run with these GPUs and without these modules; "" if it can."""
        absent = [one for one in self.packages if one in set(missing)]
        if absent:
            names = " and ".join(PACKAGE_OF.get(one, one) for one in absent)
            engines = set(absent) <= {"vllm"}
            return f"{names} {'is' if len(absent) == 1 else 'are'} not installed" + (
                "" if engines else "; `make gpu-bundle` collects them (numba with NUMBA=1)"
            )
        if gpus >= self.gpus or (self.or_cpu and gpus == 0):
            return ""
        wanted = {1: "a GPU", 2: "two GPUs"}[self.gpus]
        return f"needs {wanted}, torch sees {gpus or 'none'}"


PACKAGE_OF = {"zmq": "pyzmq", "yaml": "pyyaml"}
"""Package names that differ from those of their modules."""
_WIRE = ("msgspec", "zmq")
_ENGINE = (*_WIRE, "pydantic", "numba", "transformers", "safetensors")
_RUN = (*_ENGINE, "yaml", "typer", "rich", "prometheus_client")
_HERE = "asyncrl.gpu_check."

PARTS = (
    Part("driver", "nvidia-smi, torch's CUDA, the findings of `asyncrl doctor`",
         f"{_HERE}machine:driver", 300),
    Part("compiler", "Triton, gcc and Python.h: a kernel of one line is compiled and run",
         f"{_HERE}machine:compiler", 120, ("triton",)),
    Part("kernels",
         "the kernels that draw and look up, against references: results, ms, memory limit",
         f"{_HERE}drawing:kernels", 240, ("triton", *_WIRE, "pydantic", "numba")),
    Part("draws", "a chi-square test of drawn tokens against the distribution",
         f"{_HERE}drawing:draws", 120, (*_WIRE, "pydantic", "numba")),
    Part("engine", "the torch engine, 20 steps and more: tokens per second",
         f"{_HERE}generating:engine", 180, _ENGINE),
    Part("trainer", "a micro-batch forward and backward: MFU against a measured matrix product",
         f"{_HERE}training:trainer", 180, _ENGINE),
    Part("attention", "varlen attention against SDPA: output, gradients, ms",
         f"{_HERE}training:attention", 120, _ENGINE, gpus=1),
    Part("noise-floor",
         "log-probabilities of decoding against verification, and what verification rejects",
         f"{_HERE}generating:noise_floor", 240, _ENGINE),
    Part("weights",
         "new weights for the torch engine: published, staged, installed twice, compared",
         f"{_HERE}generating:weights", 180, _ENGINE),
    Part("run", "`asyncrl run` of the built-in task, on one GPU if there is one",
         f"{_HERE}whole_run:run", 420, _RUN),
    Part("vllm", "vLLM without drafts, scheduled as it chooses, beside `vllm bench latency`",
         f"{_HERE}generating:vllm", 900, (*_ENGINE, "vllm"), gpus=1),
    Part("vllm-drafts", "vLLM with asyncrl's drafts",
         f"{_HERE}generating:vllm_drafts", 600, (*_ENGINE, "vllm"), gpus=1),
    Part("vllm-weights", "the first installation of weights in vLLM, and the second",
         f"{_HERE}generating:vllm_weights", 600, (*_ENGINE, "vllm"), gpus=1),
    Part("vllm-noise-floor",
         "the noise floor of vLLM: logits in its type and in float32, batch-invariant",
         f"{_HERE}generating:vllm_noise_floor", 1200, (*_ENGINE, "vllm"), gpus=1),
    Part("sglang", "SGLang without drafts",
         f"{_HERE}generating:sglang", 600, _ENGINE, gpus=1),
    Part("vllm-tp2", "vLLM on two GPUs (tensor parallel)",
         f"{_HERE}generating:vllm_tp2", 600, (*_ENGINE, "vllm"), gpus=2),
    Part("nccl", "a broadcast of weights between two processes: NCCL, gloo on a CPU",
         f"{_HERE}two_ranks:nccl", 120, _WIRE, gpus=2, or_cpu=True),
    Part("ranks",
         "a step on two ranks, with the optimizer's state in parts (ZeRO) and all of it (FSDP2)",
         f"{_HERE}two_ranks:ranks", 240, _ENGINE, gpus=2, or_cpu=True),
)  # fmt: skip


@dataclass(slots=True)
class Verdict:
    """The result of a part."""

    part: str
    verdict: Word
    sentence: str
    seconds: float = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)
    last_lines: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.verdict:8}  {self.part:16} {self.seconds:6.1f} s  {self.sentence}"
