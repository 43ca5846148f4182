"""Configuration of the task (`task:`) and of the model (`model:`)."""

from datetime import date
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from asyncrl.plain_values import Arguments
from asyncrl.wire.transport.paths import MAX_TOKENS, FunctionName, InputPath

MAX_DIGITS = 6
"""Most digits in a summand of the built-in task."""

_OF_THE_RUN = {
    "messages": "the prompts and the environment make them",
    "conversation": "the prompts and the environment make it",
    "tools": "they are the environment's (environment.name)",
    "strftime_now": "set task.chat_template_date",
    "raise_exception": "templates refuse messages with it",
    "add_generation_prompt": "a prompt ends where a turn begins",
    "continue_final_message": "a prompt ends where a turn begins",
} | dict.fromkeys(
    (
        *("chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    ),
    "it is not a variable of templates",
)
"""Arguments of `apply_chat_template`, and why they cannot be variables."""


class ModelConfig(BaseModel):
    """The model to train."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    path: InputPath = Field(default="builtin:arithmetic", min_length=1)
    """`builtin:arithmetic` or `builtin:agent` (trained on first use), a HF model directory with its
    tokenizer, or a hub id such as `Qwen/Qwen3-0.6B`."""


class TaskConfig(BaseModel):
    """The source of prompts and answers."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Literal["arithmetic", "dataset"] = "arithmetic"
    """`arithmetic`: the built-in addition task. `dataset`: your own examples, see `path`."""

    path: InputPath | None = None
    """A .jsonl or .parquet file, a folder saved by `datasets`, or a hub id."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "train"
    """Training split of a hub dataset or saved folder."""
    prompt_field: str = "prompt"
    """Field with the prompt, which is a text or a list of chat messages."""
    answer_field: str | None = "answer"
    """Field with the reference answer; null if the rewards need none."""
    id_field: str | None = None
    """Field with a unique id; null: the examples are numbered."""

    map: FunctionName | None = None
    """Your own function, applied first to every example, `my.module:function` or
    `path/to/file.py:function`. It takes the example as a dict and returns a dict, or nothing to
    leave the example out. It must be deterministic, because a resumed run calls it again. Its time
    limit is 10 s per example."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """Handling of an unusable row: not JSON, without the fields, or with a duplicate
    id. `refuse`: the run does not start. `skip`: such rows are left out, counted and listed; the
    ids of the others do not change."""

    train_size: int | None = Field(default=None, ge=1, le=10**9)
    """Number of training prompts. null: 2048 for `arithmetic`, every example for `dataset`."""
    evaluation_path: InputPath | None = None
    """File or hub id of the held-out examples; null: some of `path` are held out."""
    evaluation_split: str = "test"
    """Split of `evaluation_path`."""
    evaluation_size: int | None = Field(default=None, ge=0, le=10**9)
    """Number of held-out prompts: split off `path`, or the maximum taken from `evaluation_path`.
    null: 512, but at most a tenth of the examples where they are split off."""

    digits: tuple[int, int] = (2, 3)
    """Fewest and most digits of a summand. The built-in model learned 2 to 3."""

    chat_template: Literal["auto", "always", "never"] = "auto"
    """Use of the tokenizer's chat template for prompts. `auto`: if it has one. `always`: a
    tokenizer without one is an error. `never`."""
    chat_template_kwargs: Arguments = {}
    """Variables of the chat template, such as `{enable_thinking: false}`, for all prompts and the
    turns of environments. A variable that the template does not use is an error."""
    chat_template_date: date | None = None
    """The date for chat templates that use today's date (`strftime_now`). null: the day on which
    the run began, also when it is resumed."""
    system_prompt: str | None = None
    """Put before every prompt: as a system message, or as plain text without a chat template."""
    max_prompt_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Longest prompt in tokens, chat template included; null: no limit."""
    too_long: Literal["refuse", "filter"] = "refuse"
    """Handling of longer prompts. `refuse`: nothing starts. `filter`: leave out and count them."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables_are_the_users(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in given:
            if not name.isidentifier():
                raise ValueError(f"{name!r} cannot be the name of a variable")
            if name in _OF_THE_RUN:
                raise ValueError(f"{name} cannot be set here: {_OF_THE_RUN[name]}")
        return given

    @field_validator("digits")
    @classmethod
    def _digits_in_order(cls, digits: tuple[int, int]) -> tuple[int, int]:
        low, high = digits
        if not 1 <= low <= high <= MAX_DIGITS:
            raise ValueError(f"digits must be [fewest, most], 1 <= fewest <= most <= {MAX_DIGITS}")
        return digits

    @model_validator(mode="after")
    def _fields_fit_kind(self) -> Self:
        if self.kind == "dataset" and self.path is None:
            raise ValueError("kind: dataset needs a path: a .jsonl or .parquet file, folder or id")
        return self
