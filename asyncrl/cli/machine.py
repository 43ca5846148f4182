"""Commands about the machine: `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.app import MACHINE, Overrides, app


@app.command(
    rich_help_panel=MACHINE, epilog="Example: asyncrl doctor run.yaml --set launcher.generators=2"
)
def doctor(
    config_file: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="A YAML file; default: all defaults.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Show this machine, and which GPU each process of a run would get."""
    from asyncrl.config import load_config
    from asyncrl.run.doctor import diagnose

    diagnose(load_config(config_file, overrides or []), typer.echo)
