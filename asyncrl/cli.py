"""The command line: `asyncrl run|status|stop|pause|resume|report|eval`.

Exit codes: 0 done (or stopped as asked), 1 the run failed, 2 something given must be changed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from asyncrl.errors import AsyncrlError, UserError
from asyncrl.package_guard import refuse_foreign_packages

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Asynchronous RL post-training on data that is exactly on-policy.",
)

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting: engine.kind=vllm"),
]
RunName = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="Name or folder; the newest run if left out.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Runs = Annotated[Path, typer.Option("--runs", help="Where run folders are.")]

_DEFAULT_RUNS = Path("runs")


@app.command()
def run(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.")],
    overrides: Set = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of this run.")
    ] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Throw away an earlier run of this name.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the whole configuration and exit.")
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Like --dry-run, with the meaning of every key."),
    ] = False,
) -> None:
    """Train: evaluate, run the steps, evaluate again, write a report."""
    from asyncrl.config import dump_config, load_config
    from asyncrl.config_reference import explain_config

    config = load_config(config_file, overrides or [])
    if dry_run or explain:
        typer.echo(explain_config(config) if explain else dump_config(config), nl=False)
        return
    if resume and clean:
        raise UserError("--resume goes on with a run, --clean throws it away: say one of them")
    console = Console()
    from asyncrl.run.execute import execute
    from asyncrl.run.prepare import prepare

    result = execute(prepare(config, console), resume=resume, clean=clean, console=console)
    _print_result(console, config.directory, result)


@app.command()
def status(name: RunName = None, runs: Runs = _DEFAULT_RUNS, as_json: _Json = False) -> None:
    """Say what a run is doing."""
    from asyncrl.run.control import ask
    from asyncrl.run.directory import find_run
    from wire.messages import control

    reply = ask(find_run(name, runs), control.StatusRequest())
    if not isinstance(reply, control.StatusReply):
        raise AsyncrlError(f"the controller answered {reply}")
    if as_json:
        typer.echo(json.dumps(reply.status, indent=2))
        return
    for key, value in reply.status.items():
        if key == "processes":
            for process, about in value.items():
                details = ", ".join(f"{k} {v}" for k, v in about.items() if v is not None)
                typer.echo(f"  {process}: {details}")
        elif value is not None:
            typer.echo(f"{key.replace('_', ' ')}: {_short(value)}")


@app.command()
def stop(name: RunName = None, runs: Runs = _DEFAULT_RUNS) -> None:
    """Finish the step in hand, write a checkpoint, end."""
    from wire.messages import control

    _request(name, runs, control.StopRequest())


@app.command()
def pause(name: RunName = None, runs: Runs = _DEFAULT_RUNS) -> None:
    """Stop drawing tokens; everything is kept."""
    from wire.messages import control

    _request(name, runs, control.PauseRequest())


@app.command("resume")
def resume_run(name: RunName = None, runs: Runs = _DEFAULT_RUNS) -> None:
    """Go on after `pause`. (To go on with a run that ended: asyncrl run CONFIG --resume.)"""
    from wire.messages import control

    _request(name, runs, control.ResumeRequest())


@app.command()
def report(name: RunName = None, runs: Runs = _DEFAULT_RUNS) -> None:
    """Write report.html of a run, also of one that is going on or was killed."""
    from asyncrl.run.directory import find_run
    from monitoring.report.write import write_report

    typer.echo(f"report: {write_report(find_run(name, runs))}")


@app.command("eval")
def evaluate(
    what: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run, or a model directory.")],
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Task and sampling, for a MODEL.")
    ] = None,
    overrides: Set = None,
    runs: Runs = _DEFAULT_RUNS,
) -> None:
    """Held-out accuracy of a run's newest checkpoint or of a model, sampled as in training."""
    from asyncrl.evaluation.command import evaluate_model, resolve_target

    console = Console()
    config, model = resolve_target(what, config_file, overrides or [], runs, console)
    accuracy = evaluate_model(config, model, console)
    console.print(
        f"{model}: accuracy {accuracy.value:.3f} ± {accuracy.margin:.3f} "
        f"({accuracy.right} of {accuracy.samples} held-out samples right)",
        highlight=False,
    )


@app.command()
def simulate(
    config_file: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="A run's: its sizes and its scheduler are used."),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Directory of a run: its costs, its lengths."),
    ] = None,
    model: Annotated[str, typer.Option(help="1.5b, 7b or 32b; not with --from.")] = "7b",
    generators: Annotated[int | None, typer.Option(min=1, max=4096, help="Default: 256.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Rows of a generator; 64.")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Optimizer steps; 12.")] = None,
    median: Annotated[float | None, typer.Option(min=1, help="Tokens of an answer; 1000.")] = None,
    sigma: Annotated[float, typer.Option(min=0, help="Of the logarithm of lengths.")] = 1.0,
    longest: Annotated[int | None, typer.Option(min=1, help="Limit of an answer; 16384.")] = None,
    drift: Annotated[
        float | None, typer.Option(min=0, max=1, help="Total variation per token and step; 3e-4.")
    ] = None,
    rule: Annotated[
        Literal["token", "block"] | None,
        typer.Option(help="What verification keeps: token (the worst case), or by block."),
    ] = None,
    redraft: Annotated[
        float, typer.Option(min=0, max=1, help="Acceptance of the old rest as a draft; 0: none.")
    ] = 0.7,
    trainer_devices: Annotated[
        float | None, typer.Option(help="Default: as many as balance the generators.")
    ] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help="Only these modes (repeat); speed is over the first.")
    ] = None,
    regimes: Annotated[
        bool, typer.Option("--regimes", help="Map answer length and drift (some minutes).")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Simulate every mode on a cluster: the same scheduler, costs from a roofline or from a run."""
    from dataclasses import asdict

    from asyncrl.config import load_config
    from asyncrl.simulation import study, tables
    from asyncrl.simulation.fit import fit_run

    given: dict[str, Any] = {
        "generators": generators, "slots": slots, "steps": steps, "median": median,
        "longest": longest, "drift": drift, "rule": rule, "trainer_devices": trainer_devices,
    }  # fmt: skip
    changes = {name: value for name, value in given.items() if value is not None}
    changes |= {"model": model.lower(), "sigma": sigma, "redraft": redraft}
    if steps is not None:
        changes["warm_up"] = min(4, steps - 1)
    config = None if config_file is None else load_config(config_file)
    fit = None if from_run is None else fit_run(from_run)
    cluster = study.cluster(config, fit, **changes)
    if regimes:
        places = study.regime(cluster)
        if as_json:
            typer.echo(json.dumps([asdict(place) for place in places], indent=2))
        else:
            _wide().print(tables.regime_table(places))
        return
    outcomes = study.compare(cluster, mode or study.MODES)
    if config is not None or fit is not None:
        outcomes["as configured"] = cluster.configured()
    if as_json:
        typer.echo(json.dumps(study.as_json(outcomes), indent=2))
    else:
        _wide().print(tables.table(cluster, outcomes))


def _wide() -> Console:
    """For tables that cannot be narrow."""
    return Console(width=max(Console().width, 104))


def _request(name: str | None, runs: Path, request: object) -> None:
    from asyncrl.run.control import ask
    from asyncrl.run.directory import find_run
    from wire.messages import control

    reply = ask(find_run(name, runs), request)  # type: ignore[arg-type]
    if isinstance(reply, control.Refused):
        raise UserError(reply.reason)
    if isinstance(reply, control.Accepted):
        typer.echo(reply.message)


def _print_result(console: Console, directory: Path, result: dict[str, object]) -> None:
    before, after = result["accuracy_before"], result["accuracy_after"]
    if isinstance(before, float) and isinstance(after, float):
        console.print(
            f"[bold]held-out accuracy {before:.3f} → {after:.3f}[/] "
            f"({after - before:+.3f}) after {result['steps']} steps, "
            f"{float(str(result['wall_seconds'])):.0f} s of training",
            highlight=False,
        )
    else:
        console.print(
            f"stopped after {result['steps']} steps; go on with --resume", highlight=False
        )
    console.print(f"result: {directory / 'result.json'}", highlight=False, soft_wrap=True)
    console.print(f"report: {directory / 'report.html'}", highlight=False, soft_wrap=True)


def _short(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Entry point: errors become one paragraph and an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - so that `my_rewards:function` is found
    console = Console(stderr=True)
    from engine.errors import EngineError
    from monitoring.errors import MonitoringError
    from scheduler.errors import SchedulerError
    from trainer.errors import TrainerError
    from wire.errors import WireError

    try:
        refuse_foreign_packages()
        app()
    except AsyncrlError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except (
        MonitoringError,
        EngineError,
        SchedulerError,
        TrainerError,
        WireError,
        OSError,
    ) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, MonitoringError | OSError) else 1)


if __name__ == "__main__":
    main()
