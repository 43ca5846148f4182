"""The trainer's settings. Light to import: no torch."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from asyncrl.trainer.base.algorithm_registry import check_name, entry_of
from asyncrl.trainer.base.lora_config import LoraConfig, refuse_conflicts
from asyncrl.trainer.base.rank_network import LOOPBACK, network_of
from asyncrl.wire.transport.paths import (
    MAX_STEPS,
    MAX_THREADS,
    MAX_TOKENS,
    WEEK_SECONDS,
    FunctionName,
)

ComputeDtype = Literal["float32", "bfloat16", "float64"]
BFLOAT16_CAPABILITY = (8, 0)
"""CUDA compute capability of the first GPUs (A100) that multiply bfloat16."""


class CriticConfig(BaseModel):
    """The value model of `trainer.algorithm: ppo`, and the advantages that are made of its values.

    By default it is a copy of the initial policy with a scalar head, trained with the policy.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: str | None = None
    """Hugging Face directory that the value model starts from, with the policy's tokenizer; unset:
    model.path. Its language-model head is not used: the value head starts at 0."""
    shared_trunk: bool = False
    """Values from the policy's own hidden states, by a scalar head: no second model, but the value
    loss changes the policy's weights."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Generalised advantage estimation: 1 trusts the rewards alone, smaller ones the critic."""
    truncated: Literal["terminal", "bootstrap"] = "terminal"
    """Treatment of a response that the token limit, a deadline or `environment.max_turns` cut off.
    terminal: it ends there, with its reward. bootstrap: the critic's value of its end is added to
    its reward."""
    value_clip: float | None = Field(default=0.2, gt=0, le=1e6)
    """Moving a value further than this from that of the step's start does not improve the loss;
    null: off. No effect in the first of several passes."""
    value_coefficient: float = Field(default=0.5, gt=0, le=1000)
    """Weight of the value loss."""
    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    """Learning rate of the value model and its head; constant after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps over which the critic's learning rate rises linearly."""
    passes: int = Field(default=1, ge=1, le=100)
    """Passes of the critic over the samples of a step; the policy has `trainer.ppo_epochs`. Each
    pass after the first costs a forward and a backward pass of the critic."""
    minibatches: int = Field(default=1, ge=1, le=10_000)
    """Optimizer steps of the critic in each of its passes after the first, on equal shares of the
    step's groups."""
    head_start_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """First steps in which only the critic learns, and the policy does not change."""

    @model_validator(mode="after")
    def _one_trunk(self) -> Self:
        if self.shared_trunk and self.model is not None:
            raise ValueError(
                f"model: {self.model} has no effect with shared_trunk: true, where the policy "
                "itself computes the values; leave one of them out"
            )
        if self.shared_trunk and self.passes > 1:
            raise ValueError(
                f"passes: {self.passes} does not fit shared_trunk: true, where each pass of the "
                "critic changes the policy's weights; leave one of them out (trainer.ppo_epochs "
                "has passes of both)"
            )
        if self.minibatches > 1 and self.passes == 1:
            raise ValueError(
                f"minibatches: {self.minibatches} has no effect with passes: 1, since the first "
                "pass is made as groups arrive; set passes to 2 or more"
            )
        if self.shared_trunk and self.head_start_steps:
            raise ValueError(
                "head_start_steps does not fit shared_trunk: true: the value loss changes the "
                "policy's weights from the first step on. Leave one of them out"
            )
        return self

    def rate_at(self, step: int) -> float:
        """Learning rate of step `step`, from 0."""
        rise = min(1.0, (step + 1) / (self.warmup_steps + 1))
        return self.learning_rate * rise


def refuse_what_does_not_fit(config: Any) -> None:
    """Raise ValueError for settings of a `TrainerConfig` that contradict its algorithm."""
    for name, value in entry_of(config.algorithm).only.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{name}: {getattr(config, name)} does not fit algorithm: {config.algorithm}; its "
                f"equation allows only {name}: {value} (docs/algorithms.md). Leave it out"
            )
    if config.algorithm == "gpg" and config.kl_estimator == "k1" and config.kl_coefficient > 0:
        raise ValueError(
            "kl_estimator: k1 is part of the advantages, which algorithm: gpg multiplies by "
            "groups / groups with signal, so the penalty would grow with the groups without "
            "signal and vanish in a step without any signal; choose k2 or k3"
        )
    if config.proximal_policy == "behaviour" and config.correction == "sequence_truncated":
        raise ValueError(
            "correction: sequence_truncated is a weight, but with proximal_policy: behaviour "
            f"the loss of {config.algorithm} already contains the ratio; choose sequence_masked, "
            "sequence_rejected, token_masked or none"
        )


class TrainerConfig(BaseModel):
    """Settings that turn groups of trajectories into optimizer steps.

    By default each batch is passed over once. `proximal_policy`, `correction` and `clip_ratio_*`
    decide what the importance ratio does. docs/algorithms.md has the equations, and each
    algorithm's defaults.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    algorithm: Annotated[FunctionName, AfterValidator(check_name)] = "grpo"
    """Registered algorithm: grpo, dr_grpo, dapo, rloo, reinforce (leave-one-out baseline),
    reinforce_plus_plus, reinforce_plus_plus_baseline, gspo, cispo, gpg, ppo (with a critic), or one
    of your own, as path/to/file.py:Class or my.module:Class (docs/algorithms.md)."""
    learning_rate: float = Field(default=1e-6, gt=0, le=1)
    """Peak learning rate of AdamW; 1e-6 suits 1B-32B parameters."""
    learning_rate_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape after warm-up; cosine and linear decay to the minimum."""
    learning_rate_minimum: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at which cosine and linear end."""
    warmup_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps of the run over which the learning rate rises linearly: the i-th has i / (this + 1) of
    the peak."""
    schedule_steps: int | None = Field(default=None, gt=0, le=MAX_STEPS)
    """Step at which cosine and linear reach the minimum; unset: run.steps."""
    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """AdamW's decoupled weight decay, on matrices only (not norms and biases)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decays."""
    adam_epsilon: float = Field(default=1e-8, gt=0, le=1)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The global gradient norm is clipped to this; .inf disables clipping."""

    proximal_policy: Literal["current", "behaviour"] = "current"
    """current: decoupled objective with truncated importance weights; a single pass clips nothing.
    behaviour: PPO's clipped ratio against the policy that drew the tokens."""
    importance_cap: float = Field(default=2.0, ge=1, le=1e6)
    """Largest importance weight of a token or sample: the correction truncates it to this.
    `dapo`, `gspo` and `cispo` have proximal_policy: behaviour, whose loss contains the ratio."""
    dual_clip: float | None = Field(default=None, gt=1, le=1e6)
    """PPO's dual clip: with a negative advantage, a token's loss grows up to this ratio and no
    further; unset: off, as in GRPO's and DAPO's papers. 3 is usual."""
    correction: Literal[
        "token_truncated",
        "token_masked",
        "sequence_truncated",
        "sequence_masked",
        "sequence_rejected",
        "none",
    ] = "token_truncated"
    """Effect of the ratio of current and behaviour probability on a token or a whole sample:
    truncated to `importance_cap`, left out if it is outside `correction_band` (masked), or left out
    if the sample's geometric mean is (rejected). No effect on-policy. With proximal_policy:
    behaviour the ratio is in the loss, and only leaving out has an effect."""
    correction_band: tuple[float, float] | None = None
    """Ratios that masked and rejected keep; unset: 0.5 to 5 (masked), 0.99 to 1.01 (rejected)."""
    log_ratio_clamp: float | None = Field(default=None, gt=0, le=80)
    """Bound of a token's |log of current over behaviour probability| in the loss, and of current
    over proximal probability, nats; unset: no bound. Others use 20."""
    clip_ratio_low: float = Field(default=0.2, gt=0, le=1)
    """PPO clips the ratio below 1 - this."""
    clip_ratio_high: float = Field(default=0.2, gt=0, le=1e6)
    """PPO clips the ratio above 1 + this; DAPO's clip-higher uses 0.28."""
    loss_normalization: Literal["token", "sequence", "sample"] = "token"
    """token: every response token of the step has the same weight (DAPO). sequence: every sample
    has the same weight, its tokens are averaged first (GRPO). sample: tokens are summed, and
    divided by the samples of the step (Dr. GRPO, RLOO); the only unbiased one."""
    advantage_normalization: Literal["std", "none"] = "std"
    """std: divide by the group's standard deviation (GRPO), with `ppo` normalise over the tokens of
    the step. none: do not (Dr. GRPO)."""
    skip_zero_variance_groups: bool = True
    """Do not compute groups whose advantages are all 0. They still count in the denominator, so the
    gradient is the same; the means of entropy, ratio and mismatch lack their tokens. No effect
    while kl_coefficient > 0 and with ppo and reinforce_plus_plus, whose groups all have a
    gradient."""
    overlong_buffer: int = Field(default=0, ge=0, le=MAX_TOKENS)
    """DAPO's overlong shaping: over this many tokens before sampling.max_tokens, a response loses
    up to 1 of its reward, linearly. 0: off. Metrics keep the task's rewards."""
    mask_truncated_completions: bool = False
    """DAPO's overlong filtering: leave samples that the token limit, a deadline or
    `environment.max_turns` cut off out of the loss. Their rewards stay in their group's baseline,
    and they stay in the loss's denominator, like tokens that a correction leaves out."""
    kl_coefficient: float = Field(default=0.0, ge=0, le=1000)
    """Weight of the KL penalty towards the reference, which is the initial model unless it is
    refreshed; with 0 no second model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k3 (GRPO) and k2 are added to the loss; k1 is subtracted from the reward (RLHF,
    REINFORCE++)."""
    kl_clamp: float | None = Field(default=None, gt=0, le=1e6)
    """Largest KL estimate of a token, nats; unset: no bound. Others use 10."""
    reference_refresh_steps: int | None = Field(default=None, gt=0, le=MAX_STEPS)
    """Refresh the KL's reference with a copy of the policy every N steps; unset: it stays the
    initial model."""
    reference_decay: float | None = Field(default=None, gt=0, lt=1)
    """Make the KL's reference a moving average of policies: after each step it is this much of
    itself and 1 - this of the policy (0.99, say); unset: it stays the initial model."""

    ppo_epochs: int = Field(default=1, ge=1, le=100)
    """Passes over the samples of a step. More than 1 trains on samples that the policy has already
    learnt from: only the first pass is on-policy."""
    minibatches: int = Field(default=1, ge=1, le=10_000)
    """Optimizer steps per pass, each on an equal share of the step's groups in data order. Weights
    are published once per step. More than 1: only the first minibatch is on-policy."""
    critic: CriticConfig = CriticConfig()

    lora: LoraConfig = LoraConfig()

    router_loss_coefficient: float = Field(default=0.0, ge=0, le=10)
    """Weight of a loss that keeps the experts of a mixture in use (docs/algorithms.md); 0: off.
    Pre-training uses 0.001 to 0.01."""

    micro_batch_tokens: int = Field(default=8192, gt=0, le=MAX_TOKENS)
    """Prompt + response tokens of one forward pass; a longer sequence gets its own."""
    mix_groups: bool = False
    """Whole waiting groups share forward passes, up to micro_batch_tokens: for groups much smaller
    than that. The order of sums, and so the rounding, then depends on which groups wait."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Compute type. auto: bfloat16 on a GPU of compute capability 8.0 or above, float32 on an older
    one and on a CPU; the run's config.yaml records the choice. With agents, Ray and Kubernetes, and
    on a GPU that nvidia-smi does not describe, config.yaml keeps auto and the trainer's log records
    the choice. A resumed run keeps the type of its checkpoints. Under bfloat16 (autocast)
    parameters and Adam stay float32. float32 on a GPU multiplies in TensorFloat-32: 10 bits of a
    factor's mantissa, sums in float32 (docs/trainer.md)."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda. `launcher.gpus` says which GPU."""
    threads: int | None = Field(default=None, gt=0, le=MAX_THREADS)
    """Torch threads of the trainer's process; unset: torch decides."""
    ranks: int = Field(default=1, ge=1, le=1024)
    """Processes that train together, each on its share of the groups and, with GPUs, on its own
    GPU. They share the optimizer's state (docs/trainer.md)."""
    sharding: Literal["optimizer", "full"] = "optimizer"
    """State that ranks share. optimizer: its own; weights and gradients are whole on each. full:
    all three, for models that are too large for one device; ranks then compute micro-batches
    together (docs/trainer.md)."""
    rank_network: Annotated[str, Field(max_length=50), AfterValidator(network_of)] = LOOPBACK
    """Network that connects the ranks: an interface (eth0), or addresses (10.1.0.0/16) of which
    each rank's machine has one. lo: all ranks are on one machine. Any other needs
    `launcher.trusted_network: true`, since gloo and NCCL have neither keys nor encryption."""
    rank_seconds: float = Field(default=1800.0, gt=0, le=WEEK_SECONDS)
    """Longest wait of a rank for the others in the middle of a step, while they compute the rest of
    theirs. Then the trainer counts as lost."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass. true: all of a block, a third slower. selective:
    what is cheap to recompute, for a fifth of the memory."""
    optimizer_state: Literal["float32", "bfloat16", "int8"] = "float32"
    """Adam's moments: 8, 4 or 2 bytes a parameter. bfloat16 and int8 are rounded stochastically, so
    that small changes are not lost; int8 is a code with a scale for each 256 numbers."""
    optimizer_offload: bool = False
    """Keep Adam's moments in the host's memory; each step copies them to the device and back."""
    compile: bool = False
    """Compile each transformer block (torch.compile). The start takes longer, by a minute or more.
    On a CPU it replaces `fused`."""
    fused: bool = True
    """Compute float32 Llama-like models on a CPU in fused layers instead of transformers' own."""
    checkpoint_every: int = Field(default=50, gt=0, le=MAX_STEPS)
    """Steps of the run between checkpoints."""
    async_checkpoints: bool = True
    """Write checkpoints while training continues, from a copy in host memory: 12 bytes a parameter,
    divided by the ranks. false: no copy; training waits until each is written."""
    keep_checkpoints: int = Field(default=2, gt=0, le=MAX_STEPS)
    """Number of the newest checkpoints that are kept."""

    def for_device(
        self, capability: tuple[int, int] | None, *, engines_dtype: str | None = None
    ) -> Self:
        """Resolve `dtype: auto` for a device; a CPU has no CUDA `capability`.

        If the engines' weights are float32, so is an adapter's base model (`FINER_ENGINES`).
        """
        if self.dtype != "auto":
            return self
        low = capability is not None and capability >= BFLOAT16_CAPABILITY
        if self.lora.enabled and engines_dtype == "float32":
            low = False
        return self.model_copy(update={"dtype": "bfloat16" if low else "float32"})

    @property
    def compute_dtype(self) -> ComputeDtype:
        """`dtype` of settings that `for_device` has resolved; raises ValueError if it is `auto`."""
        if self.dtype == "auto":
            raise ValueError(
                "trainer.dtype is still auto where its value is needed: resolve it for the "
                "trainer's device first (TrainerConfig.for_device)"
            )
        return self.dtype

    @property
    def band_of_correction(self) -> tuple[float, float]:
        """`correction_band`, or the correction's default."""
        if self.correction_band is not None:
            return self.correction_band
        return (0.99, 1.01) if self.correction == "sequence_rejected" else (0.5, 5.0)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps between two published versions."""
        return self.ppo_epochs * self.minibatches

    @property
    def normalises_over_step(self) -> bool:
        """True if advantages are normalised over all tokens of a step."""
        when = entry_of(self.algorithm).normalises
        return when == "always" or (when == "std" and self.advantage_normalization == "std")

    @property
    def gathers_first(self) -> bool:
        """True if no gradient is computed before the step's last group has arrived.

        Several minibatches need all groups to choose the first one. PPO's clip and further passes
        need the mean of advantages that are normalised over the step (decision 0061).
        """
        clips = entry_of(self.algorithm).critic and self.proximal_policy == "behaviour"
        whole = self.normalises_over_step and (self.updates_per_step > 1 or clips)
        return self.minibatches > 1 or whole

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_algorithm(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {**entry_of(values.get("algorithm")).defaults, **values}

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, value: str) -> str:
        if value not in ("auto", "cpu", "cuda"):
            raise ValueError("must be auto, cpu or cuda; launcher.gpus says which GPUs a run uses")
        return value

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"both betas must lie in [0, 1), got {value}")
        return value

    @field_validator("correction_band")
    @classmethod
    def _band_holds_one(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not 0 <= value[0] <= 1 <= value[1] <= 1e6:
            raise ValueError(
                f"must be two ratios around 1, as in [0.5, 5]; {list(value)} is not in order, or "
                "would leave out tokens that are exactly on-policy"
            )
        return value

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        refuse_what_does_not_fit(self)
        if self.sharding == "full" and self.critic.passes > 1:
            raise ValueError(
                f"critic.passes: {self.critic.passes} works with sharding: optimizer only; set "
                "critic.passes to 1, or minibatches above 1, which fit policy and critic more often"
            )
        if self.critic.shared_trunk and self.router_loss_coefficient:
            raise ValueError(
                "router_loss_coefficient does not work with critic.shared_trunk: true; set one of "
                "them to its default"
            )
        has_parts = self.normalises_over_step and not self.gathers_first
        if self.gradient_checkpointing == "selective" and has_parts:
            raise ValueError(
                "gradient_checkpointing: selective saves tensors for one backward pass only, but "
                f"algorithm: {self.algorithm} needs two while groups arrive, to normalise "
                "advantages over the step; choose gradient_checkpointing: true or false"
            )
        return self

    @model_validator(mode="after")
    def _what_is_compiled_is_one_operation(self) -> Self:
        if self.compile and self.gradient_checkpointing == "selective":
            raise ValueError(
                "gradient_checkpointing: selective does not work with compile: true, which fuses "
                "the operations that it selects from; choose true or false"
            )
        if self.compile and self.sharding == "full":
            raise ValueError(
                "compile: true does not work with sharding: full, which gathers the weights of a "
                "block when it is computed; set one of them to its default"
            )
        if self.compile and self.router_loss_coefficient:
            raise ValueError(
                "router_loss_coefficient does not work with compile: true, which cannot record "
                "the routers' outputs; set one of them to its default"
            )
        refuse_conflicts(self)
        return self

    @model_validator(mode="after")
    def _the_reference_is_refreshed_one_way(self) -> Self:
        if self.reference_refresh_steps is not None and self.reference_decay is not None:
            raise ValueError(
                "reference_refresh_steps copies the policy, reference_decay averages it: choose one"
            )
        if self.schedule_steps is not None and self.schedule_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule_steps ({self.schedule_steps}) must be greater than "
                f"warmup_steps ({self.warmup_steps})"
            )
        if self.learning_rate_minimum > self.learning_rate:
            raise ValueError(
                f"learning_rate_minimum ({self.learning_rate_minimum}) is above learning_rate "
                f"({self.learning_rate})"
            )
        return self
