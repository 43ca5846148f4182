"""Whether the tests find faults: small ones are put in by hand, and each must fail the tests named.

    python -m benchmarks.mutants [--smoke | --quick | --only NAME] [--tree PATH] [--json FILE]

`benchmarks/mutants.toml` has the list. A mutant is one place of one file, the text that replaces
it, what that would do to a user, and the tests that find it. Nothing but these tests is run, so a
mutant costs seconds. A test that is named and passes all the same makes the benchmark fail, too.

Two copies of the tree are made in a temporary folder, each for half of the mutants. In each, all
named tests first run without a mutant, and must pass: otherwise a failure would prove nothing. The
checkout itself is only read. Every mutant has a fork of a process that has imported libraries, and
nothing of the copy. No compiled code gets from one mutant to another: a mutant's file has
a time of its own, by which Python knows its bytecode, and numba keeps machine code in the temporary
folder, by a digest of all kernels (`asyncrl.rollout.jit`). A mutant of a module from which kernels
take constants gets an empty folder, because those are not in the digest.

`--tree` takes another checkout.
"""

import argparse
import importlib.util
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.table import Table

from benchmarks.harness import commit_of, console, table, write_json

LIST = Path(__file__).with_suffix(".toml")
_COPIES = 2
_SMOKE, _QUICK = 2, 10
_SECONDS = 600
"""Longest time of a mutant's tests. All of them together take a few seconds on a quiet machine."""
_SHOWN = 3000
"""Characters of what pytest says if it does not run."""
_ALL_SECONDS = 3600
"""Longest time of all named tests."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault, and the tests that find it."""

    name: str
    package: str
    file: str
    """Relative to the tree."""
    old: str
    """Exactly once in the file."""
    new: str
    harm: str
    """To a user."""
    tests: tuple[str, ...]
    """Each fails: `tests/...py::test_name`, in at least one of its cases."""


@dataclass(slots=True)
class Outcome:
    mutant: Mutant
    seconds: float = 0.0
    killed_by: list[str] = field(default_factory=list)
    """Tests that failed."""
    problem: str = ""
    """Why it does not count as killed; empty if it does."""

    @property
    def killed(self) -> bool:
        """Whether every test that it names has failed."""
        return not self.problem


class NotJudged(Exception):  # noqa: N818 - says what happened
    """Tests that did not run to their end, or that fail without a mutant."""


def mutants(path: Path = LIST) -> list[Mutant]:
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    for entry in entries:
        entry["tests"] = tuple(entry["tests"])
    return [Mutant(**entry) for entry in entries]


def libraries_of(path: Path) -> list[str]:
    """Modules that many tests of a list import, none of them of the tree."""
    found: list[str] = tomllib.loads(path.read_text(encoding="utf-8")).get("libraries", [])
    return found


def some(all_mutants: list[Mutant], number: int) -> list[Mutant]:
    """The first mutant of each of the first packages."""
    first: dict[str, Mutant] = {}
    for mutant in all_mutants:
        first.setdefault(mutant.package, mutant)
    return list(first.values())[:number]


def occurrences(tree: Path, mutant: Mutant) -> int:
    """How often the old text is in the file; 0 if there is no such file."""
    file = tree / mutant.file
    return file.read_text(encoding="utf-8").count(mutant.old) if file.is_file() else 0


def _serve() -> None:
    """Run pytest in a fork for each line of standard input. Self-contained: it is given to `-c`.

    The libraries of the command line are imported before, which takes longer than most tests.
    """
    import importlib
    import json
    import os
    import signal
    import sys
    from contextlib import suppress

    import pytest

    for name in sys.argv[1:]:
        importlib.import_module(name)
    numba = sys.modules.get("numba")
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            signal.alarm(order["seconds"])
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ["NUMBA_CACHE_DIR"] = order["machine_code"]
            if numba is not None:
                numba.config.CACHE_DIR = order["machine_code"]
            code = int(pytest.main(order["arguments"]))
            sys.stdout.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(status), flush=True)


class Copy:
    """A copy of a checkout's files in which mutants run one after another."""

    def __init__(self, tree: Path, folder: Path, libraries: Sequence[str] = ()) -> None:
        self.root = folder / "tree"
        self._libraries = libraries
        self._folder = folder
        self._changes = 0
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=tree,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in listed.stdout.split("\0"):
            source, target = tree / name, self.root / name
            if name and (source.is_file() or source.is_symlink()):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        self._kernels = [
            text
            for path in self.root.rglob("*.py")
            if "@kernel" in (text := path.read_text(encoding="utf-8"))
        ]

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [sys.executable, "-c", f"{inspect.getsource(_serve)}\n_serve()", *self._libraries],
            cwd=self.root,
            env={
                **{
                    key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")
                },
                "PYTHONPATH": str(self.root),
                "PYTHONDONTWRITEBYTECODE": "",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        with self._server:
            self._server.terminate()

    def failed(self, tests: Iterable[str], seconds: int, machine_code: str = "numba") -> list[str]:
        """The tests that fail, without the names of their cases."""
        wanted = sorted(set(tests))
        report, log = self._folder / "report.xml", self._folder / "log"
        report.unlink(missing_ok=True)
        arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported
        arguments += ["-o", "junit_family=xunit1", f"--junit-xml={report}", *wanted]
        code = self._pytest(arguments, seconds, log, self._folder / machine_code)
        if code not in (0, 1) or not report.is_file():
            late = " (the tests did not end in time)" if code == -signal.SIGALRM else ""
            said = log.read_text(encoding="utf-8", errors="replace")[-_SHOWN:]
            raise NotJudged(f"pytest ended with {code}{late}:\n{said}")
        ran, failed = set[str](), set[str]()
        for case in ET.parse(report).iter("testcase"):  # noqa: S314 - written by our own pytest
            test = f"{case.get('file')}::{(case.get('name') or '').partition('[')[0]}"
            if case.find("skipped") is None:
                ran.add(test)
            if case.find("failure") is not None or case.find("error") is not None:
                failed.add(test)
        if missing := [one for one in wanted if one not in ran]:
            raise NotJudged(f"these tests did not run: {', '.join(missing)}")
        return sorted(failed)

    def _pytest(self, arguments: list[str], seconds: int, log: Path, machine_code: Path) -> int:
        order = {
            "arguments": arguments,
            "seconds": seconds,
            "log": str(log),
            "machine_code": str(machine_code),
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise NotJudged("the process that runs tests has ended")
        return int(answer)

    def run(self, mutant: Mutant) -> Outcome:
        """Put the fault in, run its tests, and take it out again."""
        outcome, start = Outcome(mutant), time.monotonic()
        found = occurrences(self.root, mutant)
        if found != 1:
            outcome.problem = f"its old text is {found} times in {mutant.file}"
            return outcome
        try:
            with self._changed(mutant):
                outcome.killed_by = self.failed(mutant.tests, _SECONDS, self._machine_code(mutant))
        except NotJudged as error:
            outcome.problem = str(error)
        else:
            in_vain = sorted(set(mutant.tests) - set(outcome.killed_by))
            if not outcome.killed_by:
                outcome.problem = "it survived"
            elif in_vain:
                outcome.problem = f"these tests do not find it: {', '.join(in_vain)}"
        outcome.seconds = time.monotonic() - start
        return outcome

    @contextmanager
    def _changed(self, mutant: Mutant) -> Iterator[None]:
        path = self.root / mutant.file
        status, text = path.stat(), path.read_text(encoding="utf-8")
        self._changes += 1
        # Python knows bytecode by the source's size and its time in whole seconds.
        when = int(status.st_mtime) + self._changes
        try:
            path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
            os.utime(path, (when, when))
            yield
        finally:
            path.write_text(text, encoding="utf-8")
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            bytecode = Path(importlib.util.cache_from_source(str(path)))
            bytecode.unlink(missing_ok=True)

    def _machine_code(self, mutant: Mutant) -> str:
        """The folder of compiled kernels; an empty one if kernels may import what is changed."""
        module = mutant.file.removesuffix(".py").replace("/", ".")
        imported = re.compile(rf"^(from|import) {re.escape(module)}\b", re.MULTILINE)
        in_digest = "@kernel" in (self.root / mutant.file).read_text(encoding="utf-8")
        shared = in_digest or not any(imported.search(text) for text in self._kernels)
        return "numba" if shared else f"numba-{mutant.name}"


def judge(copy: Copy, part: list[Mutant], screen: Console) -> list[Outcome]:
    """Outcomes of some mutants, one after another."""
    outcomes = []
    with copy:
        broken = copy.failed([test for one in part for test in one.tests], _ALL_SECONDS)
        if broken:
            raise NotJudged(f"these tests fail without a mutant: {', '.join(broken)}")
        for mutant in part:
            outcomes.append(copy.run(mutant))
            said = "killed" if outcomes[-1].killed else f"NOT KILLED: {outcomes[-1].problem}"
            screen.print(f"{mutant.name}: {said}", markup=False, highlight=False, soft_wrap=True)
    return outcomes


def judge_all(
    tree: Path, chosen: list[Mutant], libraries: Sequence[str], screen: Console
) -> list[Outcome]:
    """Outcomes of all chosen mutants, in their order. Raises NotJudged."""
    ordered = sorted(chosen, key=lambda one: one.tests)  # equal numbers of each file's tests
    parts = [part for i in range(_COPIES) if (part := ordered[i::_COPIES])]
    # The sandbox of older commits covers /tmp, and what lies there.
    place = os.environ.get("TMPDIR", "/var/tmp")  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="asyncrl-mutants-", dir=place) as folder:
        copies = [Copy(tree, Path(folder) / str(i), libraries) for i in range(len(parts))]
        with ThreadPoolExecutor(_COPIES) as pool:
            found = pool.map(judge, copies, parts, [screen] * len(parts))
            by_name = {one.mutant.name: one for part in found for one in part}
    return [by_name[one.name] for one in chosen]


def table_of(outcomes: list[Outcome]) -> Table:
    rows = (
        (
            one.mutant.name, one.mutant.package,
            "\n".join(one.killed_by) if one.killed else f"[bold red]NOT KILLED[/] {one.problem}",
            f"{one.seconds:.1f}",
        )
        for one in outcomes
    )  # fmt: skip
    return table("mutants", "mutant,package,killed by,seconds", rows, left=("package", "killed by"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument("--smoke", action="store_true", help=f"{_SMOKE} mutants, seconds")
    how_many.add_argument(
        "--quick", action="store_true", help=f"{_QUICK} mutants of as many packages"
    )
    how_many.add_argument("--only", metavar="NAME", help="one mutant")
    parser.add_argument("--tree", metavar="PATH", type=Path, help="another checkout")
    parser.add_argument("--list", metavar="FILE", type=Path, default=LIST, help="other mutants")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, raw and ratios")
    args = parser.parse_args(arguments)
    chosen = mutants(args.list)
    if args.only is not None:
        chosen = [one for one in chosen if one.name == args.only]
        if not chosen:
            parser.error(f"there is no mutant {args.only} in {args.list}")
    if args.smoke or args.quick:
        chosen = some(chosen, _SMOKE if args.smoke else _QUICK)
    screen = console()
    tree = args.tree or Path(__file__).parents[1]
    try:
        outcomes = judge_all(tree.resolve(), chosen, libraries_of(args.list), screen)
    except NotJudged as error:
        screen.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 1
    screen.print(table_of(outcomes))
    killed = sum(one.killed for one in outcomes)
    screen.print(f"{killed} of {len(outcomes)} killed")
    if args.json:
        raw = {
            "commit": commit_of(tree),
            "mutants": [
                {"name": one.mutant.name, "package": one.mutant.package, "file": one.mutant.file,
                 "harm": one.mutant.harm, "killed_by": one.killed_by, "problem": one.problem,
                 "seconds": round(one.seconds, 1)}
                for one in outcomes
            ],
        }  # fmt: skip
        ratios = {"killed": killed / max(1, len(outcomes))}
        write_json(args.json, "mutants", raw, ratios, smoke=args.smoke)
    return 0 if killed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
