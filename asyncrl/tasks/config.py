"""Configuration of the task (`task:`) and of the model (`model:`)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_DIGITS = 6

_DATASET_ONLY = ("path", "subset", "evaluation_path", "id_field")


class ModelConfig(BaseModel):
    """Which model is trained."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    path: str = Field(default="builtin:arithmetic", min_length=1)
    """`builtin:arithmetic` (made on first use), a HF model directory with its tokenizer, or a
    hub id such as `Qwen/Qwen3-0.6B`."""


class TaskConfig(BaseModel):
    """Where prompts and answers come from."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Literal["arithmetic", "dataset"] = "arithmetic"
    """`arithmetic`: the built-in addition task. `dataset`: the user's own examples, see `path`."""

    path: str | None = None
    """Dataset only: a .jsonl or .parquet file, a folder saved by `datasets`, or a hub id."""
    subset: str | None = None
    """Dataset only: configuration name of a hub dataset."""
    split: str = "train"
    """Dataset only: split of a hub dataset or saved folder that is trained on."""
    prompt_field: str = "prompt"
    """Dataset only: field with the question, a text or a list of chat messages."""
    answer_field: str | None = "answer"
    """Dataset only: field with the reference answer; null when rewards need none."""
    id_field: str | None = None
    """Dataset only: field with a unique id; null numbers the examples."""

    train_size: int | None = Field(default=None, ge=1)
    """Training prompts used. null: 2048 for `arithmetic`, every example for `dataset`."""
    evaluation_path: str | None = None
    """Dataset only: a file or hub id with the held-out examples; null holds out some of `path`."""
    evaluation_split: str = "test"
    """Dataset only: split read from `evaluation_path` when that is not a file."""
    evaluation_size: int | None = Field(default=None, ge=0)
    """Held-out prompts: how many are split off, or at most used of `evaluation_path`. null: 512,
    but when split off a dataset at most a tenth of its examples."""

    digits: tuple[int, int] = (2, 3)
    """Arithmetic only: fewest and most digits of a summand. The built-in model knows 2 to 3."""

    chat_template: Literal["auto", "always", "never"] = "auto"
    """Whether prompts go through the tokenizer's chat template: when it has one, always (an error
    when it has none), or never."""
    system_prompt: str | None = None
    """Put before every prompt, as a system message or, without a template, as plain text."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt in tokens, the template included; null: no limit of the task's own."""
    too_long: Literal["refuse", "filter"] = "refuse"
    """What happens to longer prompts: the run is refused, or they are left out and counted."""

    @field_validator("digits")
    @classmethod
    def _digits_in_order(cls, digits: tuple[int, int]) -> tuple[int, int]:
        low, high = digits
        if not 1 <= low <= high <= MAX_DIGITS:
            raise ValueError(
                f"digits must be [fewest, most] with 1 <= fewest <= most <= {MAX_DIGITS}"
            )
        return digits

    @model_validator(mode="after")
    def _fields_fit_kind(self) -> Self:
        if self.kind == "dataset":
            if self.path is None:
                raise ValueError(
                    "kind: dataset needs a path: a .jsonl or .parquet file, a folder or a hub id"
                )
            return self
        given = [name for name in _DATASET_ONLY if getattr(self, name) is not None]
        if given:
            raise ValueError(
                f"{', '.join(given)} belong to kind: dataset; add `kind: dataset` or leave them out"
            )
        return self
