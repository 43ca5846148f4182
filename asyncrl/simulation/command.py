"""Implements `asyncrl simulate`: its options, and the output of its results."""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from typer import Argument, Context, Option

_MIN_TABLE_WIDTH = 104
"""Columns that the tables need; a narrower terminal wraps their lines."""
_MIN_WIDE_WIDTH = 132
_OF_ONE_TURN = ("median", "sigma", "longest", "new_length", "regimes")


def _environments(context: Context, delay: float | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a cluster set by environment options. Raises UserError."""
    from asyncrl.errors import UserError
    from asyncrl.simulation.environments import Environments

    def given(names: Iterable[str]) -> list[str]:
        sources = {name: context.get_parameter_source(name) for name in names}
        return [name for name, one in sources.items() if one and one.name != "DEFAULT"]

    if delay is None:
        for name in given(options):
            raise UserError(
                f"--{name.replace('_', '-')} needs --environment-latency: it is about environments"
            )
        return {}
    for name in given(_OF_ONE_TURN):
        raise UserError(
            f"--{name.replace('_', '-')} is for samples of one turn; with --environment-latency "
            "lengths follow from --turns and --turn-tokens"
        )
    own = dict(options)
    sigma, sessions, room = map(own.pop, ("environment_sigma", "sessions", "kv_tokens"))
    environments = Environments(delay, sigma, **own)
    return {"environments": environments, "sessions": sessions, "kv_room": room}


def simulate(
    context: Context,
    config_file: Annotated[
        Path | None,
        Argument(metavar="CONFIG", help="A run's YAML file: its sizes and its scheduler."),
    ] = None,
    from_run: Annotated[
        Path | None, Option("--from", metavar="RUN", help="A run's folder: its costs and lengths.")
    ] = None,
    model: Annotated[str, Option(help="1.5b, 7b or 32b; ignored with --from.")] = "7b",
    generators: Annotated[
        int | None, Option(min=1, max=4096, help="Generators; default 32.")
    ] = None,
    slots: Annotated[
        int | None, Option(min=1, help="Samples a generator decodes at once; default 64.")
    ] = None,
    steps: Annotated[int | None, Option(min=2, help="Optimizer steps; default 12.")] = None,
    median: Annotated[
        float | None, Option(min=1, help="Median response length in tokens; default 1000.")
    ] = None,
    sigma: Annotated[
        float, Option(min=0, help="Standard deviation of the log of the lengths.")
    ] = 1.0,
    longest: Annotated[
        int | None, Option(min=1, help="Longest response in tokens; default 16384.")
    ] = None,
    drift: Annotated[
        float | None, Option(min=0, max=1, help="Total variation per token and step; default 3e-4.")
    ] = None,
    rule: Annotated[
        Literal["token", "block"] | None,
        Option(
            help="Verification rule: token by token (the worst case; default) or by block, as in "
            "a run (default with --from)."
        ),
    ] = None,
    outside: Annotated[
        float | None,
        Option(min=0, max=1, help="Share of tokens outside the stored top K; default 0."),
    ] = None,
    noise: Annotated[
        float | None,
        Option(min=0, max=1, help="Total variation per token at the noise floor; default 0."),
    ] = None,
    redraft: Annotated[
        float, Option(min=0, max=1, help="Acceptance of rejected continuations as drafts; 0: none.")
    ] = 0.7,
    new_length: Annotated[
        float, Option(min=0, max=1, help="Share of rejected answers that get another length.")
    ] = 0.0,
    signal_share: Annotated[
        float | None,
        Option(
            min=0.01, max=1, help="Dynamic sampling in each mode: the share of groups with signal."
        ),
    ] = None,
    trainer_devices: Annotated[
        float | None,
        Option(help="Devices of the trainer; default: as many as balance the generators."),
    ] = None,
    gpus_per_generator: Annotated[
        int, Option(min=1, help="GPUs of each generator (tensor parallel).")
    ] = 1,
    bandwidth: Annotated[
        float | None,
        Option(
            min=1e-3, help="Link of a node, each way, in Gbit/s; default: nothing waits for it."
        ),
    ] = None,
    latency: Annotated[float, Option(min=0, help="Between two nodes, one way, in ms.")] = 0.0,
    gpus_per_node: Annotated[int, Option(min=1, help="GPUs of a node.")] = 8,
    fan_out: Annotated[
        int, Option(min=1, help="Nodes to which a node passes weights on; 1: a chain.")
    ] = 1,
    chunk: Annotated[
        float, Option(min=1e-3, help="Pieces in which nodes pass weights on, in MiB.")
    ] = 1.0,
    delta_share: Annotated[
        float, Option(min=1e-3, max=1, help="Bytes of a delta, as a share of the whole weights.")
    ] = 1.0,
    failures: Annotated[
        float, Option(min=0, help="Losses per node and hour; see --failure-scope.")
    ] = 0.0,
    failure_scope: Annotated[
        Literal["generator", "node"],
        Option(help="What a failure loses: one generator, or all of a node."),
    ] = "node",
    restart: Annotated[
        float, Option(min=1e-3, help="Until what was lost is back, in seconds.")
    ] = 120.0,
    trainer_failures: Annotated[float, Option(min=0, help="Losses of the trainer per hour.")] = 0.0,
    checkpoint_every: Annotated[
        int, Option(min=1, help="Steps between the checkpoints that a lost trainer has.")
    ] = 1,
    slow_share: Annotated[
        float, Option(min=0, max=1, help="Share of the generators that are slow.")
    ] = 0.0,
    slow_factor: Annotated[
        float, Option(min=1, help="How many times as long slow generators take.")
    ] = 2.0,
    environment_latency: Annotated[
        float | None,
        Option(min=0, help="Median seconds of an environment's step; default: one turn."),
    ] = None,
    environment_sigma: Annotated[
        float, Option(min=0, help="Standard deviation of the log of these seconds.")
    ] = 1.0,
    turns: Annotated[
        float, Option(min=1, help="Median turns of a sample, with environments.")
    ] = 8.0,
    turn_tokens: Annotated[float, Option(min=1, help="Median generated tokens of a turn.")] = 200.0,
    observation_tokens: Annotated[
        float, Option(min=0, help="Median tokens of an observation.")
    ] = 200.0,
    go_back: Annotated[
        Literal["restore", "replay", "start over"],
        Option(help="How environments get to before a turn that verification has changed."),
    ] = "replay",
    sessions: Annotated[
        int | None,
        Option(min=1, help="Open environments of a generator; default: 4 times its slots."),
    ] = None,
    kv_tokens: Annotated[
        float | None,
        Option(min=1, help="Tokens of KV that a generator has room for; default: the GPU's."),
    ] = None,
    mode: Annotated[
        list[str] | None,
        Option(help="Simulate only this mode. Repeat for more; speed is over the first."),
    ] = None,
    regimes: Annotated[
        bool, Option("--regimes", help="Map response length and drift (takes minutes).")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Simulate every mode on a cluster, with the scheduler of a real run.

    Costs come from a roofline model, or from a run with --from.
    """
    note = partial(typer.echo, err=True)
    note("simulating; a line follows for each mode")  # before the imports, which take a second
    from dataclasses import asdict

    from asyncrl.config.run_config import load_config
    from asyncrl.simulation import study, tables
    from asyncrl.simulation.failures import Failures, Stragglers
    from asyncrl.simulation.fit import fit_run
    from asyncrl.simulation.network import Network

    network = Network(bandwidth, latency, gpus_per_node, fan_out, chunk, delta_share)
    losses = Failures(failures, failure_scope, restart, trainer_failures, checkpoint_every)
    given: dict[str, Any] = {
        "generators": generators, "slots": slots, "steps": steps, "median": median,
        "longest": longest, "drift": drift, "rule": rule, "outside": outside,
        "noise": noise, "trainer_devices": trainer_devices, "signal_share": signal_share,
    }  # fmt: skip
    changes = {name: value for name, value in given.items() if value is not None}
    changes |= {
        "model": model.lower(), "sigma": sigma, "redraft": redraft, "new_length": new_length,
        "gpus_per_generator": gpus_per_generator, "network": network, "failures": losses,
        "stragglers": Stragglers(slow_share, slow_factor),
    }  # fmt: skip
    options = {
        "environment_sigma": environment_sigma, "turns": turns, "turn_tokens": turn_tokens,
        "observation_tokens": observation_tokens, "go_back": go_back, "sessions": sessions,
        "kv_tokens": kv_tokens,
    }  # fmt: skip
    changes |= _environments(context, environment_latency, options)
    if steps is not None:
        changes["warm_up"] = min(4, steps - 1)
    config = None if config_file is None else load_config(config_file)
    fit = None
    if from_run is not None:
        note(f"reading the costs and lengths of {from_run}")
        fit = fit_run(from_run)
    cluster = study.cluster(config, fit, **changes)
    note(f"{cluster.steps} steps of {cluster.generators} generators in each mode")
    least = _MIN_TABLE_WIDTH if environment_latency is None else _MIN_WIDE_WIDTH
    console = Console(width=max(Console().width, least))
    if regimes:
        places = study.regime(cluster, note=note)
        if as_json:
            typer.echo(json.dumps([asdict(place) for place in places], indent=2))
        else:
            console.print(tables.regime_table(places))
        return
    outcomes = study.compare(cluster, mode or study.MODES, note)
    if config is not None or fit is not None:
        outcomes["as configured"] = cluster.configured()
    if as_json:
        typer.echo(json.dumps({mode: asdict(one) for mode, one in outcomes.items()}, indent=2))
    else:
        console.print(tables.mode_table(cluster, outcomes))
