"""The command line, and the options that several commands share."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from asyncrl.mutability import LIVE
from asyncrl.suggestions import DEFAULT_RUNS


class TerminalConsole(Console):
    """Prints until the pipe closes: a closed pipe (`| head`) does not end a run."""

    def on_broken_pipe(self) -> None:
        """Discard further output, instead of ending the process."""
        self.quiet = True
        discarded = os.open(os.devnull, os.O_WRONLY)
        os.dup2(discarded, sys.stdout.fileno())
        os.close(discarded)


TRAINING, WATCHING, STEERING, MACHINE = "Train", "Watch", "Steer an active run", "This machine"
"""Headings of `asyncrl --help` for groups of commands. Each command's epilog is an example."""


def _names_of_runs(context: typer.Context, incomplete: str) -> list[str]:
    runs = Path(context.params.get("runs") or DEFAULT_RUNS)
    return sorted(
        one.parent.name for one in runs.glob("*/run.json") if one.parent.name.startswith(incomplete)
    )


def _settings(incomplete: str) -> list[str]:
    """Return `key=` of each setting; the file of keys spares the import of the configuration."""
    keys = Path(__file__).with_name("keys.txt").read_text(encoding="utf-8").split()
    return [f"{key}=" for key in keys if key.startswith(incomplete)]


def names_and_live_settings(context: typer.Context, incomplete: str) -> list[str]:
    """Complete `asyncrl set [RUN] KEY=VALUE`."""
    names = [] if context.params.get("words") else _names_of_runs(context, incomplete)
    return [*names, *(f"{key}=" for key in sorted(LIVE) if key.startswith(incomplete))]


class _ByPanel(TyperGroup):
    """Lists commands in the order of their headings, whatever module is imported first."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the commands' names, the headings in the order above."""
        panels, known = (TRAINING, WATCHING, STEERING, MACHINE), dict[str, Any](self.commands)
        return sorted(known, key=lambda name: panels.index(known[name].rich_help_panel))


app = typer.Typer(
    cls=_ByPanel,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous RL post-training on exactly on-policy data.",
)
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting, e.g. engine.kind=vllm. Repeatable.",
        autocompletion=_settings,
    ),
]


def _run_argument(default: str) -> Any:
    return typer.Argument(
        metavar="RUN", help=f"Name or folder; default: {default}.", autocompletion=_names_of_runs
    )


RunName = Annotated[str | None, _run_argument("the run that was started last")]
OrderedRun = Annotated[str | None, _run_argument("the active run")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Runs = Annotated[Path, typer.Option("--runs", help="The folder that holds the run folders.")]
