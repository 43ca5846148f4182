"""Commands about the machine: `doctor`, `gpu-check`."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.app import MACHINE, Overrides, TerminalConsole, app


@app.command(
    rich_help_panel=MACHINE, epilog="Example: asyncrl doctor run.yaml --set launcher.generators=2"
)
def doctor(
    config_file: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="A YAML file; default: all defaults.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Check this machine, and show which GPU each process of a run would get.

    With CONFIG or --set, also check the model, the data and the rewards, as a run does.
    """
    from asyncrl.config.effects import load_users_config
    from asyncrl.startup.doctor import diagnose

    config = load_users_config(config_file, overrides or [])
    diagnose(config, typer.echo)
    if config_file is not None or overrides:
        from asyncrl.startup.prepare import prepare

        typer.echo()
        prepare(config, TerminalConsole(markup=False))


@app.command(
    "gpu-check",
    rich_help_panel=MACHINE,
    epilog="Example: asyncrl gpu-check --limit-minutes 10 --json gpu-check.json",
)
def gpu_check(
    only: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Parts, separated by commas; default: all.")
    ] = None,
    shows: Annotated[bool, typer.Option("--list", help="List the parts and exit.")] = False,
    small: Annotated[
        bool | None,
        typer.Option("--small/--full", help="Smallest sizes, nothing measured; default on a CPU."),
    ] = None,
    limit_minutes: Annotated[
        float, typer.Option(min=0.1, help="Time for all parts; those that do not fit are left out.")
    ] = 60.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write verdicts and numbers here.")
    ] = None,
    page_file: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Write them as an HTML page here.")
    ] = None,
) -> None:
    """Test what a run needs of a GPU, part by part: ok, failed or left out, with the reason.

    Exit code 0: no part failed. Without a GPU, parts that can do so run in their smallest size.
    """
    from asyncrl.gpu_check.command import check, chosen

    parts = chosen(only)
    if shows:
        for part in parts:
            typer.echo(f"{part.name:17} {part.seconds:5.0f} s  {part.what}")
        return
    if not check(parts, typer.echo, limit_minutes * 60, small, json_file, page_file):
        raise typer.Exit(1)
