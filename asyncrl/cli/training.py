"""Commands that train or measure: `init`, `run`, `eval`, `export`, `simulate`."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from asyncrl.cli.app import TRAINING, Overrides, Runs, TerminalConsole, app
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.simulation.command import simulate
from asyncrl.suggestions import DEFAULT_RUNS, resume_command

if TYPE_CHECKING:
    from asyncrl.config.run_config import RunConfig
    from asyncrl.wire.records.evaluations import EvaluationRecord
    from asyncrl.wire.records.step import RunResult


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue this run from its newest whole checkpoint.")
]
Clean = Annotated[bool, typer.Option("--clean", help="Delete an earlier run of this name first.")]
Explain = Annotated[
    bool, typer.Option("--explain", help="Print the configuration with each key's meaning.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check and print all that a start does, and exit.")
]


@app.command(rich_help_panel=TRAINING, epilog="Example: asyncrl init first")
def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to write to; created if missing.")
    ] = Path(),
    prometheus: Annotated[
        bool,
        typer.Option(
            "--prometheus",
            help="Write monitoring/ instead: Prometheus's configuration for the runs of the "
            "folder, alert rules, and a dashboard for Grafana.",
        ),
    ] = False,
) -> None:
    """Write a configuration, a reward function and data to start from."""
    from asyncrl.initialise.write import initialise, write_monitoring

    for path in write_monitoring(folder) if prometheus else initialise(folder):
        typer.echo(f"wrote {path}")
    enter = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    if prometheus:
        start = "prometheus --config.file=monitoring/prometheus.yml"
        typer.echo(f"start it with: {enter}{start} --web.listen-address=127.0.0.1:9090")
    else:
        typer.echo(f"train with: {enter}asyncrl run run.yaml")


@app.command(
    rich_help_panel=TRAINING,
    epilog="Example: asyncrl run run.yaml --set engine.kind=vllm --set run.steps=20",
)
def run(
    config_file: ConfigFile,
    overrides: Overrides = None,
    resume: Resume = False,
    resume_from: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=1, help="Continue from the checkpoint of this step."),
    ] = None,
    changed_data: Annotated[
        bool,
        typer.Option("--changed-data", help="Resume even if the rows of the data have changed."),
    ] = False,
    clean: Clean = False,
    continues: Annotated[
        bool,
        typer.Option(
            "--continue",
            help="Resume the run if it exists, else begin it; do nothing if it is complete.",
        ),
    ] = False,
    health_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Answer /healthz and /readyz here.")
    ] = None,
    health_host: Annotated[str, typer.Option(help="Host of --health-port.")] = "127.0.0.1",
    dry_run: DryRun = False,
    explain: Explain = False,
    end_with: Annotated[
        int | None,
        typer.Option(
            metavar="PID",
            min=1,
            help="End as after Ctrl-C when PID, the process that started this one, ends.",
        ),
    ] = None,
) -> None:
    """Train: evaluate, run the steps, evaluate again, write a report."""
    if end_with is not None:
        _end_with(end_with)
    from asyncrl.config.effects import refuse_without_effect
    from asyncrl.config.reference import explain_config

    config = _config_for_rl(config_file, overrides or [])
    if explain:
        typer.echo(explain_config(config, partial(typer.style, dim=True)), nl=False)
        from asyncrl.startup.memory import memory_comment

        typer.echo(memory_comment(config))
        return
    if continues and (resume or clean or resume_from is not None):
        raise UserError("--continue resumes or begins a run: give it without --resume and --clean")
    resume = resume or resume_from is not None
    if not resume:
        refuse_without_effect(config, str(config_file))
    if resume and clean:
        raise UserError("--resume continues a run and --clean deletes it: give only one of them")
    once = continues
    if continues or resume:
        from asyncrl.runs.directory import may_be_resumed

        measures = changed_data or resume_from is not None or bool(_lacks(config.directory))
        once = continues or not measures
        if once and _is_complete(config):
            return
        resume = resume or may_be_resumed(config)
    console = TerminalConsole(markup=False)
    from asyncrl.runs.directory import refuse_unfit
    from asyncrl.startup.gpu_defaults import with_recorded_date, with_recorded_dtype
    from asyncrl.steering.user_commands import with_orders

    with contextlib.suppress(OSError):  # `execute` says what cannot be read
        refuse_unfit(config, resume=resume, clean=clean)
    if resume:
        say = partial(console.print, highlight=False, soft_wrap=True)
        config = with_recorded_dtype(with_recorded_date(with_orders(config, overrides or [], say)))
    from asyncrl.startup.prepare import prepare

    prepared = prepare(config, console)
    config = prepared.config
    if once and _is_complete(config):
        return  # the steps of `run.epochs` are known now
    if dry_run:
        from asyncrl.startup.machine_checks import refuse_taken_ports

        refuse_taken_ports(config, first=0)
        typer.echo("dry run: nothing was started and nothing was written to the run's folder")
        return
    from asyncrl.controller.execute import execute
    from asyncrl.health import Health

    result = execute(
        prepared,
        resume=resume,
        clean=clean,
        console=console,
        resume_from=resume_from,
        accept_changes=changed_data,
        health=None if health_port is None else Health(health_host, health_port),
    )
    again = resume_command(config.directory, config_file, overrides or [])
    _print_result(console, config, result, again)


@app.command(
    rich_help_panel=TRAINING, epilog="Example: asyncrl sft examples/sft.yaml --set sft.epochs=2"
)
def sft(
    config_file: ConfigFile,
    overrides: Overrides = None,
    resume: Resume = False,
    clean: Clean = False,
    dry_run: DryRun = False,
    explain: Explain = False,
) -> None:
    """Fine-tune on given responses before RL; the run is called NAME-sft."""
    from asyncrl.config.effects import refuse_without_effect
    from asyncrl.config.reference import explain_config
    from asyncrl.config.run_config import load_config
    from asyncrl.sft.command import train
    from asyncrl.tasks.model import no_transformers_bars

    if resume and clean:
        raise UserError("--resume continues a run and --clean deletes it: give only one of them")
    config = load_config(config_file, overrides or [])
    if explain:
        typer.echo(explain_config(config, partial(typer.style, dim=True), "sft"), nl=False)
        return
    if not resume:
        refuse_without_effect(config, str(config_file), "sft")
    with no_transformers_bars():
        command = resume_command(Path(), config_file, overrides or [], verb="sft")
        console = TerminalConsole(markup=False)
        train(config, console, resume=resume, clean=clean, dry_run=dry_run, command=command)


@app.command(
    "eval",
    rich_help_panel=TRAINING,
    epilog="Example: asyncrl eval runs/arithmetic --set evaluation.samples=4",
)
def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="A run, or a model directory.")
    ],
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Task and sampling for a MODEL.")
    ] = None,
    overrides: Overrides = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Measure held-out accuracy of a run's newest checkpoint or of a model."""
    from asyncrl.evaluation.command import evaluate_model, resolve_target
    from asyncrl.monitoring.terminal.evaluation_text import estimates
    from asyncrl.tasks.model import no_transformers_bars

    console = TerminalConsole(markup=False)
    with no_transformers_bars():
        config, model = resolve_target(target, config_file, overrides or [], runs, console)
        record = evaluate_model(config, model, console)
    say = partial(console.print, highlight=False, soft_wrap=True)
    for name, one in record.sets.items():
        say(f"{model}: {name}: accuracy {estimates(one)}; {one.tokens:.0f} tokens a response")
    if not record.sets:
        raise UserError("there are no held-out prompts; see task.evaluation_size")
    if not record.is_complete:
        raise AsyncrlError(
            "the evaluation is incomplete: too many rewards failed (evaluation.max_unscored_share)"
        )


@app.command(
    rich_help_panel=TRAINING,
    epilog="Example: asyncrl export runs/arithmetic --step 50 --dtype bfloat16",
)
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Checkpoint's step; default: the newest whole one.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output; default: RUN/exports/step-NNNNNN.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Data type of the weights; default: as trained."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="With LoRA: write the merged model, not the adapter.")
    ] = False,
    hub: Annotated[
        str | None,
        typer.Option(
            "--push-to-hub",
            metavar="OWNER/NAME",
            help="Upload it to this repository of the Hugging Face hub, made if missing.",
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --push-to-hub: only to a private repository.")
    ] = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Write a checkpoint's model as a Hugging Face directory, for transformers and vLLM.

    With LoRA, write the adapter as a PEFT directory.
    """
    from asyncrl.runs.directory import find_run
    from asyncrl.tasks.exported_model import describe, export_run, hub_token, push
    from asyncrl.tasks.model import no_transformers_bars

    if private and hub is None:
        raise UserError("--private is about --push-to-hub OWNER/NAME, which is not given")
    token = hub_token(hub) if hub is not None else ""
    with no_transformers_bars():
        found = find_run(run, runs, may_be_supervised=True)
        place, is_new = export_run(found, step, output, dtype, merge=merge)
    verb = "exported" if is_new else "already exported"
    typer.echo(f"{verb}: {place} ({describe(place)})")
    if hub is not None:
        typer.echo(f"uploaded: {push(place, hub, token, private=private)}")


app.command(
    rich_help_panel=TRAINING, epilog="Example: asyncrl simulate --generators 64 --model 7b"
)(simulate)


def _end_with(parent: int) -> None:
    """Send this command one SIGTERM when its parent ends. Raises UserError for another parent.

    The kernel's PR_SET_PDEATHSIG also comes when the thread that started this process ends, and
    several times when a parent with threads is killed: the second signal ends a run at once.
    """
    if sys.platform != "linux":
        raise UserError("--end-with works on Linux only")
    watched = -1
    with contextlib.suppress(ProcessLookupError):
        watched = os.pidfd_open(parent)
    if os.getppid() != parent or watched < 0:
        raise UserError(
            f"--end-with {parent}: process {os.getppid()} started this command, or process "
            f"{parent} has ended. Give the id of the process that starts it"
        )

    def end() -> None:
        select.select([watched], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, name="end-with", daemon=True).start()


def _config_for_rl(config_file: Path, overrides: Sequence[str]) -> RunConfig:
    from asyncrl.config.run_config import load_config
    from asyncrl.tasks.sft_config import ALGORITHM

    config = load_config(config_file, overrides)
    if config.trainer.algorithm == ALGORITHM:
        raise UserError(
            f"{config_file} is of a run of supervised fine-tuning, which `asyncrl sft` begins and "
            "continues; train its newest model on with --set model.path=RUN/checkpoints/STEP"
        )
    return config


def _is_complete(config: RunConfig) -> bool:
    from asyncrl.runs.directory import is_complete

    if not is_complete(config):
        return False
    typer.echo(
        f"the run in {config.directory} is complete; there is nothing to do. --set run.steps=N "
        "trains more, `asyncrl eval` measures again"
    )
    return True


def _lacks(directory: Path) -> list[str]:
    """Return what evaluations before and after training lack."""
    from asyncrl.monitoring.terminal.evaluation_text import incomplete

    whole = [one for one in _evaluations(directory) if one.when != "during"]
    return [text for one in whole if (text := incomplete(one))]


def _evaluations(directory: Path) -> list[EvaluationRecord]:
    from asyncrl.monitoring.errors import RecordError
    from asyncrl.monitoring.records.metrics_log import read_evaluations

    with contextlib.suppress(OSError, RecordError):
        return read_evaluations(directory / "evaluations.jsonl")
    return []


def _print_result(console: Console, config: RunConfig, result: RunResult, to_continue: str) -> None:
    from asyncrl.monitoring.terminal.evaluation_text import course
    from asyncrl.monitoring.terminal.formatting import counted, number
    from asyncrl.wire.records.evaluations import newest_of

    say, directory = partial(console.print, highlight=False, soft_wrap=True), config.directory
    before, after = result.accuracy_before, result.accuracy_after
    if before is not None and after is not None:
        accuracy = (f"held-out accuracy {before:.3f} → {after:.3f}", "bold")
        steps = counted(result.steps, "step")
        rest = f" ({after - before:+.3f}) after {steps}, {result.wall_seconds:.0f} s of training"
        if result.reward_before is not None and result.reward_after is not None:
            rest += f"; mean reward {result.reward_before:.3f} → {result.reward_after:.3f}"
        say(Text.assemble(accuracy, rest))
    elif result.steps >= config.run.steps:
        lacks = _lacks(directory)
        shown = "no held-out prompts, so no accuracy"
        if after is not None and not lacks:
            changed = "rows or functions changed since the first start"
            why = changed if config.evaluation.at_start else "evaluation.at_start is false"
            shown = (
                f"held-out accuracy {after:.3f}; {why}, so there is no earlier accuracy to compare "
                "it with"
            )
        elif lacks:
            shown = (
                f"held-out accuracy {number(before, 3)} → {number(after, 3)}, as the "
                f"{'; the '.join(lacks)}. The newest weights are measured again by: {to_continue}"
            )
        say(f"{result.steps} steps, {result.wall_seconds:.0f} s of training; {shown}")
    else:
        newest = newest_of(_evaluations(directory))
        known = before is not None or newest is not None
        so_far = f"; held-out accuracy {course(before, None, newest)}" if known else ""
        steps = counted(result.steps, "step")
        say(f"stopped after {steps}{so_far}; continue with: {to_continue}")
    say(f"result: {directory / 'result.json'}")
    say(f"report: {directory / 'report.html'}")
