"""Configuration of the run itself (`run:`)."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from asyncrl.monitoring.config import unquoted_off
from asyncrl.mutability import AT_A_STEP
from asyncrl.suggestions import nearest, shortened
from asyncrl.wire.transport.paths import MAX_STEPS, LocalPath

Value = bool | int | float | str | None
Changes = dict[Annotated[int, Field(ge=0, le=MAX_STEPS)], dict[str, Value]]
"""Maps a step to settings, `section.key`, that hold from this step on."""


def refuse_unknown(changes: Changes) -> None:
    """Raise ValueError for a setting that cannot change at a step."""
    for step, settings in changes.items():
        for key in settings:
            if key not in AT_A_STEP:
                raise ValueError(
                    f"run.changes, step {step}: {shortened(key)!r} cannot change at a step."
                    f"{nearest(key, AT_A_STEP)}"
                )


def _dotted(settings: Mapping[Any, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        key = f"{outer}{name}"
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{key}.")
        elif isinstance(value, list | tuple):
            raise ValueError(f"{shortened(key)} must be one value, not a list")
        else:
            yield key, value


def _without_sections(changes: object) -> object:
    """Write settings in sections as `section.key`. Raises ValueError for a setting given twice."""
    if not isinstance(changes, Mapping):
        return changes
    found = dict(changes)
    for step, settings in changes.items():
        if isinstance(settings, Mapping):
            found[step] = {}
            for key, value in _dotted(settings):
                if key in found[step]:
                    raise ValueError(f"step {step}: {shortened(key)} is there twice; keep one")
                found[step][key] = value
    return found


OnWrongPolicy = Literal["stop", "warn"]


class RunSection(BaseModel):
    """Name, length, seed and folder of the run."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the run and of its folder: letters, digits, dot, dash, underscore."""
    steps: int = Field(default=100, ge=1, le=MAX_STEPS)
    """Steps of the run. Each is one optimizer step, or several with `trainer.ppo_epochs` or
    `trainer.minibatches`."""
    epochs: float | None = Field(default=None, gt=0, le=MAX_STEPS)
    """The length of the run as passes over the training prompts, in place of `steps`: 0.5, 3. The
    steps are counted when the run starts, rounded up, and its config.yaml has them as `steps`.
    Groups that `scheduler.dynamic_sampling` leaves out are drawn besides."""
    seed: int = Field(default=0, ge=-(10**18), le=10**18)
    """Seed of the data order, the sampling and the trainer. Data order and sampling also depend on
    the weights that the run starts from, so a run from another run's model draws anew. The split
    into training and held-out examples depends on the seed only."""
    directory: LocalPath = "runs"
    """Folder in which the run's own folder is created. `~` and `${NAME}` are expanded."""
    repeatable: bool = False
    """Make a second run with the same settings on the same machine train on the same samples and
    end with the same weights, bit for bit. Works for synchronous training
    (`scheduler.on_update: keep`, `max_off_policy_steps: 0`) with the torch engine on a CPU in
    float32. The engine is then slower when few rows decode, and the trainer takes groups in the
    order of their numbers (docs/operate.md)."""
    on_wrong_policy: OnWrongPolicy = "stop"
    """Reaction to a generator that samples from a policy other than the trainer's for that version:
    other weights, another temperature, another tokenizer, KV of older weights. `stop`: the run ends
    before it trains on such tokens. `warn`: it continues, with warnings in the terminal,
    metrics.jsonl, result.json and the report."""
    changes: Annotated[Changes, BeforeValidator(_without_sections)] = {}
    """Settings that change during the run, by the first step that has them: `{100:
    {trainer.learning_rate: 1.0e-6}}`, or in sections, `{100: {trainer: {learning_rate: 1.0e-6}}}`.
    `asyncrl set` adds to them. Allowed are
    trainer.learning_rate, trainer.checkpoint_every, scheduler.max_off_policy_steps,
    scheduler.max_runahead_groups, scheduler.on_update and scheduler.sample_deadline_seconds."""
    print_samples: int = Field(default=0, ge=0, le=64)
    """Number of samples of each step that are printed on the terminal, as a table with their
    rewards. They are chosen by their number, whatever their length."""
    log_samples: Annotated[Literal["off", "jsonl"], BeforeValidator(unquoted_off)] = "off"
    """`jsonl`: write every trained sample with its text to RUN/samples/000001.jsonl and following
    files of up to 64 MB."""
    log_samples_mb: int = Field(default=10_000, ge=1, le=10**9)
    """Maximum size of RUN/samples in megabytes. Beyond it the oldest file is removed."""
    log_sample_tokens: bool = False
    """Add the token ids of prompt and response to each logged sample, and for each response token
    its provenance and the log-probability with which it was drawn."""

    @field_validator("log_samples", mode="before")
    @classmethod
    def _known_log(cls, value: object) -> object:
        if value == "parquet":
            raise ValueError(
                "parquet is not written, because a file without its end cannot be read after a "
                "crash; use jsonl, and convert RUN/samples/*.jsonl with pandas or datasets"
            )
        return value
