"""Opens the launcher of agents and waits, for a limited time, for those of the run's start."""

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from msgspec.structs import replace

from asyncrl.config.launcher import host_and_port
from asyncrl.config.run_config import RunConfig
from asyncrl.errors import UserError
from asyncrl.launch.agents.agent import signals_handled
from asyncrl.launch.agents.launcher import AgentsLauncher
from asyncrl.launch.agents.registry import Needs
from asyncrl.launch.agents.secret import read_secret
from asyncrl.launch.node_child import node_facts
from asyncrl.launch.nodes import NodeInfo, ranks_apart
from asyncrl.launch.records import ProcessRecords

NODES_FILE = ".nodes"
"""File in the run's folder. An agent that can read the token in it shares the folder."""
LOST_SECONDS = 60.0
"""An agent whose controller is silent for this long ends its processes and waits. Ray ends its own
agents before, so there the controller may be suspended ten times as long."""
_SAY_SECONDS = 30.0


def needs_of_run(
    config: RunConfig,
    *,
    gpus: dict[str, int],
    optional_gpus: frozenset[str],
    run_directory: Path,
    model_path: str,
    records: ProcessRecords,
) -> Needs:
    """Return a run's requirements; write the token by which agents recognise its folder."""
    launcher = config.launcher
    settings = launcher.cluster
    file, token = run_directory / NODES_FILE, secrets.token_hex(16)
    file.write_text(token, encoding="utf-8")
    question = {
        "token_file": str(file),
        "token": token,
        "model": model_path,
        "weights_directory": settings.weights_directory,
    }
    facts = node_facts(question) | {"id": "controller", "ip": ""}
    ours = msgspec.convert(facts, NodeInfo)
    own_silence = launcher.kind == "agents"
    return Needs(
        run=config.run.name,
        question=json.dumps(question),
        ours=replace(ours, memory=f"{ours.memory} {ours.disk}"),
        model=model_path,
        run_directory=str(run_directory),
        gpus=gpus,
        optional_gpus=optional_gpus,
        mark=records.mark,
        silence_seconds=(launcher.agents if own_silence else launcher).silence_seconds,
        silence_setting=f"launcher{'.agents' * own_silence}.silence_seconds",
        lost_seconds=LOST_SECONDS * (1 if own_silence else 10),
        relay_per_node=settings.relays == "always",
    )


async def open_agents(
    config: RunConfig, needs: Needs, closing: AsyncExitStack, say: Callable[[str], None]
) -> AgentsLauncher:
    """Listen for agents until `closing`, and wait for those that the run begins with.

    Raises UserError if the secret cannot be read, the port is in use, or the agents do not come.
    """
    settings = config.launcher.agents
    assert settings.key_file is not None  # noqa: S101 - the configuration is checked
    _check_control(settings.control)
    secret = read_secret(Path(settings.key_file), "launcher.agents.key_file")
    advice = (
        "HOST of launcher.agents.listen must be one of its addresses (0.0.0.0: all), and no other "
        "program may have the port, nor another run's controller"
    )
    launcher = AgentsLauncher(config, needs, secret, say, listen=settings.listen, advice=advice)
    closing.push_async_callback(launcher.close)
    start = "start `asyncrl agent --controller HOST:PORT --key-file FILE --role ROLE`"
    advice = f"{start}, and read its output"
    await gather(launcher, config, say, place=f"at {settings.listen}", advice=advice)
    return launcher


def _check_control(address: str) -> None:
    try:
        socket.create_server(host_and_port(address)).close()
    except OSError as error:
        raise UserError(
            f"launcher.agents.control_port: this machine cannot listen at {address} "
            f"({error.strerror}); another program has the port, or the host of "
            "launcher.agents.listen is not one of its addresses"
        ) from error


async def gather(
    launcher: AgentsLauncher,
    config: RunConfig,
    say: Callable[[str], None],
    *,
    place: str,
    advice: str,
    hopeless: Callable[[], str | None] = lambda: None,
) -> None:
    """Wait for the agents of the run's start, or for a signal. Raises UserError if they are late.

    `place` and `advice` are parts of messages; `hopeless` returns why agents cannot come, if so.
    """
    settings, ended = config.launcher.cluster, asyncio.Event()
    until, said = time.monotonic() + settings.place_seconds, float("-inf")
    with signals_handled(ended.set):
        while True:
            ranks, generators = launcher.roster.could_begin_with(config.trainer.ranks)
            if ranks == config.trainer.ranks and generators >= config.launcher.generators:
                agents = launcher.roster.free("trainer")[:ranks]
                found = [agent.info for agent in agents if agent.info is not None]
                if (reason := ranks_apart(found, config.trainer.rank_network)) is not None:
                    raise UserError(reason)
                launcher.roster.gpus.settle()  # only now: a machine with GPUs may have been late
                return
            if (reason := hopeless()) is not None:
                raise UserError(reason)
            missing = _missing(config, ranks, generators)
            now = time.monotonic()
            if now > until:
                raise UserError(
                    f"waited {settings.place_seconds:.0f} s "
                    f"({config.launcher.cluster_key}.place_seconds) {place} for {missing}, without "
                    f"success: {advice}"
                )
            if now - said > _SAY_SECONDS:
                said = now
                say(f"waiting {place} for {missing}")
                for sentence in launcher.roster.of_no_use():
                    say(f"cannot be used: {sentence}")
            launcher.changed.clear()
            if ended.is_set():
                raise UserError(f"ended while it waited {place} for {missing}")
            waits = [asyncio.create_task(event.wait()) for event in (launcher.changed, ended)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()


def _missing(config: RunConfig, ranks: int, generators: int) -> str:
    parts, wanted, needed = [], config.launcher.generators, config.trainer.ranks
    if needed == 1 > ranks:
        parts.append("an agent for the trainer")
    elif ranks < needed:
        parts.append(f"{needed - ranks} of {needed} agents for trainer ranks")
    if generators < wanted:
        parts.append(f"{wanted - max(0, generators)} of {wanted} agents for generators")
    return " and ".join(parts)
