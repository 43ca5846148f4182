"""The settings of supervised fine-tuning (`sft:`)."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from asyncrl.wire.transport.paths import MAX_STEPS, MAX_TOKENS

ALGORITHM = "asyncrl.sft.training:Supervised"
"""`trainer.algorithm` of a supervised run, which its config.yaml and checkpoints record."""


class SftConfig(BaseModel):
    """Supervised fine-tuning, by `asyncrl sft`.

    It reads and splits the rows of `task`, and trains as `trainer` says, but for what stands here.
    `asyncrl run` does not read this section, so one file can describe both.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    learn: Literal["response", "assistant", "text"] = "response"
    """Tokens that are learned. `response`: those of `response_field`, after the prompt in
    `task.prompt_field`. `assistant`: the messages of the role assistant in the conversation in
    `task.prompt_field`. `text`: the plain text in `task.prompt_field`."""
    response_field: str = "response"
    """Field with the response: a text, or the chat messages that follow the prompt's."""
    batch_size: int = Field(default=32, ge=1, le=10**6)
    """Examples per optimizer step. Each learned token of a step has the same weight."""
    epochs: float | None = Field(default=None, gt=0, le=10**6)
    """Passes over the training examples. null: 1, or as many as `steps` make."""
    steps: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Optimizer steps, in place of `epochs`."""
    max_tokens: int | None = Field(default=None, ge=2, le=MAX_TOKENS)
    """Longest example in tokens, prompt included, if the model reads as many."""
    too_long: Literal["refuse", "filter", "truncate"] = "refuse"
    """Handling of longer examples. `refuse`: nothing starts. `filter`: they are left out and
    counted. `truncate`: their end is cut off."""
    learning_rate: float = Field(default=2e-5, gt=0, le=1)
    """Peak learning rate, in place of `trainer.learning_rate`."""
    learning_rate_schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Shape after warm-up, down to 0 at the last step."""
    warmup_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Optimizer steps over which the learning rate rises linearly."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps both say how long to train; give one of them")
        return self

    def steps_of(self, examples: int) -> int:
        """Return the number of steps with this many training examples.

        >>> SftConfig(batch_size=8, epochs=2).steps_of(20), SftConfig(steps=3).steps_of(20)
        (5, 3)
        """
        epochs = 1.0 if self.epochs is None else self.epochs
        return self.steps or max(1, round(epochs * examples / self.batch_size))
