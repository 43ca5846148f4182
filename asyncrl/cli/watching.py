"""Read-only commands: `status`, `report`, `watch`, `logs`, `samples`, `list`, `compare`, `web`."""

import contextlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from asyncrl.cli.app import WATCHING, Json, RunName, Runs, TerminalConsole, app
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.suggestions import DEFAULT_RUNS


@app.command(rich_help_panel=WATCHING, epilog="Example: asyncrl status arithmetic --json")
def status(name: RunName = None, runs: Runs = DEFAULT_RUNS, as_json: Json = False) -> None:
    """Show what an active run is doing, or what became of one that ended."""
    from asyncrl.runs.directory import find_run, is_alive, is_supervised
    from asyncrl.runs.run_list import listed

    run = find_run(name, runs, may_be_supervised=True)
    if is_supervised(run):
        import msgspec

        one = listed(run)
        said = filter(None, (one.state, f"{one.progress} steps", one.course_of_loss))
        line = f"{one.name}: {', '.join(said)}"
        typer.echo(json.dumps(msgspec.to_builtins(one), indent=2) if as_json else line)
        return
    found, more = _status_now(run) if is_alive(run) else _status_at_the_end(run)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        from asyncrl.monitoring.terminal.status_text import status_lines

        typer.echo("\n".join([*status_lines(found), *more]))


def _status_now(run: Path) -> tuple[Mapping[str, Any], list[str]]:
    from asyncrl.monitoring.metrics.discovery import metrics_line
    from asyncrl.steering.control_socket import ask
    from asyncrl.wire.messages import control

    reply = ask(run, control.StatusRequest())
    if not isinstance(reply, control.StatusReply):
        raise AsyncrlError(f"the controller answered a status request with {reply}")
    return reply.status, metrics_line(run)


def _status_at_the_end(run: Path) -> tuple[Mapping[str, Any], list[str]]:
    """Return the last numbers without speeds, and what can be done with the run."""
    from asyncrl.suggestions import command_for, resume_command
    from asyncrl.web.controller_link import EndedRun

    found = EndedRun(run).final
    speeds = ("tokens_per_second", "generator_idle", "trainer_idle", "waiting_for_rewards")
    more = [f"report: {command_for('report', run)}; logs: {run / 'logs'}"]
    if found["phase"] != "is done":
        more.insert(0, f"continue it with: {resume_command(run)}")
    return {**found, **dict.fromkeys(speeds)}, more


@app.command(rich_help_panel=WATCHING, epilog="Example: asyncrl report arithmetic")
def report(name: RunName = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Write report.html of a run: active, finished or killed."""
    from asyncrl.monitoring.report.write import write_report
    from asyncrl.runs.directory import find_run
    from asyncrl.secret_files import take_permissions_of

    take_permissions_of(run := find_run(name, runs))
    typer.echo(f"report: {write_report(run)}")


@app.command(rich_help_panel=WATCHING, epilog="Example: asyncrl watch arithmetic")
def watch(name: RunName = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Show an active run live, until it ends or Ctrl-C; the run is not affected.

    A terminal shows the panel of `asyncrl run`, other outputs get a line per step, at most one
    each second.
    """
    import asyncio

    from asyncrl.runs.directory import find_run
    from asyncrl.steering import watching

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(watching.watch(find_run(name, runs), TerminalConsole()))


@app.command(rich_help_panel=WATCHING, epilog="Example: asyncrl logs -f trainer")
def logs(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [PROCESS]", help="Default: all processes of the run started last."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Keep printing new lines.")
    ] = False,
    lines: Annotated[
        int, typer.Option("-n", "--lines", min=0, help="Lines of each log to begin with.")
    ] = 50,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Print the logs of a run's processes, such as trainer or generator-0."""
    from asyncrl.runs import log_reading
    from asyncrl.runs.directory import is_alive

    run, process = _run_and_process(words or [], runs)
    log_reading.find_logs(run, process)
    reader = log_reading.LogReader(lambda: log_reading.find_logs(run, process), lines)
    found = reader.new_lines(last=True)
    if follow:
        found = log_reading.follow(reader, lambda: not is_alive(run))
    with contextlib.suppress(KeyboardInterrupt):
        for source, line in found:
            typer.echo(line if process is not None else f"{source} | {line}")


def _run_and_process(words: list[str], runs: Path) -> tuple[Path, str | None]:
    """Resolve the arguments of `asyncrl logs`. One word is a run if a run has this name."""
    from asyncrl.runs.directory import find_run

    find = partial(find_run, may_be_supervised=True)
    if len(words) > 2:
        raise UserError("write it as asyncrl logs [RUN] [PROCESS]")
    if len(words) == 2:
        return find(words[0], runs), words[1]
    if not words:
        return find(None, runs), None
    try:
        return find(words[0], runs), None
    except UserError:
        return find(None, runs), words[0]


@app.command(rich_help_panel=WATCHING, epilog="Example: asyncrl samples arithmetic -n 2")
def samples(
    name: RunName = None,
    count: Annotated[int, typer.Option("-n", min=1, max=200, help="Number of samples.")] = 4,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Print the newest samples and their rewards, with tokens coloured by their origin.

    A few samples of each recent step are kept; run.log_samples=jsonl keeps all.
    """
    from asyncrl.monitoring.records.sample_text import legend, newest, sample_text
    from asyncrl.runs.directory import find_run

    run = find_run(name, runs)
    found = newest(run, count)
    if not found:
        raise UserError(f"{run} does not have samples yet: its first step records the first ones")
    console = TerminalConsole(highlight=False)
    colours = console.is_terminal and not console.no_color
    console.print(legend(colours=colours), soft_wrap=True)
    for record in found:
        console.print()
        console.print(sample_text(record, colours=colours), soft_wrap=True)


@app.command("list", rich_help_panel=WATCHING, epilog="Example: asyncrl list")
def list_all(runs: Runs = DEFAULT_RUNS, as_json: Json = False) -> None:
    """List the runs of a folder, last changed first."""
    from rich.table import Table

    from asyncrl.monitoring.terminal.evaluation_text import course
    from asyncrl.monitoring.terminal.formatting import number
    from asyncrl.runs.run_list import list_runs

    found = list_runs(runs)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    if not found:
        typer.echo(f"there are no runs in {runs}; `asyncrl init` and `asyncrl run` begin one")
        return
    table = Table("run", "state", "step", "reward", "accuracy", box=None, pad_edge=False)
    for run in found:
        accuracy = run.course_of_loss or course(
            run.accuracy_before, run.accuracy_after, run.evaluated, digits=2
        )
        table.add_row(Text(run.name), run.state, run.progress, number(run.reward, 3), accuracy)
    TerminalConsole(highlight=False).print(table)


@app.command(rich_help_panel=WATCHING, epilog="Example: asyncrl compare first second")
def compare(
    names: Annotated[
        list[str], typer.Argument(metavar="RUN RUN...", help="Names or folders, 2 to 12.")
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write curves and tables here.")
    ] = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Compare runs: results, reward curves, and the settings that differ."""
    from rich.table import Table

    from asyncrl.monitoring.report import compare as comparing
    from asyncrl.monitoring.report.data import load_run
    from asyncrl.monitoring.report.series import thin
    from asyncrl.monitoring.terminal.formatting import sparkline, without_controls
    from asyncrl.runs.directory import find_run

    if not 2 <= len(names) <= 12:
        raise UserError(f"give the names of 2 to 12 runs, not {len(names)}")
    found = [load_run(find_run(name, runs)) for name in names]
    console = TerminalConsole(highlight=False)
    for rows in (comparing.table(found), comparing.differences(found)):
        if not rows:
            continue
        names_of = [escape(without_controls(run.name)) for run in found]
        table = Table("", *names_of, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(Text(cell) for cell in (row.name, *row.values)))
        console.print(table)
        console.print()
    for one in comparing.CURVES[:1]:
        for run in found:
            values = [value for value in comparing.curve(run, one) if value is not None]
            ends = f"{values[0]:.3f} → {values[-1]:.3f}" if values else "no step yet"
            whole = [value for value in thin(values, 32) if value is not None]
            line = f"{one.title} {sparkline(whole)} {ends}  {without_controls(run.name)}"
            console.print(Text(line), soft_wrap=True)
    if html is not None:
        html.write_text(comparing.comparison_page(found), encoding="utf-8")
        console.print(Text(f"page: {html}"), soft_wrap=True)


@app.command(rich_help_panel=WATCHING, epilog="Example: asyncrl web arithmetic")
def web(
    name: RunName = None,
    runs: Runs = DEFAULT_RUNS,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for an ended run; 0: any free one.")
    ] = 0,
) -> None:
    """Print the link to the page of an active run, or serve the page of an ended one.

    The link holds the token that orders need.
    """
    from asyncrl.runs.directory import find_run
    from asyncrl.web.command import show_page

    show_page(find_run(name, runs), port, typer.echo)
