"""`asyncrl web`: the page of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from asyncrl.cli.app import WATCHING, RunName, Runs, app
from asyncrl.runs.command_lines import DEFAULT_RUNS


@app.command(rich_help_panel=WATCHING, epilog="Example: asyncrl web arithmetic")
def web(
    name: RunName = None,
    runs: Runs = DEFAULT_RUNS,
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65535, help="Of an ended run's page; 0: any free one."),
    ] = 0,
) -> None:
    """Print the link to the page of an active run, or serve the page of an ended one.

    The link holds the token that orders need.
    """
    from asyncrl.runs.directory import find_run
    from asyncrl.web.command import show_page

    show_page(find_run(name, runs), port, typer.echo)
