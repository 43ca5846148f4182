"""The command line itself, and the options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TRAINING, WATCHING, STEERING, MACHINE = "Train", "Watch", "Steer an active run", "This machine"
"""Headings of `asyncrl --help`, under which commands stand."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Asynchronous RL post-training on exactly on-policy data.",
)
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, e.g. engine.kind=vllm. Repeatable."
    ),
]
RunName = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="Name or folder; default: the newest run.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Runs = Annotated[Path, typer.Option("--runs", help="The folder that holds the run folders.")]
