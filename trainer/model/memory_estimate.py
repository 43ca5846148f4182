"""Memory that a training step needs, by kind, and the memory of this machine. No torch.

Weights, gradients and moments are exact: bytes a parameter. Activations are what the backward pass
of one micro-batch needs, counted from the operations of a Llama-like layer; tests check that they
are within ACTIVATIONS_FACTOR of what a learner allocates. Other kinds of model need about as much.

A control group may allow less than the machine has. Its usage includes the page cache, which the
kernel reclaims when memory is needed; after a checkpoint that is most of it.
"""

import ctypes
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import ValidationError

from asyncrl.cores import control_groups
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.lora_config import LoraConfig

logger = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Constants of glibc's malloc.h."""
_NEVER = (1 << 31) - 1
GIB = 2**30
ACTIVATIONS_FACTOR = 1.5
"""Measured activations are between 1 / this and this times the estimate (tests/trainer)."""
_PROCESS = int(0.6 * GIB)
"""Memory of a process that has loaded torch, on a CPU; of CUDA's context and libraries on a GPU."""
_LOGITS_AT_ONCE = 1 << 25
_BLOCK = {False: 1 << 23, True: 1 << 26}
"""`LOGIT_BUDGET` and `BLOCK` of `asyncrl.trainer.model.head`, without and with a GPU."""
FULL = 0.92
"""Share of a GPU's memory that an estimated step may need; the driver reserves about 1%."""
_NCCL = 1 * GIB
"""NCCL's memory on each GPU: buffers of 4 MiB for each of 32 channels and 4 connections of a
channel are 0.5 GiB; about as much is for its other protocols, its kernels and the driver."""
_WORKSPACES = 96 << 20
"""32 MiB each for cuBLAS (on Hopper), cuBLASLt and attention."""
_FRAGMENTED = 0.05
"""Share of the varying part: the allocator keeps blocks that no later tensor fits."""
_OF_THE_HOST = ("host_moments", "host_copy", "published")


def keep_freed_memory() -> bool:
    """Keep the memory of freed CPU tensors; return True if the C library supports it (glibc does).

    glibc returns large freed blocks to the system, which clears the pages of the next ones: ten
    times the cost of the arithmetic for a tensor of 40 MiB. A step's peak memory is the same.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.info("memory of freed tensors is not kept: this C library has no mallopt")
        return False
    done = bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
    logger.info("memory of freed tensors is kept")
    return done


class _Version(NamedTuple):
    limit: str
    used: str
    cached: str
    """Field of memory.stat: cached pages that were not used twice."""


_VERSIONS = {
    False: _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    True: _Version("memory.max", "memory.current", "inactive_file"),
}
"""Files of a control group, by whether it is of version 2."""


def host_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process may use: the machine's, or its control group's limit if lower."""
    found = [_bytes_of(root / "proc/meminfo", "MemTotal:", 1024)]
    for folder, is_v2 in control_groups("memory", root):
        found.append(_number(folder / _VERSIONS[is_v2].limit))
    return min((one for one in found if one is not None), default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take, if known. `root` as above."""
    found = [_bytes_of(root / "proc/meminfo", "MemAvailable:", 1024)]
    for folder, is_v2 in control_groups("memory", root):
        version = _VERSIONS[is_v2]
        limit, used = (_number(folder / name) for name in (version.limit, version.used))
        if limit is not None and used is not None:
            cached = _bytes_of(folder / "memory.stat", version.cached) or 0
            found.append(limit - used + cached)
    return min((one for one in found if one is not None), default=None)


def _bytes_of(path: Path, name: str, unit: int = 1) -> int | None:
    """Return the number after a name at the beginning of a line, in bytes."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        return next(int(words[1]) * unit for words in lines if words[:1] == [name])
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # "max", or not readable for this process
        return None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a model's config.json that determine memory."""

    parameters: int
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool = False
    """True if the head's weight is the embedding's."""
    critic: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int | None = None) -> Self | None:
        """Read config.json; None if it is not that of a transformer.

        Without a count of `parameters`, it is computed as for a dense Llama-like model.
        """
        config = config.get("text_config") or config
        try:
            hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
            heads, vocabulary = int(config["num_attention_heads"]), int(config["vocab_size"])
            intermediate = int(config["intermediate_size"])
        except (KeyError, TypeError, ValueError):
            return None
        kv = int(config.get("num_key_value_heads") or heads)
        size = int(config.get("head_dim") or hidden // max(1, heads))
        tied = bool(config.get("tie_word_embeddings", False))
        if parameters is None:
            layer = hidden * size * (2 * heads + 2 * kv) + 3 * hidden * intermediate
            parameters = layers * (layer + 2 * hidden) + vocabulary * hidden * (1 if tied else 2)
        return cls(parameters, hidden, layers, intermediate, heads, kv, size, vocabulary, tied)


def adapter_parameters(shape: ModelShape, config: LoraConfig) -> int:
    """Count the parameters of A and B; a layer of another name counts as one of the MLP's."""
    hidden, middle = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    of_attention = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
    all_linear = (*of_attention, "gate_proj", "up_proj", "down_proj")
    names = all_linear if isinstance(config.targets, str) else config.targets
    block = sum(hidden + of_attention.get(name, middle) for name in names)
    return config.rank * block * shape.layers


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes by kind, on the trainer's device unless they say otherwise."""

    weights: int
    """Float32 masters, and bfloat16 copies for computing; with `sharding: full` this rank's part.
    With LoRA the model in its compute type, and the adapter."""
    gradients: int
    """Sums, one per part of the loss, and the newest of the largest matrix; or this rank's part of
    the sums."""
    moments: int
    """Adam's two moments, this rank's part."""
    reference: int
    """The initial model, for a KL penalty."""
    activations: int
    head: int
    """Logits in memory at once, and hidden states of response tokens."""
    process: int
    critic: int = 0
    """A value model's weights, gradients, moments and activations."""
    libraries: int = 0
    """Buffers of NCCL and cuBLAS, and fragmentation, on a GPU."""
    gathered: int = 0
    """Whole weights and gradients in use with `sharding: full`, and buffers that send them."""
    copy: int = 0
    """The copy for checkpoints, if the device is the host."""
    host_moments: int = 0
    host_copy: int = 0
    """The copy for checkpoints of a GPU's state, on the host."""
    published: int = 0
    """Two versions of the weights in the host's shared memory."""

    @property
    def device(self) -> int:
        """Bytes of the trainer's device at the peak."""
        return sum(size for _, size in self.kinds())

    @property
    def least(self) -> int:
        """Bytes without which the step cannot work, even if the estimate is too high.

        Without memory for the copy, checkpoints are written without it.
        """
        unsure = self.activations * (2 if self.critic else 1) + self.head
        return self.device - self.copy - unsure + int(unsure / ACTIVATIONS_FACTOR)

    def kinds(self) -> list[tuple[str, int]]:
        """Kinds on the device, largest first, without zeros."""
        names = [one.name for one in fields(self) if one.name not in _OF_THE_HOST]
        found = [(name, size) for name in names if (size := getattr(self, name))]
        return sorted(found, key=lambda one: -one[1])


@dataclass(frozen=True, slots=True)
class Samples:
    """Sizes of a step's samples."""

    longest: int
    """Tokens of the longest sample, prompt included."""
    group_size: int


def step_memory(
    shape: ModelShape,
    config: TrainerConfig,
    samples: Samples,
    *,
    on_gpu: bool,
    engine_bytes: int = 2,
) -> StepMemory:
    """Estimate what one rank of a trainer needs; engines' numbers have `engine_bytes`."""
    count, low = shape.parameters, config.compute_dtype == "bfloat16"
    width = 8 if config.compute_dtype == "float64" else 4
    head = shape.vocabulary * shape.hidden
    parts = 2 if config.algorithm == "reinforce_plus_plus" else 1
    adapter = adapter_parameters(shape, config.lora) if config.lora.enabled else 0
    trained = adapter or count
    of_moment = {"float32": width, "bfloat16": 2, "int8": 1 + 4 / 256}  # int8: 256 share a scale
    moments = int(2 * trained // config.ranks * of_moment[config.optimizer_state])
    activations = _activations(shape, config, samples)
    full = config.sharding == "full"
    own = width / config.ranks if full else width
    of_critic = int(shape.critic * (2 * own + moments / max(1, trained))) + activations
    if low and not full and not config.gradient_checkpointing:
        of_critic += 2 * shape.critic  # its copies in bfloat16
    weights = int(count * own) + (_low_copies(shape, config) if low and not full else 0)
    if adapter:
        weights = count * (2 if low else width) + adapter * width
    copy = (trained * width // config.ranks + moments) * config.async_checkpoints
    copy += copy * shape.critic // max(1, count)
    logits = _head(shape, config, samples, on_gpu=on_gpu)
    gathered = _gathered(shape, config) if full else 0
    varying = logits + gathered + activations * (2 if shape.critic else 1)
    libraries = _WORKSPACES + _NCCL * (config.ranks > 1) + int(_FRAGMENTED * varying)
    return StepMemory(
        weights=weights,
        gradients=int(parts * trained * own) + (0 if full or adapter else head * width),
        moments=0 if config.optimizer_offload else moments,
        reference=int(count * own) if config.kl_coefficient > 0 and not adapter else 0,
        activations=activations,
        head=logits,
        process=_PROCESS,
        critic=of_critic if shape.critic else 0,
        libraries=libraries if on_gpu else 0,
        gathered=gathered,
        copy=0 if on_gpu else copy,
        host_copy=copy if on_gpu else 0,
        host_moments=moments if config.optimizer_offload else 0,
        published=2 * adapter * 4 if adapter else 2 * count * engine_bytes,
    )


def _low_copies(shape: ModelShape, config: TrainerConfig) -> int:
    """Bytes of bfloat16 weights at a time: all, or one block's where blocks are recomputed."""
    if not config.gradient_checkpointing:
        return 2 * shape.parameters
    head = shape.vocabulary * shape.hidden
    blocks = shape.parameters - head * (1 if shape.tied else 2)
    return 2 * max(head, 2 * blocks // shape.layers)


def _gathered(shape: ModelShape, config: TrainerConfig) -> int:
    """Bytes of whole tensors at a time.

    In the backward pass of a block: its weights, those of the next one as they arrive and as they
    are laid out, its gradients, and those of two blocks on their way to the ranks that sum them.
    Head and embedding: weight and gradient, or the gradient twice when it is sent; a tied one stays
    from the head's backward pass to the embedding's.
    """
    width = 8 if config.compute_dtype == "float64" else 4
    low = 2 if config.compute_dtype == "bfloat16" else width
    head = shape.vocabulary * shape.hidden
    block = (shape.parameters - head * (1 if shape.tied else 2)) // shape.layers
    of_block = block * (4 * low + 2 * width)
    of_head = head * (2 * width + (low if low < width else 0))
    return of_block + of_head if shape.tied else max(of_block, of_head)


def remedies(
    shape: ModelShape, config: TrainerConfig, samples: Samples, available: int, *, on_gpu: bool
) -> tuple[list[str], int]:
    """Settings with which the step fits: one that suffices alone, the cheapest, or several.

    Returns them as `trainer.NAME: VALUE`, and the bytes needed with them, which may be too many.
    """
    ways: list[tuple[str, object]] = [
        ("gradient_checkpointing", "selective"),
        ("micro_batch_tokens", samples.longest),
        ("gradient_checkpointing", True),
        ("optimizer_state", "bfloat16"),
        ("optimizer_state", "int8"),
    ]
    if on_gpu:  # on a CPU the host's memory is the device's
        ways.append(("optimizer_offload", True))
    if config.ranks > 1 and not config.lora.enabled:
        ways.append(("sharding", "full"))
    ways = [way for way in ways if _saves(config, *way) and _is_possible(config, *way)]

    def needed(changes: Mapping[str, object]) -> int:
        changed = config.model_copy(update=dict(changes))
        found = step_memory(shape, changed, samples, on_gpu=on_gpu)
        return found.device - found.copy  # the copy is optional

    for name, value in ways:
        if needed({name: value}) <= available:
            return [_written(name, value)], needed({name: value})
    together: dict[str, object] = {}
    for name, value in ways:
        together[name] = value
        if needed(together) <= available:
            break
    for name in reversed(list(together)):
        others = {other: value for other, value in together.items() if other != name}
        if needed(others) <= max(available, needed(together)):
            together = others
    return [_written(name, value) for name, value in together.items()], needed(together)


def _written(name: str, value: object) -> str:
    return f"trainer.{name}: {str(value).lower()}"


def _saves(config: TrainerConfig, name: str, value: object) -> bool:
    now = getattr(config, name)
    if name == "micro_batch_tokens":
        return bool(now > value)
    if name == "optimizer_state":
        kinds = ("float32", "bfloat16", "int8")
        return kinds.index(now) < kinds.index(str(value))
    return bool(now != value and now is not True)


def _is_possible(config: TrainerConfig, name: str, value: object) -> bool:
    try:
        type(config).model_validate({**config.model_dump(), name: value})
    except ValidationError:
        return False
    return True


def tokens_at_once(config: TrainerConfig, samples: Samples) -> int:
    """Tokens of the largest micro-batch."""
    most = max(config.micro_batch_tokens, samples.longest)
    return most if config.mix_groups else min(most, samples.longest * samples.group_size)


def _activations(shape: ModelShape, config: TrainerConfig, samples: Samples) -> int:
    """Kept for the backward pass: all layers, or every layer's input and one layer."""
    tokens = tokens_at_once(config, samples)
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    # A layer's two norms and the residual stream, in float32; queries, keys, values and attention's
    # output, before and after rotation and once more for its padded block; the MLP's four tensors.
    stream = 4 * shape.hidden
    products = 4 * queries + 5 * keys + 4 * shape.intermediate
    width = {"float32": 4, "float64": 8, "bfloat16": 2}[config.compute_dtype]
    wide = max(4, width)
    layer = stream * wide + products * width
    if width == 2:  # casts of the norms' results, and norms that keep their steps
        layer += 2 * shape.hidden * (width + wide)
    if config.gradient_checkpointing:
        kept = shape.hidden * wide
        if config.gradient_checkpointing == "selective":
            kept += 2 * (shape.hidden + queries + keys) * width
        return tokens * (shape.layers * kept + layer)
    return tokens * shape.layers * layer


def _head(shape: ModelShape, config: TrainerConfig, samples: Samples, *, on_gpu: bool) -> int:
    tokens = tokens_at_once(config, samples)
    width = 8 if config.compute_dtype == "float64" else 4
    logits = tokens * shape.vocabulary
    copies = 4 if logits <= _LOGITS_AT_ONCE else 2
    if logits > _LOGITS_AT_ONCE:
        logits = max(_BLOCK[on_gpu], shape.vocabulary)
    return (copies * logits + 3 * tokens * shape.hidden) * width
