"""The commands `asyncrl agent`, `asyncrl agent-key` and `asyncrl health`."""

import asyncio
import logging
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.app import MACHINE, app
from asyncrl.errors import UserError


class Role(str, Enum):  # noqa: UP042 - typer shows the values of this one
    """Kind of an agent's child."""

    generator = "generator"
    trainer = "trainer"
    any = "any"


@app.command(
    rich_help_panel=MACHINE,
    epilog="Example: asyncrl agent --controller train-0:5900 --key-file agents.key --role any",
)
def agent(
    controller: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address at which the controller listens.")
    ],
    key_file: Annotated[Path, typer.Option(help="File with the secret (asyncrl agent-key).")],
    role: Annotated[Role, typer.Option(help="Process that may run here.")] = Role.any,
    name: Annotated[str, typer.Option(help="Name in messages; default: the host's.")] = "",
    runs: Annotated[
        Path | None,
        typer.Option(help="Path of the runs folder here, if it is not the controller's."),
    ] = None,
    advertise: Annotated[
        str, typer.Option(metavar="HOST", help="Host under which other machines reach this one.")
    ] = "",
    ports: Annotated[
        str, typer.Option(metavar="FIRST-LAST", help="Ports to listen at; default: any free ones.")
    ] = "",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65534, help="Port of the child's metrics; the next one is a relay's."
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Time to leave after SIGTERM.")
    ] = 600.0,
    health_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Answer /healthz and /readyz here.")
    ] = None,
    health_host: Annotated[str, typer.Option(help="Host of --health-port.")] = "127.0.0.1",
    once: Annotated[bool, typer.Option("--once", help="End when the run ends.")] = False,
) -> None:
    """Take part in a run with this machine, which hosts the trainer or a generator."""
    from asyncrl.config.launcher import host_and_port
    from asyncrl.health import Health
    from asyncrl.launch.agents.agent import NODE_VARIABLE, Agent, Settings, count_gpus
    from asyncrl.launch.agents.secret import read_secret

    logging.basicConfig(
        level="INFO", format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout, force=True
    )
    try:
        host_and_port(controller)
    except ValueError as error:
        raise UserError(f"--controller: {error}") from error
    if ":" in advertise:
        raise UserError(
            f"--advertise {advertise}: must be an IPv4 address or a name that has one, without a "
            "port. Agents do not speak IPv6"
        )
    settings = Settings(
        controller=controller,
        role=role.value,
        secret=read_secret(key_file, "--key-file"),
        name=name,
        node=os.environ.get(NODE_VARIABLE, ""),
        runs=runs,
        advertise=advertise,
        ports=ports,
        metrics_port=metrics_port,
        gpus=count_gpus(),
        grace_seconds=grace,
        once=once,
    )
    health = None if health_port is None else Health(health_host, health_port)
    asyncio.run(Agent(settings).run(health))


@app.command("agent-key", rich_help_panel=MACHINE, epilog="Example: asyncrl agent-key agents.key")
def agent_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, with mode 0600.")],
) -> None:
    """Write a new secret for a controller and its agents; an existing one is kept."""
    from asyncrl.launch.agents.secret import write_secret

    said = "written" if write_secret(file) else "exists already; left unchanged"
    typer.echo(f"{file}: {said}")


@app.command(rich_help_panel=MACHINE, epilog="Example: asyncrl health 5990 --ready")
def health(
    port: Annotated[int, typer.Argument(min=1, max=65535, help="The process's --health-port.")],
    ready: Annotated[bool, typer.Option("--ready", help="Ask /readyz, not /healthz.")] = False,
    host: Annotated[str, typer.Option(help="The process's --health-host.")] = "127.0.0.1",
) -> None:
    """Check the health of a run or an agent; exit code 0 if it is healthy. For container probes."""
    from asyncrl.health import ask

    ask(port, host, ready=ready)
