"""Parts of messages: similar names, quoted values of bounded length, and commands to paste."""

import difflib
import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_COMPARED = 64
"""Characters of a name that are compared: difflib takes quadratic time."""
_LISTED = 16
"""Most names that are listed where none is similar."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean x?' or, if nothing is close, ' Known: a, b.'; empty without names.

    Initials are close, and many names are counted instead.

    Example:
        >>> nearest("enginee", ["engine", "trainer"])
        " Did you mean 'engine'?"
        >>> nearest("lr", ["lora", "learning_rate"])
        " Did you mean 'learning_rate'?"
        >>> nearest("x", ["engine", "trainer"])
        ' Known: engine, trainer.'
        >>> nearest("x", map(str, range(1_000)))
        ' None of the 1,000 that there are is similar.'
    """
    names, name = sorted(known), name[:_COMPARED]
    initials = [one for one in names if name == "".join(word[:1] for word in one.split("_"))]
    close = initials or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f" Did you mean {close[0]!r}?"
    if len(names) > _LISTED:
        return f" None of the {len(names):,} that there are is similar."
    return f" Known: {', '.join(names)}." if names else ""


def nearest_path(path: Path) -> str:
    """Return ' Did you mean x?', or that the folder is missing too; empty if nothing is close."""
    folder = path.parent
    if not folder.is_dir():
        above = folder.parent
        close = _closest(folder.name, above) if above.is_dir() else None
        if close is not None and (close / path.name).exists():
            return f" Did you mean {close / path.name}?"
        return f" The folder {folder} does not exist either."
    close = _closest(path.name, folder)
    return f" Did you mean {close}?" if close is not None else ""


def looked_from() -> str:
    """Return the places at which a relative path of a configuration was looked for."""
    return f"(looked from {Path.cwd()} and from the folder of the configuration file)"


def shortened(text: str, limit: int = 160) -> str:
    """Return the text, or its beginning and '...' if it is longer than `limit` characters.

    Errors quote the user's values through this function, so that none of them prints megabytes.

    Example:
        >>> shortened("a" * 200, 10)
        'aaaaaaa...'
    """
    return text if len(text) <= limit else text[: limit - 3] + "..."


def written(value: Any, limit: int = 160) -> str:
    """Return a value as a YAML file has it, shortened.

    Example:
        >>> print(written("a"), written(True), written([{"name": "f", "args": None}]))
        'a' true [{"name": "f", "args": null}]
    """
    if isinstance(value, str):
        return repr(shortened(value, limit))
    text = json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)
    return shortened(text, limit)


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
    folder = [] if run.parent == DEFAULT_RUNS else ["--runs", str(run.parent)]
    return shlex.join(["asyncrl", verb, run.name, *folder])


def resume_command(
    run: Path, config_file: Path | None = None, overrides: Sequence[str] = (), verb: str = "run"
) -> str:
    """Return the command that continues the run, by default from its own configuration."""
    words = ["asyncrl", verb, str(config_file or run / "config.yaml")]
    for override in overrides if config_file is not None else ():
        words += ["--set", override]
    return shlex.join([*words, "--resume"])


def _closest(name: str, folder: Path) -> Path | None:
    names = [entry.name for entry in folder.iterdir() if entry.name != name]
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return folder / found[0] if found else None
