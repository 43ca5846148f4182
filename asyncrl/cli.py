"""The command line: `asyncrl run|doctor|status|stop|pause|resume|scale|report|eval|...`.

Exit codes: 0 done, or stopped by the user; 1 the run failed; 2 the user must change something; 130
ended at once by a second Ctrl-C.
Commands import what they need when they are called, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from asyncrl.errors import AsyncrlError, Interrupted, UserError
from asyncrl.package_guard import refuse_foreign_packages
from asyncrl.run.command_lines import DEFAULT_RUNS, resume_command
from asyncrl.simulation.command import simulate
from monitoring.wording import without_controls

if TYPE_CHECKING:
    from wire.messages import control
    from wire.records import RunResult

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Asynchronous RL post-training on exactly on-policy data.",
)
_Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, e.g. engine.kind=vllm. Repeatable."
    ),
]
_RunName = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="Name or folder; default: the newest run.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
_Runs = Annotated[Path, typer.Option("--runs", help="The folder that holds the run folders.")]


@app.command()
def run(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.")],
    overrides: _Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue this run from its newest whole checkpoint.")
    ] = False,
    resume_from: Annotated[
        int | None,
        typer.Option(
            "--resume-from",
            metavar="STEP",
            min=1,
            help="Continue from the checkpoint of this step.",
        ),
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Delete an earlier run of this name first.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the whole configuration and exit.")
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Like --dry-run, with the meaning of every key."),
    ] = False,
    end_with: Annotated[
        int | None,
        typer.Option(
            "--end-with",
            metavar="PID",
            min=1,
            help="End as by Ctrl-C when the process that started this one, PID, ends.",
        ),
    ] = None,
) -> None:
    """Train: evaluate, run the steps, evaluate again, write a report."""
    if end_with is not None:
        _end_with(end_with)
    from asyncrl.config import dump_config, load_config
    from asyncrl.config_reference import explain_config

    config = load_config(config_file, overrides or [])
    if dry_run or explain:
        typer.echo(explain_config(config) if explain else dump_config(config), nl=False)
        return
    resume = resume or resume_from is not None
    if resume and clean:
        raise UserError("--resume continues a run and --clean deletes it: give only one of them")
    console = _Console(markup=False)
    from asyncrl.run.directory import refuse_unfit
    from asyncrl.run.orders import with_orders

    with contextlib.suppress(OSError):  # `execute` says what cannot be read
        refuse_unfit(config, resume=resume, clean=clean)
        if resume:
            config = with_orders(config, overrides or [])
    from asyncrl.run.execute import execute
    from asyncrl.run.prepare import prepare

    result = execute(
        prepare(config, console),
        resume=resume,
        clean=clean,
        console=console,
        resume_from=resume_from,
    )
    _print_result(
        console,
        config.directory,
        result,
        to_continue=resume_command(config.directory, config_file, overrides or []),
    )


@app.command()
def doctor(
    config_file: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file; default: all defaults.")
    ] = None,
    overrides: _Overrides = None,
) -> None:
    """Show this machine, and which GPU each process of a run would get."""
    from asyncrl.config import load_config
    from asyncrl.run.doctor import diagnose

    diagnose(load_config(config_file, overrides or []), typer.echo)


def _end_with(parent: int) -> None:
    """Have the kernel end this command when its parent ends. Raises UserError: not its parent."""
    from asyncrl.launch.parent_death import end_with_parent

    if sys.platform != "linux":
        raise UserError("--end-with works on Linux only")
    if os.getppid() != parent:
        raise UserError(
            f"--end-with {parent}: this command was started by process {os.getppid()}, or process "
            f"{parent} has ended. Give the id of the process that starts it"
        )
    end_with_parent(parent, signal.SIGTERM)


@app.command()
def status(name: _RunName = None, runs: _Runs = DEFAULT_RUNS, as_json: _Json = False) -> None:
    """Show what an active run is doing."""
    from wire.messages import control

    reply = _ask(name, runs, control.StatusRequest())
    if not isinstance(reply, control.StatusReply):
        raise AsyncrlError(f"the controller answered a status request with {reply}")
    if as_json:
        typer.echo(json.dumps(reply.status, indent=2))
    else:
        from monitoring.status_text import status_lines

        typer.echo("\n".join(status_lines(reply.status)))


@app.command()
def stop(name: _RunName = None, runs: _Runs = DEFAULT_RUNS) -> None:
    """Finish the current step, write a checkpoint, end the run."""
    from wire.messages import control

    _request(name, runs, control.StopRequest())


@app.command()
def pause(name: _RunName = None, runs: _Runs = DEFAULT_RUNS) -> None:
    """Stop generating tokens; everything is kept."""
    from wire.messages import control

    _request(name, runs, control.PauseRequest())


@app.command("resume")
def resume_run(name: _RunName = None, runs: _Runs = DEFAULT_RUNS) -> None:
    """Continue after `pause`. (To continue a run that ended: asyncrl run CONFIG --resume.)"""
    from wire.messages import control

    _request(name, runs, control.ResumeRequest())


@app.command()
def scale(
    name: _RunName = None,
    generators: Annotated[
        int, typer.Option("--generators", metavar="N", help="How many the run is to have.")
    ] = ...,  # type: ignore[assignment]
    runs: _Runs = DEFAULT_RUNS,
) -> None:
    """Change the number of generators of an active run.

    What leaving generators have begun is not lost: see docs/elastic.md.
    """
    from wire.messages import control

    _request(name, runs, control.ScaleRequest(generators))


@app.command()
def report(name: _RunName = None, runs: _Runs = DEFAULT_RUNS) -> None:
    """Write report.html of a run: active, finished or killed."""
    from asyncrl.run.directory import find_run
    from monitoring.report.write import write_report

    typer.echo(f"report: {write_report(find_run(name, runs))}")


@app.command("eval")
def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="A run, or a model directory.")
    ],
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Task and sampling for a MODEL.")
    ] = None,
    overrides: _Overrides = None,
    runs: _Runs = DEFAULT_RUNS,
) -> None:
    """Measure held-out accuracy of a run's newest checkpoint or of a model.

    Responses are sampled as in training.
    """
    from asyncrl.evaluation.command import evaluate_model, resolve_target

    console = _Console(markup=False)
    config, model = resolve_target(target, config_file, overrides or [], runs, console)
    accuracy = evaluate_model(config, model, console)
    console.print(
        f"{model}: accuracy {accuracy.value:.3f} ± {accuracy.margin:.3f} "
        f"({accuracy.right} of {accuracy.samples} held-out samples right)",
        highlight=False,
        soft_wrap=True,
    )


app.command()(simulate)


def _ask(name: str | None, runs: Path, request: control.Request) -> control.Reply:
    from asyncrl.run.control import ask
    from asyncrl.run.directory import find_run

    return ask(find_run(name, runs), request)


def _request(name: str | None, runs: Path, request: control.Request) -> None:
    """Send a request and print what happens now. Raises UserError when it is refused."""
    from wire.messages import control

    reply = _ask(name, runs, request)
    if isinstance(reply, control.Refused):
        raise UserError(reply.reason)
    if isinstance(reply, control.Accepted):
        typer.echo(reply.message)


def _print_result(
    console: Console, directory: Path, result: RunResult, *, to_continue: str
) -> None:
    before, after = result.accuracy_before, result.accuracy_after
    if before is not None and after is not None:
        console.print(
            Text.assemble(
                (f"held-out accuracy {before:.3f} → {after:.3f}", "bold"),
                f" ({after - before:+.3f}) after {result.steps} steps, "
                f"{result.wall_seconds:.0f} s of training",
            ),
            highlight=False,
        )
    else:
        console.print(
            f"stopped after {result.steps} steps; continue with: {to_continue}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"result: {directory / 'result.json'}", highlight=False, soft_wrap=True)
    console.print(f"report: {directory / 'report.html'}", highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line; an expected error becomes one paragraph and an exit code."""
    try:
        _main()
    except KeyboardInterrupt:  # before a run handles signals itself, or after it
        sys.exit(Interrupted.exit_code)


def _main() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_PlainFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal or log that is not UTF-8
        sys.stdout.reconfigure(errors="replace")
    sys.path.insert(0, str(Path.cwd()))  # so that `my_rewards:function` is found
    from engine.errors import EngineError
    from monitoring.errors import MonitoringError
    from scheduler.errors import SchedulerError
    from trainer.errors import TrainerError
    from wire.errors import WireError

    try:
        refuse_foreign_packages()
        app()
    except AsyncrlError as error:
        _exit(error, error.exit_code)
    except (MonitoringError, OSError) as error:
        _exit(error, UserError.exit_code)
    except (EngineError, SchedulerError, TrainerError, WireError) as error:
        _exit(error, AsyncrlError.exit_code)


class _Console(Console):
    """Prints while somebody reads: a pipe that is closed (`| head`) does not end a run."""

    def on_broken_pipe(self) -> None:
        """Discard what is printed from now on, instead of ending the process."""
        self.quiet = True
        discarded = os.open(os.devnull, os.O_WRONLY)
        os.dup2(discarded, sys.stdout.fileno())
        os.close(discarded)


class _PlainFormatter(logging.Formatter):
    """Lines without terminal escapes: a warning may quote a downloaded data set."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        return without_controls(super().format(record))


def _exit(error: Exception, code: int) -> None:
    message = f"[bold red]error:[/] {escape(without_controls(str(error)))}"
    Console(stderr=True).print(message, highlight=False, soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
