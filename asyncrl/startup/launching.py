"""Opens the configured launcher, and resolves the addresses that belong to it."""

import dataclasses
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from asyncrl.config.run_config import RunConfig
from asyncrl.cores import trainer_name
from asyncrl.errors import AsyncrlError
from asyncrl.launch.agents.launcher import AgentsLauncher
from asyncrl.launch.agents.wait_for_agents import needs_of_run, open_agents
from asyncrl.launch.child_spec import remove_meetings
from asyncrl.launch.interface import Launcher, Say
from asyncrl.launch.local import LocalLauncher
from asyncrl.launch.ray.launcher import open_ray
from asyncrl.launch.ray.messages import Slot
from asyncrl.launch.records import ProcessRecords
from asyncrl.startup.devices import engine_device, needs_of
from asyncrl.startup.prepare import Prepared
from asyncrl.wire import RuntimeDirectory


@dataclass(frozen=True, slots=True)
class Launching:
    """A launcher, and the addresses at which its processes meet."""

    launcher: Launcher
    control_address: str
    """The controller's address; the system chooses the port of `tcp://HOST:*`."""
    data_address: str
    """The trainer's address; empty: that of its node, which the trainer reports."""
    model_path: str
    engine_device: Literal["cpu", "cuda"] | None
    on_lost: Callable[[Callable[[AsyncrlError], None]], None] = lambda _tell: None
    """Registers a callback for the loss of the cluster; another thread may call it."""
    use: Callable[[RunConfig], None] = lambda _config: None
    """Sets the configuration of processes that are started later."""
    agents: AgentsLauncher | None = None
    """The launcher, if its agents come and go during the run."""
    shares_processors: bool = False
    """True if the trainer and a generator compute on the same GPU, or on the same cores."""


async def open_launcher(
    prepared: Prepared,
    run: Path,
    records: ProcessRecords,
    runtime: RuntimeDirectory,
    closing: AsyncExitStack,
    say: Say,
) -> Launching:
    """Open the launcher, ended by `closing`. Raises UserError if it cannot carry the run."""
    config = prepared.config
    if config.launcher.kind != "local":
        remove_meetings(run)
        closing.callback(remove_meetings, run)
        return await _open_agents(prepared, run, records, closing, say)
    local = LocalLauncher(
        run / "logs",
        records,
        generators=config.launcher.generators,
        ranks=config.trainer.ranks,
        threads=config.launcher.threads,
        pin_cores=config.launcher.pin_cores,
        gpus=prepared.gpus,
    )
    control, data = runtime.address("control"), runtime.address("data")
    device = engine_device(prepared.gpus)
    launching = Launching(local, control, data, prepared.model_path, device)
    return dataclasses.replace(launching, shares_processors=local.shares_processors)


async def _open_agents(
    prepared: Prepared, run: Path, records: ProcessRecords, closing: AsyncExitStack, say: Say
) -> Launching:
    config, path = prepared.config, prepared.model_path
    model_path = os.path.realpath(path) if os.path.isdir(path) else path  # noqa: PTH112, ASYNC240 - or an id
    needs = needs_of(config, any_gpu=True)
    auto = {"generator": all(engine.device == "auto" for engine in config.engines)}
    auto["trainer"] = config.trainer.device == "auto"
    asked = needs_of_run(
        config,
        gpus={"trainer": needs.trainer // config.trainer.ranks, "generator": needs.per_generator},
        optional_gpus=frozenset(role for role, is_auto in auto.items() if is_auto),
        run_directory=Path(os.path.realpath(run)),  # noqa: ASYNC240 - fast enough
        model_path=model_path,
        records=records,
    )
    by_ray = config.launcher.kind == "ray"
    found: AgentsLauncher
    if by_ray:
        slots, logs = slots_of(config), run / "logs"
        found = ray = await open_ray(config, slots, asked, records, closing, say, logs)
        control = f"{ray.node_ip}:*"
    else:
        found = await open_agents(config, asked, closing, say)
        control = config.launcher.agents.control
    device: Literal["cpu", "cuda"] = "cuda" if found.roster.gpus.of("generator") else "cpu"
    address, agents = f"tcp://{control}", None if by_ray else found
    return Launching(found, address, "", model_path, device, found.on_lost, found.use, agents)


def slots_of(config: RunConfig) -> tuple[Slot, ...]:
    """Return a run's slots on a Ray cluster, trainer ranks first. Raises UserError."""
    needs, ranks = needs_of(config, any_gpu=True), config.trainer.ranks
    one, auto = config.launcher.ray.trainer, config.trainer.device == "auto"
    rank = Slot("", one.cpus, needs.trainer // ranks, auto, one.resources)
    one, auto = config.launcher.ray.generator, all(e.device == "auto" for e in config.engines)
    generator = Slot("", one.cpus, needs.per_generator, auto, one.resources)
    return (
        *(replace(rank, name=trainer_name(index, 0)) for index in range(ranks)),
        *(replace(generator, name=f"generator-{i}") for i in range(config.launcher.generators)),
    )
