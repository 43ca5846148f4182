"""Commands that look at a run and change nothing: `status`, `report`."""

from __future__ import annotations

import json

import typer

from asyncrl.cli.app import WATCHING, Json, RunName, Runs, app
from asyncrl.errors import AsyncrlError
from asyncrl.run.command_lines import DEFAULT_RUNS


@app.command(rich_help_panel=WATCHING, epilog="Example: asyncrl status arithmetic --json")
def status(name: RunName = None, runs: Runs = DEFAULT_RUNS, as_json: Json = False) -> None:
    """Show what an active run is doing."""
    from asyncrl.run.control import ask
    from asyncrl.run.directory import find_run
    from wire.messages import control

    reply = ask(find_run(name, runs), control.StatusRequest())
    if not isinstance(reply, control.StatusReply):
        raise AsyncrlError(f"the controller answered a status request with {reply}")
    if as_json:
        typer.echo(json.dumps(reply.status, indent=2))
    else:
        from monitoring.status_text import status_lines

        typer.echo("\n".join(status_lines(reply.status)))


@app.command(rich_help_panel=WATCHING, epilog="Example: asyncrl report arithmetic")
def report(name: RunName = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Write report.html of a run: active, finished or killed."""
    from asyncrl.run.directory import find_run
    from monitoring.report.write import write_report

    typer.echo(f"report: {write_report(find_run(name, runs))}")
