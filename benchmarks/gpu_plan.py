"""Which machines each shipped configuration fits, by arithmetic: no GPU, no model.

    python -m benchmarks.gpu_plan [--json FILE]

Every configuration under examples/, the template of `asyncrl init`, Compose and the chart's
examples goes the way of a start: `plan_gpus`, the memory of a training step, and the division of a
GPU that trainer and generator share. The machines are stand-ins. A configuration that does not fit
the machine that it is written for is unfit; exit code 1 unless `unfit_shipped` is 0. With --quick
and --smoke it does the same, in a second.

Pods and containers do not see each other's GPUs, so for the chart and Compose the plan is that of a
local run with the same processes, where those of `SHARED` have the only GPU in common.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from asyncrl.config.run_config import RunConfig, load_config, parse_config
from asyncrl.errors import UserError
from asyncrl.launch.gpus import Gpu
from asyncrl.launch.placement import plan_gpus
from asyncrl.startup.devices import needs_of
from asyncrl.startup.memory import device_of, memory_of, refuse_too_large
from asyncrl.startup.prepare import USABLE, EngineNeeds, drafts_of, with_shared_gpu
from asyncrl.trainer.model.memory_estimate import GIB, ModelShape
from benchmarks.harness import parser_of, report, table

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = "asyncrl/initialise/templates/run.yaml"
COMPOSE = "docker/compose.gpu.yaml"
CHART = "docker/chart/examples"


@dataclass(frozen=True)
class Machine:
    """Equal GPUs, of one node or of several."""

    count: int
    gb: int
    """As sold."""

    @property
    def name(self) -> str:
        return f"{self.count}x{self.gb}"

    @property
    def gpus(self) -> list[Gpu]:
        mib = {24: 24_564, 80: 81_559, 141: 143_771}[self.gb]
        return [Gpu(str(n), f"GPU-{n}", f"{self.gb} GB", mib, n) for n in range(self.count)]


MACHINES = (Machine(1, 24), Machine(1, 80), Machine(8, 80), Machine(8, 141))
WRITTEN_FOR = {
    "examples/7b-8gpus.yaml": Machine(8, 80),
    f"{CHART}/one-gpu.yaml": Machine(1, 80),
    f"{CHART}/gpus.yaml": Machine(8, 80),
    f"{CHART}/ranks.yaml": Machine(64, 80),
    f"{CHART}/fleet.yaml": Machine(256, 80),
}
"""Others are for one GPU of 24 GB."""
SHARED = (f"{CHART}/one-gpu.yaml", COMPOSE, f"{COMPOSE}, vLLM")
SHAPES = {
    "builtin:arithmetic": ModelShape(336_128, 128, 2, 256, 2, 2, 64, 59, tied=True),
    "builtin:agent": ModelShape(336_128, 128, 2, 256, 2, 2, 64, 59, tied=True),
    "tiny-llama": ModelShape(336_128, 128, 2, 256, 2, 2, 64, 59, tied=True),
    "qwen2.5-1.5b": ModelShape(1_543_714_304, 1536, 28, 8960, 12, 2, 128, 151_936, tied=True),
    "qwen2.5-7b": ModelShape(7_615_616_512, 3584, 28, 18_944, 28, 4, 128, 152_064),
    "qwen2.5-math-7b": ModelShape(7_615_616_512, 3584, 28, 18_944, 28, 4, 128, 152_064),
    "qwen2.5-32b": ModelShape(32_763_876_352, 5120, 64, 27_648, 40, 8, 128, 152_064),
}
"""By the last part of `model.path`, in small letters; those of the hub as their cards say."""


@dataclass(frozen=True)
class Verdict:
    machine: str
    fits: bool
    text: str
    """What is used, or why it does not fit."""


@dataclass(frozen=True)
class Row:
    name: str
    written_for: str
    step_gib: float
    """Of a rank of the trainer."""
    verdicts: tuple[Verdict, ...]
    """The one for `written_for` first, then those of `MACHINES`."""

    @property
    def is_unfit(self) -> bool:
        """Whether it does not fit the machine that it is written for."""
        return not self.verdicts[0].fits


def shipped() -> Iterator[tuple[str, RunConfig]]:
    """Every configuration that uses GPUs where there are any, as one for a local run."""
    for path in [*sorted((ROOT / "examples").rglob("*.yaml")), ROOT / TEMPLATE]:
        yield str(path.relative_to(ROOT)), load_config(path)
    yield from _of_compose()
    for path in sorted((ROOT / CHART).glob("*.yaml")):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if values.get("trainer", {}).get("gpus") or values.get("generators", {}).get("gpus"):
            name = str(path.relative_to(ROOT))
            yield name, _of_chart(name, values)


def _of_compose() -> Iterator[tuple[str, RunConfig]]:
    """By default, and with the settings for vLLM that its file names."""
    example, shared = ROOT / "examples/arithmetic.yaml", "launcher.colocate=true"
    yield COMPOSE, load_config(example, [shared])
    text = (ROOT / COMPOSE).read_text(encoding="utf-8")
    ((gib, share),) = re.findall(r"ASYNCRL_KV_GIB=(\S+) ASYNCRL_GPU_SHARE=(\S+)", text)
    sizes = (f"kv_cache_gib={gib}", f"gpu_memory_utilization={share}")
    vllm = ["engine.kind=vllm", *(f"engine.vllm.{size}" for size in sizes)]
    yield f"{COMPOSE}, vLLM", load_config(example, [shared, *vllm])


def _of_chart(name: str, values: Mapping[str, Any]) -> RunConfig:
    """The chart's configuration, with its pods as processes of one machine."""
    run, trainer, generators = dict(values["config"]), values["trainer"], values["generators"]
    launcher = {"generators": generators["replicas"], "colocate": name in SHARED}
    run["launcher"] = run.get("launcher", {}) | launcher
    run["trainer"] = run.get("trainer", {}) | {"ranks": trainer.get("ranks", 1)}
    config = parse_config(run, source=name)
    if config.engine.gpus != generators["gpus"] or trainer["gpus"] != 1:
        raise ValueError(f"{name}: GPUs of a pod are not those that its process takes")
    return config


def shape_of_model(config: RunConfig) -> ModelShape:
    """Of the table. Raises KeyError: the model is not in it."""
    return SHAPES[config.model.path.rpartition("/")[2].lower()]


def judge(config: RunConfig, machine: Machine) -> Verdict:
    """Whether a configuration would be started on a machine, as `asyncrl run` decides it."""
    gpus, shape = machine.gpus, shape_of_model(config)
    try:
        plan = plan_gpus(gpus, needs_of(config, any_gpu=True), renumbers=True)
    except UserError:
        count = needs_of(config, any_gpu=True).total
        return Verdict(machine.name, fits=False, text=f"{count} GPUs are needed")
    try:
        device = device_of(config, plan)
        if device is not None:
            refuse_too_large(config, shape, device)
        _, shared = with_shared_gpu(config, plan, shape)
    except UserError as error:
        return Verdict(machine.name, fits=False, text=str(error))
    if shared is not None:
        return Verdict(machine.name, fits=True, text=shared.removeprefix("shared").strip())
    return _own_gpus(config, machine, shape)


def _own_gpus(config: RunConfig, machine: Machine, shape: ModelShape) -> Verdict:
    """Whether the generators' GPUs hold weights and KV of a request, or of all slots."""
    engine = config.engine
    needs = EngineNeeds.of(shape, engine, drafts_of(config))
    share = {
        "torch": USABLE,
        "vllm": engine.vllm.share_of_gpu,
        "sglang": engine.sglang.share_of_gpu,
    }
    kv = needs.request * (needs.slots if engine.kind == "torch" else 1)
    room = share[engine.kind] * ((machine.gpus[0].memory_mib or 0) << 20)
    left = room - needs.without_kv
    trainer = memory_of(config, shape, on_gpu=True).device / GIB
    text = f"trainer {trainer:.1f} GiB, {engine.kind}: KV {left / GIB:.1f} GiB of {room / GIB:.1f}"
    return Verdict(machine.name, kv <= left, text)


def rows() -> list[Row]:
    found = []
    for name, config in shipped():
        own = WRITTEN_FOR.get(name, Machine(1, 24))
        step = memory_of(config, shape_of_model(config), on_gpu=True).device / GIB
        verdicts = tuple(judge(config, machine) for machine in (own, *MACHINES))
        found.append(Row(name, own.name, round(step, 2), verdicts))
    return found


def ratios_of(found: Sequence[Row]) -> dict[str, float]:
    """How many configurations there are, and how many do not fit what they are written for."""
    return {"shipped": len(found), "unfit_shipped": sum(row.is_unfit for row in found)}


def table_of(found: Sequence[Row]) -> Table:
    """A line for each configuration: what it is written for, and what it fits."""
    return table(
        "shipped configurations on stand-in GPUs (GB each)",
        ("configuration", "for", "step GiB", *(one.name for one in MACHINES), "on its own machine"),
        (
            (
                row.name, row.written_for, f"{row.step_gib:.1f}",
                *("fits" if one.fits else "no" for one in row.verdicts[1:]),
                f"{'UNFIT' if row.is_unfit else 'fits'}: {row.verdicts[0].text}",
            )
            for row in found
        ),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    options = parser_of(__doc__, "the same").parse_args(argv)
    found = rows()
    ratios = ratios_of(found)
    report(options, "gpu_plan", {"rows": [asdict(r) for r in found]}, ratios, table_of(found))
    return int(ratios["unfit_shipped"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
