"""Command lines for messages, complete, so that a user can paste them."""

import shlex
from collections.abc import Sequence
from pathlib import Path

DEFAULT_RUNS = Path("runs")
"""The folder in which commands look for runs without `--runs`."""


def command_for(verb: str, run: Path) -> str:
    """Return the command `verb` for the run in this folder, with `--runs` if needed.

    Example:
        >>> command_for("status", Path("runs/mine"))
        'asyncrl status mine'
        >>> command_for("stop", Path("/data/my runs/mine"))
        "asyncrl stop mine --runs '/data/my runs'"
    """
    words = ["asyncrl", verb, run.name]
    if run.parent != DEFAULT_RUNS:
        words += ["--runs", str(run.parent)]
    return shlex.join(words)


def resume_command(
    run: Path, config_file: Path | None = None, overrides: Sequence[str] = (), verb: str = "run"
) -> str:
    """Return the command that continues the run, by default from its own configuration."""
    words = ["asyncrl", verb, str(config_file or run / "config.yaml")]
    for override in overrides if config_file is not None else ():
        words += ["--set", override]
    return shlex.join([*words, "--resume"])
