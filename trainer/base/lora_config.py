"""The settings of LoRA. Light to import: no torch."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

ALL_LINEAR = "all-linear"
FINER_ENGINES = (
    "trainer.lora with trainer.dtype: bfloat16 holds the model in bfloat16, and the engines in "
    "float32: they would sample from another policy. Set engine.dtype: bfloat16, or trainer.dtype: "
    "float32"
)
"""Refusal of a run whose engines hold the base model more precisely than the trainer."""


class LoraConfig(BaseModel):
    """LoRA (arXiv 2106.09685): a matrix W is used as W + alpha / rank * B A; only A and B train.

    Needs `pip install 'asyncrl[lora]'`. docs/trainer.md says what is published and saved.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    rank: int = Field(default=0, ge=0, le=1024)
    """Rows of A and columns of B. 0: no LoRA, all weights are trained."""
    alpha: float = Field(default=32.0, gt=0, le=1e4)
    """The adapter's output is multiplied by alpha / rank."""
    targets: str | tuple[str, ...] = ALL_LINEAR
    """Layers that get an adapter: `all-linear` (all but the head and the embeddings), or their
    names in each block, as in [q_proj, v_proj]."""
    adapter: str | None = None
    """PEFT directory of an adapter to start from, with this rank, alpha and these targets. It is
    also the KL's reference. Unset: A is random and B is 0, so the first policy is the model."""
    serve: Literal["merged", "adapter"] = "merged"
    """Engines' use of the adapter. merged: each adds it to its copy of the weights, in the engine's
    data type. adapter: vLLM keeps it separate and computes both branches, which does not round
    small adapters away but is slower."""
    dropout: float = 0.0
    """Refused unless 0: with dropout, the trainer's policy is not the one that engines sample."""
    modules_to_save: tuple[str, ...] = ()
    """Refused unless empty: layers that would be trained whole next to the adapter."""

    @property
    def enabled(self) -> bool:
        """True if an adapter is trained."""
        return self.rank > 0

    @property
    def scaling(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value != 0:
            raise ValueError(
                f"{value} is not possible: the trainer's policy would differ from the one that "
                "engines sample from. Set it to 0"
            )
        return value

    @field_validator("modules_to_save")
    @classmethod
    def _nothing_is_trained_whole(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value:
            raise ValueError(
                f"{', '.join(value)}: only adapters of linear layers are trained and published. "
                "Leave it out, or train all weights (trainer.lora.rank: 0)"
            )
        return value

    @field_validator("targets")
    @classmethod
    def _targets_are_names(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(value, str) and value != ALL_LINEAR:
            raise ValueError(f"must be {ALL_LINEAR} or a list of names, as in [q_proj, v_proj]")
        if not value or not all(value):
            raise ValueError(f"names no layer; it must be {ALL_LINEAR} or a list of names")
        return value


def refuse_conflicts(trainer: Any) -> None:
    """Raise ValueError if other settings of a `TrainerConfig` conflict with its `lora`."""
    if not trainer.lora.enabled:
        return
    for name in ("reference_refresh_steps", "reference_decay"):
        if getattr(trainer, name) is not None:
            raise ValueError(
                f"{name} does not work with lora: the reference is the initial policy, without a "
                "copy of the model. Leave it out"
            )
    if trainer.sharding == "full":
        raise ValueError(
            "sharding: full does not work with lora, whose layers are not divided; leave it out: "
            "an adapter's gradients and moments are small"
        )
    if trainer.compile:
        raise ValueError(
            "compile: true does not work with lora, whose layers are not compiled; leave it out"
        )
    if trainer.critic.shared_trunk:
        raise ValueError(
            "critic.shared_trunk: true does not work with lora, whose adapter is the policy's "
            "alone; set it to false"
        )
