"""Orders to an active run: `pause`, `resume`, `drain`, `checkpoint`, `set`, `scale`, `stop`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.cli.app import STEERING, OrderedRun, Runs, app
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.runs.command_lines import DEFAULT_RUNS
from asyncrl.suggestions import shortened

if TYPE_CHECKING:
    from asyncrl.wire.messages import control


@app.command(rich_help_panel=STEERING, epilog="Example: asyncrl stop arithmetic")
def stop(name: OrderedRun = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Finish the current step, write a checkpoint, end the run."""
    from asyncrl.wire.messages import control

    _request(name, runs, control.StopRequest())


@app.command(rich_help_panel=STEERING, epilog="Example: asyncrl pause arithmetic")
def pause(name: OrderedRun = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Stop generating tokens; everything is kept."""
    from asyncrl.wire.messages import control

    _request(name, runs, control.PauseRequest())


@app.command("resume", rich_help_panel=STEERING, epilog="Example: asyncrl resume arithmetic")
def resume_run(name: OrderedRun = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Continue after `pause`. (To continue a run that ended: asyncrl run CONFIG --resume.)"""
    from asyncrl.wire.messages import control

    _request(name, runs, control.ResumeRequest())


@app.command(rich_help_panel=STEERING, epilog="Example: asyncrl scale arithmetic --generators 2")
def scale(
    name: OrderedRun = None,
    generators: Annotated[
        int, typer.Option("--generators", metavar="N", help="How many the run is to have.")
    ] = ...,  # type: ignore[assignment]
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Change the number of generators of an active run.

    What leaving generators have begun is not lost: see docs/deploy.md.
    """
    from asyncrl.wire.messages import control

    _request(name, runs, control.ScaleRequest(generators))


@app.command(rich_help_panel=STEERING, epilog="Example: asyncrl drain arithmetic")
def drain(name: OrderedRun = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Begin no other group, train the steps that are begun as a whole, end the run.

    `stop` ends it sooner: it gives up all steps but the current one.
    """
    from asyncrl.wire.messages import control

    _request(name, runs, control.DrainRequest())


@app.command(rich_help_panel=STEERING, epilog="Example: asyncrl checkpoint arithmetic")
def checkpoint(name: OrderedRun = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Write a checkpoint now, and return when it is on the disk. The run continues."""
    from asyncrl.wire.messages import control

    _request(name, runs, control.CheckpointRequest())


@app.command(
    "set", rich_help_panel=STEERING, epilog="Example: asyncrl set trainer.learning_rate=1e-6"
)
def set_setting(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[RUN] KEY=VALUE", help="A setting and its new value, as YAML."),
    ],
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Change a setting of an active run; it stays so when the run is resumed.

    docs/operate.md lists the settings and from when on each holds.
    """
    from asyncrl.wire.messages import control

    name, assignment = (None, words[0]) if len(words) == 1 else (words[0], words[1])
    key, separator, value = assignment.partition("=")
    if len(words) > 2 or not separator or not key.strip():
        raise UserError(
            f"write it as asyncrl set [RUN] KEY=VALUE, not as {shortened(' '.join(words))!r}"
        )
    _request(name, runs, control.SetRequest(key.strip(), value))


def _request(name: str | None, runs: Path, request: control.Request) -> None:
    """Send a request and print its effect. Raises UserError, or AsyncrlError if unknown."""
    from asyncrl.runs.run_list import find_run_for_order
    from asyncrl.steering.control_socket import ask
    from asyncrl.wire.messages import control

    run = find_run_for_order(name, runs)
    reply, name = ask(run, request), run.resolve().name
    if isinstance(reply, control.Refused):
        raise UserError(f"{name}: {reply.reason}")
    if not isinstance(reply, control.Accepted):
        raise AsyncrlError(f"{name}: the controller answered an order with {reply}")
    typer.echo(f"{name}: {reply.message}")
