"""The settings of a critic, the value model of `algorithm: ppo`. Light to import: no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from asyncrl.wire.transport.paths import MAX_STEPS


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
