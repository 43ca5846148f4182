"""Assigns the GPUs to processes. Pure: `asyncrl.launch.gpus` queries the machine.

    GPUs        0 .. t-1       t .. 2t-1      2t
    process     generator-0    generator-1    trainer

A generator has t adjacent GPUs (`tensor_parallel_size` of its engine), which are those that the
machine connects best. Each rank of the trainer has one; with a single GPU in all, it shares the
generator's (`asyncrl.startup.prepare` divides it). A replacement gets its predecessor's. A process
sees its own GPUs only: CUDA_VISIBLE_DEVICES names them as the user's did.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from asyncrl.cores import rank_of
from asyncrl.engine.config import EngineKind
from asyncrl.errors import UserError
from asyncrl.launch.gpus import NONE_VISIBLE, Gpu

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True, slots=True)
class GpuNeeds:
    """The numbers of GPUs that a run's processes want."""

    generators: int
    per_generator: int
    """0: they run on the CPU."""
    trainer: int
    """One for each of its ranks; 0: it runs on the CPU."""
    colocate: bool | None = None
    """The trainer shares the first GPUs of the last generator. None: if there is one GPU, and one
    generator and the trainer would each take one."""
    engine: EngineKind = "vllm"
    """The engine whose settings errors name."""

    def on(self, count: int) -> Self:
        """Return these needs with `colocate` decided for `count` usable GPUs."""
        if self.colocate is not None:
            return self
        both_want_it = self.generators == self.per_generator == self.trainer == 1
        return replace(self, colocate=count == 1 and both_want_it)

    @property
    def size_setting(self) -> str:
        """Name of the setting behind `per_generator`, where it can be more than 1."""
        return f"engine.{self.engine}.tensor_parallel_size"

    @property
    def total(self) -> int:
        """GPUs of all processes."""
        own = 0 if self.colocate and self.per_generator >= self.trainer else self.trainer
        return self.generators * self.per_generator + own


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """GPUs by role; empty: on the CPU."""

    generators: tuple[tuple[Gpu, ...], ...]
    trainer: tuple[Gpu, ...]
    spare: tuple[Gpu, ...]
    renumbers: bool
    """True if CUDA_VISIBLE_DEVICES was not set, so that numbers can be those of nvidia-smi."""

    def of(self, name: str) -> tuple[Gpu, ...]:
        """Return a process's GPUs; a replacement (`generator-0.1`) has its predecessor's."""
        if not name.startswith("generator-"):
            return self.trainer[rank_of(name) : rank_of(name) + 1]
        return self.generators[int(name.removeprefix("generator-").split(".")[0])]

    def with_generators(self, count: int) -> Self:
        """Return a plan for this many generators; others keep their GPUs. Raises UserError."""
        size, more = len(self.generators[0]), count - len(self.generators)
        wanted = more * size
        if wanted > len(self.spare):
            raise UserError(
                f"generator-{count - 1} needs {size} more GPU(s), and of those that "
                f"this run may use {len(self.spare)} are left over: {_listed(self.spare)}. "
                f"{VISIBLE} and launcher.gpus determined at the start which GPUs the run may use"
            )
        added = tuple(self.spare[i * size : (i + 1) * size] for i in range(more))
        spare = self.spare[max(0, wanted) :]
        return replace(self, generators=self.generators + added, spare=spare)

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment variables of a process by its name."""
        gpus = self.of(name)
        numbers = all(gpu.name.isdecimal() for gpu in gpus)  # CUDA does not read a mixture
        variables = {VISIBLE: ",".join(gpu.name if numbers else gpu.uuid for gpu in gpus)}
        if self.renumbers:  # CUDA's own order is by speed
            variables[_ORDER] = "PCI_BUS_ID"
        return variables

    @property
    def shares(self) -> bool:
        """True if trainer and a generator have a GPU in common."""
        return bool(self.generators) and not set(self.trainer).isdisjoint(self.generators[-1])

    def lines(self) -> list[str]:
        """Describe the plan: a line per process, one for what is left over."""
        shown = [f"generator-{i}: {_listed(gpus)}" for i, gpus in enumerate(self.generators)]
        shared = ", shared with the last generator" if self.shares else ""
        shown.append(f"trainer: {_listed(self.trainer)}{shared}")
        if self.spare:
            shown.append(f"not used: {_listed(self.spare)} (raise launcher.generators)")
        return shown


def select_gpus(
    found: Sequence[Gpu], visible: str | None, wanted: Sequence[int | str] | None
) -> list[Gpu]:
    """Return the GPUs that a run may use, in the order of assignment.

    `found` are all of the machine; `visible` is the value of CUDA_VISIBLE_DEVICES (None: not set);
    `wanted` is `launcher.gpus` (None: all visible). Raises UserError for wrong or repeated names.
    """
    usable = list(found)
    if visible is not None:
        names = [] if visible.strip() in NONE_VISIBLE else [x.strip() for x in visible.split(",")]
        usable = _named(names, found, f"{VISIBLE}={visible}", "this machine has")
    if wanted is None:
        return usable
    among = "this machine has" if visible is None else f"{VISIBLE}={visible} leaves"
    return _named([str(one) for one in wanted], usable, "launcher.gpus", among)


def _named(names: Sequence[str], among: Sequence[Gpu], source: str, whose: str) -> list[Gpu]:
    chosen: list[Gpu] = []
    for name in names:
        hits = [gpu for gpu in among if _is(gpu, name)]
        if len(hits) != 1:
            wrong = "is not there" if not hits else f"is the beginning of {len(hits)} names"
            raise UserError(f"{source}: GPU {name!r} {wrong}; {whose} {_listed(among)}")
        if hits[0].uuid in {gpu.uuid for gpu in chosen}:
            raise UserError(f"{source}: GPU {name!r} is named twice")
        # A number is passed on only where CUDA_VISIBLE_DEVICES has numbers too.
        chosen.append(replace(hits[0], name=hits[0].name if name.isdecimal() else hits[0].uuid))
    return chosen


def _is(gpu: Gpu, name: str) -> bool:
    if name.isdecimal():
        return gpu.number == int(name)
    return name.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(name)


def plan_gpus(gpus: Sequence[Gpu], needs: GpuNeeds, *, renumbers: bool) -> GpuPlan:
    """Assign separate GPUs to every process. Raises UserError if there are too few."""
    needs = needs.on(len(gpus))
    if needs.total > len(gpus):
        raise UserError(_too_few(gpus, needs))
    size = needs.per_generator
    blocks = tuple(tuple(gpus[i * size : (i + 1) * size]) for i in range(needs.generators))
    used = needs.generators * size
    colocated = needs.total == used and needs.trainer
    trainer = blocks[-1][: needs.trainer] if colocated else tuple(gpus[used : needs.total])
    for name, mine in [(f"generator-{i}", block) for i, block in enumerate(blocks)]:
        if len(mine) > 1 and any(gpu.is_part for gpu in mine):
            raise UserError(
                f"{name} would get {_listed(mine)}, but a process can use only one part of a GPU "
                f"that is divided by MIG: set {needs.size_setting}: 1, or turn MIG off"
            )
    return GpuPlan(blocks, tuple(trainer), tuple(gpus[needs.total :]), renumbers)


def _too_few(gpus: Sequence[Gpu], needs: GpuNeeds) -> str:
    asked = []
    if needs.per_generator:
        asked.append(
            f"{needs.generators} generator(s) (launcher.generators) with {needs.per_generator} "
            f"GPU(s) each ({needs.size_setting})"
        )
    if needs.total > needs.generators * needs.per_generator:
        asked.append(f"the trainer with {needs.trainer}")
    return (
        f"{' and '.join(asked)} need {needs.total} GPUs, and this run may use {len(gpus)}: "
        f"{_listed(gpus)}. {_remedies(len(gpus), needs)}. {VISIBLE} and launcher.gpus say which "
        "GPUs a run may use"
    )


def _remedies(count: int, needs: GpuNeeds) -> str:
    ways = []
    own = needs.total - needs.generators * needs.per_generator
    fit = (count - own) // needs.per_generator if needs.per_generator else 0
    if fit >= 1:
        ways.append(f"launcher.generators: {fit}")
    if own and count >= needs.generators * needs.per_generator >= needs.trainer:
        ways.append("launcher.colocate: true, with which the trainer shares a generator's GPU")
    if own:
        ways.append("trainer.device: cpu")
    if needs.per_generator > 1:
        ways.append(f"a smaller {needs.size_setting}")
    return "Set " + ", or ".join(ways or ["engine.device: cpu"])


def _listed(gpus: Sequence[Gpu]) -> str:
    return ", ".join(map(str, gpus)) or "none"
