"""The settings of held-out evaluation."""

import re
from dataclasses import replace
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from asyncrl.engine.protocol import SamplingParams
from asyncrl.wire.records.evaluations import HELD_OUT
from asyncrl.wire.transport.paths import MAX_STEPS, WEEK_SECONDS, FunctionName, InputPath

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class EvaluationSetConfig(BaseModel):
    """One named held-out set. Omitted settings are those of `task`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    path: InputPath = Field(min_length=1)
    """A .jsonl or .parquet file, a folder saved by `datasets`, or a hub id."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "test"
    """Split of a hub dataset or saved folder."""
    prompt_field: str | None = None
    """Field with the prompt; null: `task.prompt_field`."""
    answer_field: str | None = None
    """Field with the reference answer; null: `task.answer_field`."""
    id_field: str | None = None
    """Field with a unique id; null: the examples are numbered."""
    map: FunctionName | None = None
    """A function for each example, like `task.map`, which does not apply to these sets."""
    prompts: int | None = Field(default=None, ge=1, le=10**6)
    """Number of prompts, from the start of the set; null: `evaluation.prompts`."""
    samples: int | None = Field(default=None, ge=1, le=10**4)
    """Samples per prompt; null: `evaluation.samples`."""


class EvaluationConfig(BaseModel):
    """Evaluation on held-out prompts before, during and after training."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    prompts: int = Field(default=256, ge=1, le=10**6)
    """Number of held-out prompts, taken from the start of the evaluation set."""
    samples: int = Field(default=1, ge=1, le=10**4)
    """Samples per prompt. From 2 on, pass@k is reported as well."""
    temperature: float | None = Field(default=None, ge=0, le=100)
    """Temperature of held-out samples; 0: greedy, the most probable token each time, so that
    further samples of a prompt are the same. null: `sampling.temperature`. Other settings of
    `sampling` hold for them, too."""
    threshold: float = Field(default=0.5, ge=-1e6, le=1e6)
    """A sample counts as correct if its reward is above this."""
    at_start: bool = True
    """Evaluate the model before training. false: later accuracies have none to be compared with."""
    every: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Evaluate the policy of every n-th step while the run trains (docs/evaluation.md). null: only
    before (`at_start`) and after training."""
    hold_seconds: float = Field(default=60.0, ge=0, le=WEEK_SECONDS)
    """Longest time for which a generator keeps the weights of an `every` evaluation when newer ones
    are available and held-out samples are unfinished; then the evaluation is abandoned."""
    sets: dict[str, EvaluationSetConfig] = {}
    """Further held-out sets by name, evaluated with the task's own, which is named `held_out`."""
    keep_best: bool = False
    """Keep the checkpoint with the best accuracy, whatever `trainer.keep_checkpoints` says. Needs
    `every`, a multiple of `trainer.checkpoint_every`."""
    best_of: str | None = None
    """The set whose accuracy decides which checkpoint is best; null: `held_out`, or the first of
    `sets` if the task does not have held-out prompts."""
    max_unscored_share: float = Field(default=0.02, ge=0, lt=1)
    """Largest share of a set's samples that may be left out because their reward failed for a
    reason unrelated to the policy, such as a reward server that is down. Above it, the evaluation
    is incomplete: it does not have an accuracy."""
    timeout_seconds: float = Field(default=600.0, gt=0, le=WEEK_SECONDS)
    """Longest wait for a sample of an evaluation before or after training, or of `asyncrl eval`."""

    def sampling_of(self, sampling: SamplingParams) -> SamplingParams:
        """Return the settings of held-out samples from those of training."""
        if self.temperature is None:
            return sampling
        if self.temperature == 0:
            return replace(sampling, temperature=1.0, top_k=1)
        return replace(sampling, temperature=self.temperature)

    @field_validator("temperature")
    @classmethod
    def _engines_can(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < 0.01:
            raise ValueError(f"{value:g} must be at least 0.01, or 0 for greedy answers")
        return value

    @field_validator("sets")
    @classmethod
    def _names_fit(cls, sets: dict[str, EvaluationSetConfig]) -> dict[str, EvaluationSetConfig]:
        for name in sets:
            if name == HELD_OUT:
                raise ValueError(f"{HELD_OUT} names the task's held-out prompts; choose another")
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} cannot name a set: letters, digits, dot, dash and underscore only, "
                    "at most 64, beginning with a letter or digit"
                )
        return sets

    @model_validator(mode="after")
    def _best_is_known(self) -> Self:
        if self.keep_best and self.every is None:
            raise ValueError("keep_best: true needs evaluation.every, for accuracies to compare")
        names = [HELD_OUT, *self.sets]
        if self.best_of is not None and self.best_of not in names:
            sets = ", ".join(names)
            raise ValueError(f"best_of: there is no set {self.best_of!r}; the sets are {sets}")
        return self
