"""What a paced run is: device, model, sizes, mode and scale, and its costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from asyncrl.simulation.cost import DEVICES, MODELS, Cost, Device, Model, roofline
from benchmarks.paced.model import Lengths
from benchmarks.paced.pace import Scale

GENERATORS = (1, 2, 4)
FULL_STEPS = 28


def quick() -> list[Paced]:
    """Every mode with one generator, and the decisive modes with two and four."""
    runs = [Paced(mode) for mode in MODES]
    return runs + [
        Paced(mode, generators) for generators in GENERATORS[1:] for mode in (SYNC, KEEP_4, VERIFY)
    ]


def smoke() -> list[Paced]:
    scale = Scale(250.0, 2.0, 1.0)
    return [Paced(VERIFY, scale=scale, slots=8, fills=2, steps=6, first=2, last=1)]


def full() -> list[Paced]:
    """More steps; also other costs of training, another device and model, scale and dilation."""
    longer = [
        replace(Paced(mode, generators), steps=FULL_STEPS)
        for generators in GENERATORS
        for mode in MODES
    ]
    one = longer[: len(MODES)]
    base = one[0].scale
    return [
        *longer,
        *(replace(paced, training=share) for share in (2.0, 0.5) for paced in one),
        *(replace(paced, machine=Machine("h100", "1.5b")) for paced in one),
        *(replace(paced, scale=replace(base, lengths=base.lengths / 2)) for paced in one),
        *(replace(paced, scale=replace(base, dilation=1.0)) for paced in one),
    ]


CONFIG = Path(__file__).with_name("paced.yaml")
GROUP_SIZE = 8
PROMPT_TOKENS = 14.0
"""About the mean of the task's prompts."""
NETWORK_BYTES = 50e9
"""Bytes per second in which weights arrive at a generator: 400 Gbit/s."""
INSTALL_SECONDS = 0.02
"""Seconds of an installation beyond the copy within the device's memory."""

SYNC, KEEP_1, KEEP_4, VERIFY = "sync", "keep(1)", "keep(4)", "verify"
RUNAHEAD_STEPS = 3
"""Whole steps that `verify` may run ahead."""
MODES: Mapping[str, tuple[str, int]] = {
    SYNC: ("keep", 0),
    KEEP_1: ("keep", 1),
    KEEP_4: ("keep", 4),
    VERIFY: ("verify", 0),
}
"""By name: (`on_update`, `max_off_policy_steps`)."""


@dataclass(frozen=True)
class Machine:
    device: str = "h200"
    model: str = "7b"

    @property
    def parts(self) -> tuple[Model, Device]:
        return MODELS[self.model], DEVICES[self.device]

    @property
    def name(self) -> str:
        model, device = self.parts
        return f"{device.name}, {model.name}"


@dataclass(frozen=True)
class Paced:
    mode: str = VERIFY
    generators: int = 1
    training: float = 1.0
    """Cost of training over that of generation."""
    machine: Machine = field(default_factory=Machine)
    scale: Scale = field(default_factory=Scale)
    slots: int = 16
    fills: int = 4
    """How often the samples of a step fill the slots."""
    steps: int = 16
    first: int = 4
    """First step that is timed; before it, the pipeline fills."""
    last: int = 2
    """Last steps, which are not timed: nothing runs ahead for steps that do not exist."""
    seed: int = 0

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.scale.lengths)

    @property
    def groups_per_step(self) -> int:
        return self.generators * self.slots * self.fills // GROUP_SIZE

    @property
    def window(self) -> tuple[int, int]:
        """The first timed step and the first step after the timed ones."""
        return self.first, self.steps - self.last

    @property
    def name(self) -> str:
        mode = "".join(c if c.isalnum() else "-" for c in self.mode).strip("-")
        return (
            f"{mode}-{self.generators}g-{self.training:g}t-{self.machine.device}-"
            f"{self.machine.model}-l{self.scale.lengths:g}-d{self.scale.dilation:g}-s{self.seed}"
        ).replace(".", "_")

    def cost(self, prompt: float = PROMPT_TOKENS) -> Cost:
        """Seconds of the paced run's devices, with prompts of so many tokens.

        The trainer has as many devices as make the training of a step's tokens last `training`
        times as long as their generation with all slots in use.
        """
        model, device = self.machine.parts
        weights = model.parameters * model.bytes_per_parameter
        copied = 2 * weights / (device.bytes_per_second * device.memory_efficiency)
        one = roofline(model, device, trainer_devices=1, swap_seconds=copied + INSTALL_SECONDS)
        paced = self.scale.paced(replace(one, stage_seconds=weights / NETWORK_BYTES))
        mean = self.lengths.mean
        step = paced.decode(self.slots, self.slots * (prompt + mean))
        generation = step * mean / self.slots / self.generators
        token = self.training * generation / (mean + prompt)
        return replace(paced, train_token_seconds=token, message_seconds=2e-3)

    def settings(self, model: Path, folder: Path) -> tuple[str, ...]:
        """The `--set` values of the run, on top of `CONFIG`."""
        on_update, bound = MODES[self.mode]
        longest = self.lengths.longest
        values: dict[str, object] = {
            "run.name": self.name,
            "run.directory": folder,
            "run.steps": self.steps,
            "run.seed": self.seed,
            "model.path": model,
            "sampling.max_tokens": longest,
            "engine.slots": self.slots,
            "engine.max_model_len": longest + 32,
            "scheduler.group_size": GROUP_SIZE,
            "scheduler.groups_per_step": self.groups_per_step,
            "scheduler.on_update": on_update,
            "scheduler.max_off_policy_steps": bound,
            "launcher.generators": self.generators,
        }
        if on_update == "verify":
            values["scheduler.max_runahead_groups"] = RUNAHEAD_STEPS * self.groups_per_step
        return tuple(f"{name}={value}" for name, value in values.items())
