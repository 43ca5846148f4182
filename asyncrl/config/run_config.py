"""The whole configuration of a run, composed of each package's own `Config`.

It is read from one YAML file and dotted overrides (`--set engine.kind=vllm`). Unknown keys and
impossible combinations are refused with the path of the key and the remedy. A field's docstring is
its documentation for users: see `asyncrl.config.reference`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from asyncrl.cache.config import CacheConfig
from asyncrl.config.errors import mistakes
from asyncrl.config.former import without_former
from asyncrl.config.launcher import LauncherConfig
from asyncrl.config.run_section import RunSection, refuse_unknown
from asyncrl.config.yaml_text import dump_yaml, parse_yaml, read_yaml
from asyncrl.engine.config import EngineConfig, SamplingConfig
from asyncrl.environments.config import (
    EnvironmentConfig,
    refuse_contradictions,
    with_default_functions,
)
from asyncrl.environments.protocol import LABEL
from asyncrl.errors import ConfigError
from asyncrl.monitoring.config import MAX_PORT, MonitoringConfig
from asyncrl.rewards.config import RewardConfig
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.suggestions import nearest, shortened
from asyncrl.tasks.config import ModelConfig, TaskConfig
from asyncrl.tasks.evaluation_config import EvaluationConfig
from asyncrl.tasks.sft_config import SftConfig
from asyncrl.trainer.base.algorithm_registry import entry_of, is_own
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.rank_network import is_loopback
from asyncrl.wire.transport.paths import FOLDER


def clock_dependencies(config: "RunConfig") -> Iterator[str]:
    """Yield each setting that makes a run depend on the clock: the setting, why, and a remedy."""
    scheduler, engine, trainer = config.scheduler, config.engine, config.trainer
    if scheduler.on_update == "verify":
        yield (
            "scheduler.on_update: verify, because the point at which new weights interrupt a "
            "sample depends on the clock; set scheduler.on_update: keep"
        )
    if scheduler.max_off_policy_steps:
        yield (
            f"scheduler.max_off_policy_steps: {scheduler.max_off_policy_steps}, because the policy "
            "version of each token depends on the clock; set scheduler.max_off_policy_steps: 0"
        )
    if scheduler.sample_deadline_seconds is not None:
        yield (
            f"scheduler.sample_deadline_seconds: {scheduler.sample_deadline_seconds}, because the "
            "clock decides which samples are cut off; set it to null"
        )
    if config.cache.reuse == "lenient":
        yield (
            "cache.reuse: lenient, because a sample begins with tokens that its generator happens "
            "to have; set cache.reuse: drafts"
        )
    if trainer.mix_groups:
        yield (
            "trainer.mix_groups: true, because the clock decides which groups share a forward "
            "pass; set trainer.mix_groups: false"
        )
    for kind in dict.fromkeys(engine.kinds) or (engine.kind,):
        if kind != "torch":
            yield (
                f"engine.kind: {kind}, because its log-probabilities depend on what else is in "
                "the batch; set engine.kind: torch"
            )
    yield from _environments(config.environment)
    if trainer.ranks > 1:
        yield (
            f"trainer.ranks: {trainer.ranks}, because the order in which groups finish decides "
            "which rank gets them, and so the rounding of their sum; set trainer.ranks: 1"
        )
    for key, value, works in (
        ("engine.device", engine.device, "cpu"),
        ("engine.dtype", engine.dtype, "float32"),
        ("trainer.device", trainer.device, "cpu"),
    ):
        if value not in ("auto", works):
            yield f"{key}: {value}, because only a CPU in float32 repeats; set {key}: {works}"


def _environments(environment: EnvironmentConfig) -> Iterator[str]:
    """Yield environment settings whose time or state is not the run's."""
    name = environment.name or ""
    if name.startswith("agent:"):
        yield (
            f"environment.name: {name}, because a program runs by its own clock, which decides "
            "what it asks and in which order; use an environment with `reset` and `step`"
        )
    if name.startswith("openenv:") and environment.args.get("replay") != "deterministic":
        yield (
            f"environment.name: {name}, because the state of its server is not the run's; if the "
            "server answers the same seed and actions with the same, say so with "
            "environment.args.replay: deterministic"
        )


class RunConfig(BaseModel):
    """The configuration of a run: one field per section."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    run: RunSection = RunSection()
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    rewards: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sft: SftConfig = SftConfig()
    launcher: LauncherConfig = LauncherConfig()
    monitoring: MonitoringConfig = MonitoringConfig()

    @model_validator(mode="before")
    @classmethod
    def _an_environment_has_its_own_reward(cls, values: Any) -> Any:
        return with_default_functions(values)

    @model_validator(mode="after")
    def _the_environment_fits(self) -> Self:
        refuse_contradictions(self.environment, self.rewards, self.cache, self.sampling)
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        if self.sampling.max_tokens >= self.engine.max_model_len:
            raise ValueError(
                f"sampling.max_tokens ({self.sampling.max_tokens}) leaves no room for a prompt in "
                f"engine.max_model_len ({self.engine.max_model_len}); raise engine.max_model_len"
            )
        return self

    @model_validator(mode="after")
    def _the_overlong_buffer_fits(self) -> Self:
        if self.trainer.overlong_buffer > self.sampling.max_tokens:
            raise ValueError(
                f"trainer.overlong_buffer ({self.trainer.overlong_buffer}) is longer than any "
                f"response: sampling.max_tokens is {self.sampling.max_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _verification_has_stored_probabilities(self) -> Self:
        if self.scheduler.on_update == "verify" and self.engine.top_k_logprobs == 0:
            raise ValueError(
                "engine.top_k_logprobs: 0 does not work with scheduler.on_update: verify, which "
                "accepts tokens by the stored top K of the distributions that they were drawn "
                "from; it must be at least 1 (8 is usual)"
            )
        return self

    @model_validator(mode="after")
    def _groups_are_large_enough(self) -> Self:
        least = entry_of(self.trainer.algorithm).smallest_group
        if self.scheduler.group_size < least:
            raise ValueError(
                f"scheduler.group_size: {self.scheduler.group_size} leaves "
                f"trainer.algorithm: {self.trainer.algorithm} nothing to learn from: a sample is "
                f"compared with the others of its group. It must be at least {least} (8 is usual)"
            )
        return self

    @model_validator(mode="after")
    def _minibatches_divide_the_step(self) -> Self:
        groups, trainer = self.scheduler.groups_per_step, self.trainer
        for key, count in (("", trainer.minibatches), ("critic.", trainer.critic.minibatches)):
            if groups % count:
                fitting = [one for one in range(1, groups + 1) if groups % one == 0]
                raise ValueError(
                    f"trainer.{key}minibatches: {count} does not divide the step: "
                    f"scheduler.groups_per_step is {groups}. It must be one of "
                    f"{', '.join(map(str, fitting))}"
                )
        return self

    @model_validator(mode="after")
    def _ranks_outwait_a_disk(self) -> Self:
        ranks, disk = self.trainer.rank_seconds, self.launcher.checkpoint_seconds
        if self.trainer.ranks > 1 and ranks <= disk:
            raise ValueError(
                f"trainer.rank_seconds: {ranks:g} must be longer than launcher.checkpoint_seconds "
                f"({disk:g}): rank 0 may wait that long for the disk, and the others for it"
            )
        return self

    @property
    def processes_at_start(self) -> int:
        """Maximum number of initial processes besides the controller, relays included."""
        count = self.trainer.ranks + self.launcher.generators
        return count if self.launcher.kind == "local" else 2 * count

    @model_validator(mode="after")
    def _groups_without_signal_teach_nothing(self) -> Self:
        algorithm = self.trainer.algorithm
        if is_own(algorithm):
            return self  # what its class says is asked before a run starts
        if self.scheduler.dynamic_sampling.enabled and entry_of(algorithm).smallest_group < 2:
            raise ValueError(
                "scheduler.dynamic_sampling.enabled leaves out groups whose rewards are all equal, "
                f"but trainer.algorithm: {algorithm} does not compare a sample with the others of "
                "its group, so it learns from such groups too. Disable it, or choose an algorithm "
                "that compares: dapo, grpo, rloo"
            )
        return self

    @model_validator(mode="after")
    def _every_process_has_a_port(self) -> Self:
        base, launcher = self.monitoring.port, self.launcher
        # The trainer, the generators and their replacements follow the controller.
        last = self.processes_at_start + self.trainer.ranks * launcher.max_restarts
        if self.monitoring.metrics and base and base + last > MAX_PORT:
            raise ValueError(
                f"monitoring.port: {base} leaves no port for every process of the run: "
                f"the trainer, {launcher.generators} generator(s), relays between machines and up "
                f"to {launcher.max_restarts} restart(s) take the {last} ports after it. It must be "
                f"at most {MAX_PORT - last}, or 0 for any free ports"
            )
        return self

    @model_validator(mode="after")
    def _ranks_speak_where_nobody_else_does(self) -> Self:
        network, launcher = self.trainer.rank_network, self.launcher
        if self.trainer.ranks == 1 or is_loopback(network):
            return self
        if launcher.kind == "local":
            raise ValueError(
                f"trainer.rank_network: {network} is for ranks on several machines; with "
                "launcher.kind: local all are on this one: leave it out"
            )
        if not launcher.trusted_network:
            raise ValueError(
                f"trainer.rank_network: {network} lets the trainer's ranks listen at sockets that "
                "have neither keys nor encryption, because gloo and NCCL have none: anyone "
                "who reaches them can read gradients and weights and disturb the run. If you trust "
                "everyone in that network, say so with launcher.trusted_network: true; otherwise "
                "keep all ranks on one machine, without trainer.rank_network"
            )
        return self

    @model_validator(mode="after")
    def _repeatable_runs_do_not_depend_on_the_clock(self) -> Self:
        if self.run.repeatable and (found := list(clock_dependencies(self))):
            listed = ". Nor does it work with ".join(found)
            raise ValueError(f"run.repeatable: true does not work with {listed}")
        return self

    @model_validator(mode="after")
    def _what_is_evaluated_has_a_checkpoint(self) -> Self:
        every, saved = self.evaluation.every, self.trainer.checkpoint_every
        if self.evaluation.keep_best and every is not None and every % saved:
            raise ValueError(
                f"evaluation.keep_best: true needs a checkpoint of every policy that is evaluated, "
                f"and evaluation.every ({every}) is not a multiple of trainer.checkpoint_every "
                f"({saved})"
            )
        return self

    @model_validator(mode="after")
    def _every_change_leaves_a_whole_configuration(self) -> Self:
        refuse_unknown(self.run.changes)
        for step in sorted(self.run.changes):
            values = self.model_dump(mode="json") | self._changed_sections(step)
            values["run"]["changes"] = {}
            try:
                RunConfig.model_validate(values)
            except ValidationError as error:
                wrong = "; ".join(mistakes({}, error, RunConfig))
                raise ValueError(f"run.changes, step {step}: {wrong}") from error
        return self

    def with_values(self, section: str, **values: object) -> Self:
        """Return a copy with other values in a section; they are not validated."""
        part = getattr(self, section).model_copy(update=values)
        return self.model_copy(update={section: part})

    def at(self, step: int) -> Self:
        """Return the configuration of a step, with the changes (`run.changes`) up to it only."""
        if not self.run.changes:
            return self
        parts: dict[str, BaseModel] = {"run": self.run.model_copy(update={"changes": {}})}
        for name, values in self._changed_sections(step).items():
            parts[name] = type(getattr(self, name)).model_validate(values)
        return self.model_copy(update=parts)  # other sections are shared

    def _changed_sections(self, step: int) -> dict[str, dict[str, Any]]:
        """Return the values of each section that `run.changes` up to a step (from 0) change."""
        sections: dict[str, dict[str, Any]] = {}
        for first, settings in sorted(self.run.changes.items()):
            for key, value in settings.items() if first <= step else ():
                name, setting = key.split(".")
                if name not in sections:
                    sections[name] = getattr(self, name).model_dump(mode="json")
                sections[name][setting] = value
        return sections

    @property
    def reward_labels(self) -> tuple[str, ...]:
        """Labels of the reward terms: the functions', and `environment` if there is one."""
        labels = self.rewards.labels
        return (*labels, LABEL) if self.environment.name else labels

    @property
    def samples_follow_policy(self) -> bool:
        """True if every sample follows the policies of its versions up to its last token."""
        lenient, deadline = self.cache.reuse == "lenient", self.scheduler.sample_deadline_seconds
        return not lenient and deadline is None

    @property
    def engines(self) -> list[EngineConfig]:
        """The generators' engine configurations, one for each kind."""
        return self.engine.of_fleet(self.launcher.generators)

    @property
    def engine_kinds(self) -> str:
        """The engine kinds for display: `torch`, or `torch+vllm` for a mixed fleet."""
        return "+".join(engine.kind for engine in self.engines)

    @property
    def directory(self) -> Path:
        """The run's folder."""
        return Path(self.run.directory) / self.run.name


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `key.path=value` overrides and validate the result.

    Without a file the overrides apply to the defaults. Raises ConfigError if the file is missing or
    not a mapping, a key is unknown or duplicate, or a value is impossible.
    """
    values = {} if path is None else _read(path)
    for override in overrides:
        _apply(values, override)
    if path is None:
        return parse_config(values, source="the command line")
    return parse_config(values, source=str(path), folder=path.parent)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = read_yaml(path)
    except FileNotFoundError as error:
        near = nearest(path.name, [p.name for p in path.parent.glob("*.yaml")])
        raise ConfigError(f"no configuration file at {path}.{near}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a mapping of sections (run:, engine:, ...) to settings")
    return values


def parse_config(
    values: Mapping[str, Any], *, source: str, folder: Path | None = None
) -> RunConfig:
    """Validate plain values. Errors (ConfigError) refer to them as `source`.

    A section that is null counts as empty: all its settings are commented out. Files that are not
    in the current directory are looked for in `folder`, that of the configuration file.
    """
    values = {
        key: {} if value is None and key in RunConfig.model_fields else value
        for key, value in without_former(values).items()
    }
    try:
        config = RunConfig.model_validate(values, context={FOLDER: folder})
        refused: ValidationError | None = None
    except ValidationError as error:
        refused = error
    lines = mistakes(values, refused, RunConfig)
    if lines:
        listed = "\n".join(f"  {line}" for line in lines)
        raise ConfigError(f"{source} does not describe a run:\n{listed}") from refused
    return config


def dump_config(config: RunConfig) -> str:
    """Return the whole configuration as YAML with defaults; `load_config` reads it back."""
    return dump_yaml(config.model_dump(mode="json"))


def _apply(values: dict[str, Any], override: str) -> None:
    shown = f"--set {shortened(override)!r}"
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"{shown}: write it as key.path=value")
    value = parse_yaml(text, source=f"{shown}: the value")
    *sections, last = key.strip().split(".")
    place: Any = values
    for section in sections:
        at = _place_of(section, place, shown)
        if isinstance(place, list):
            place += [{}] if at == len(place) else []
        elif place.get(at) is None:
            place[at] = {}
        place = place[at]
        if not isinstance(place, dict | list):
            raise ConfigError(f"{shown}: {shortened(section)} is a value, not a section")
    at = _place_of(last, place, shown)
    if isinstance(place, list):
        place[at : at + 1] = [value]
    else:
        place[at] = value
    length = {"run.steps": "epochs", "run.epochs": "steps"}.get(key.strip())
    if length is not None and value is not None:
        place.pop(length, None)  # the file's: an order of the command line takes its place


def _place_of(part: str, place: Any, shown: str) -> Any:
    """Return a part of a key as the key of a section, or as the place in a list."""
    if not isinstance(place, list):
        return part
    if part.isdecimal() and len(part) < 9 and int(part) <= len(place):
        return int(part)
    raise ConfigError(
        f"{shown}: {shortened(part)} is not an index of a list of {len(place):,}: entries are "
        "numbered from 0, and the next number appends one"
    )
