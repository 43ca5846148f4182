"""Orders to an active run: `pause`, `resume`, `scale`, `stop`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.cli.app import STEERING, RunName, Runs, app
from asyncrl.errors import UserError
from asyncrl.run.command_lines import DEFAULT_RUNS

if TYPE_CHECKING:
    from wire.messages import control


@app.command(rich_help_panel=STEERING, epilog="Example: asyncrl stop arithmetic")
def stop(name: RunName = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Finish the current step, write a checkpoint, end the run."""
    from wire.messages import control

    _request(name, runs, control.StopRequest())


@app.command(rich_help_panel=STEERING, epilog="Example: asyncrl pause arithmetic")
def pause(name: RunName = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Stop generating tokens; everything is kept."""
    from wire.messages import control

    _request(name, runs, control.PauseRequest())


@app.command("resume", rich_help_panel=STEERING, epilog="Example: asyncrl resume arithmetic")
def resume_run(name: RunName = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Continue after `pause`. (To continue a run that ended: asyncrl run CONFIG --resume.)"""
    from wire.messages import control

    _request(name, runs, control.ResumeRequest())


@app.command(rich_help_panel=STEERING, epilog="Example: asyncrl scale arithmetic --generators 2")
def scale(
    name: RunName = None,
    generators: Annotated[
        int, typer.Option("--generators", metavar="N", help="How many the run is to have.")
    ] = ...,  # type: ignore[assignment]
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Change the number of generators of an active run.

    What leaving generators have begun is not lost: see docs/elastic.md.
    """
    from wire.messages import control

    _request(name, runs, control.ScaleRequest(generators))


def _request(name: str | None, runs: Path, request: control.Request) -> None:
    """Send a request and print what happens now. Raises UserError when it is refused."""
    from asyncrl.run.control import ask
    from asyncrl.run.directory import find_run
    from wire.messages import control

    reply = ask(find_run(name, runs), request)
    if isinstance(reply, control.Refused):
        raise UserError(reply.reason)
    if isinstance(reply, control.Accepted):
        typer.echo(reply.message)
