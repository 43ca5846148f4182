"""Orders to an active run: `pause`, `resume`, `drain`, `checkpoint`, `set`, `scale`, `stop`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncrl.cli.app import STEERING, OrderedRun, Runs, app, names_and_live_settings
from asyncrl.errors import UserError
from asyncrl.suggestions import DEFAULT_RUNS, shortened

if TYPE_CHECKING:
    from asyncrl.wire.messages import control


@app.command(rich_help_panel=STEERING, epilog="Example: asyncrl stop arithmetic")
def stop(name: OrderedRun = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Finish the current step, write a checkpoint, end the run."""
    _request(name, runs, lambda control: control.StopRequest())


@app.command(rich_help_panel=STEERING, epilog="Example: asyncrl pause arithmetic")
def pause(name: OrderedRun = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Stop generating tokens; running samples are kept."""
    _request(name, runs, lambda control: control.PauseRequest())


@app.command("resume", rich_help_panel=STEERING, epilog="Example: asyncrl resume arithmetic")
def resume_run(name: OrderedRun = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Continue after `pause`. (To continue a run that ended: asyncrl run CONFIG --resume.)"""
    _request(name, runs, lambda control: control.ResumeRequest())


@app.command(rich_help_panel=STEERING, epilog="Example: asyncrl scale arithmetic --generators 2")
def scale(
    name: OrderedRun = None,
    generators: Annotated[
        int, typer.Option("--generators", metavar="N", help="New number of generators.")
    ] = ...,  # type: ignore[assignment]
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Change the number of generators of an active run.

    Samples of generators that leave are not lost: see docs/deploy.md.
    """
    _request(name, runs, lambda control: control.ScaleRequest(generators))


@app.command(rich_help_panel=STEERING, epilog="Example: asyncrl drain arithmetic")
def drain(name: OrderedRun = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Begin no other group, train the steps whose groups are all begun, end the run.

    `stop` ends it sooner: it drops all steps but the current one.
    """
    _request(name, runs, lambda control: control.DrainRequest())


@app.command(rich_help_panel=STEERING, epilog="Example: asyncrl checkpoint arithmetic")
def checkpoint(name: OrderedRun = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Write a checkpoint now, and return when it is on the disk. The run continues."""
    _request(name, runs, lambda control: control.CheckpointRequest())


@app.command(
    "set", rich_help_panel=STEERING, epilog="Example: asyncrl set trainer.learning_rate=1e-6"
)
def set_setting(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] KEY=VALUE",
            help="A setting and its new value, as YAML.",
            autocompletion=names_and_live_settings,
        ),
    ],
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Change a setting of an active run; a resumed run keeps the change.

    docs/operate.md lists the settings and when each change takes effect.
    """
    name, assignment = (None, words[0]) if len(words) == 1 else (words[0], words[1])
    key, separator, value = assignment.partition("=")
    if len(words) > 2 or not separator or not key.strip():
        given = shortened(" ".join(words))
        raise UserError(f"write it as asyncrl set [RUN] KEY=VALUE, not as {given!r}")
    _request(name, runs, lambda control: control.SetRequest(key.strip(), value))


def _request(name: str | None, runs: Path, request: Callable[[Any], control.Request]) -> None:
    """Send a request, made from `wire.messages.control`, and print its effect."""
    from asyncrl.runs.run_list import find_run_for_order
    from asyncrl.steering.control_socket import order
    from asyncrl.wire.messages import control

    typer.echo(order(find_run_for_order(name, runs), request(control)))
