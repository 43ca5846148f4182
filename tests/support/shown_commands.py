"""Every command line that a page, an example's header or `--help` shows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import typer

from asyncrl.cli.app import app
from asyncrl.cli.entry import main  # adds the commands

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
GENERATED = "cli.md"
"""The page made of `--help`. Of its blocks only the examples count, the epilogs."""
EXAMPLES = sorted(path for end in ("yaml", "py") for path in (ROOT / "examples").rglob(f"*.{end}"))
PROGRAMS = (
    *("asyncrl", "make", "python", "python3", "pip", "pytest", "git", "docker", "dc", "helm"),
    *("kubectl", "ray", "ssh", "kill", "promtool", "nvidia-smi", "curl", "mkdocs", "uv"),
)
"""What a command begins with outside of a block of them."""
FENCE = re.compile(r"^( *)(```+)(\w*)[^\n]*\n(.*?)^\1\2[ ]*$", re.DOTALL | re.MULTILINE)
"""A block: indentation, fence, language, text."""
SHELLS = ("bash", "sh", "shell", "console")
COMMENT = re.compile(r"\s+(?:#.*|\(.*\))$")
"""After a command: `# text`, or `(text)` in the header of an example."""


def shown_commands() -> dict[str, list[str]]:
    """Command lines, and the files that show each. `--help` stands for its epilogs."""
    found: dict[str, list[str]] = {}
    for path in PAGES:
        for command in _of_page(path):
            found.setdefault(command, []).append(path.name)
    for path in EXAMPLES:
        for command in _of_header(path):
            found.setdefault(command, []).append(str(path.relative_to(ROOT)))
    for command in _of_help():
        found.setdefault(command, []).append("--help")
    return found


def blocks(path: Path, language: str) -> list[str]:
    """The texts of a page's blocks in a language, in their order."""
    return [found[4] for found in FENCE.finditer(path.read_text("utf-8")) if found[3] == language]


def _of_page(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    for found in FENCE.finditer(text) if path.name != GENERATED else ():
        language, block = found[3], found[4]
        if language == "ini":
            yield from re.findall(r"^ExecStart=\S*/(asyncrl .*)$", block, re.MULTILINE)
            continue
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        yield from (
            _plain(line.strip())
            for line in lines
            if (language in SHELLS and line.strip())
            or (not language and _begins_with_a_program(line))
        )
    for found in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        command = found.replace(r"\|", "|").strip()
        if _begins_with_a_program(command):
            yield command


def _of_header(path: Path) -> Iterator[str]:
    """Lines of the comment that a configuration begins with, or of a module's docstring."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    else:
        lines = [line.removeprefix("#") for line in text.splitlines() if line.startswith("#")]
    yield from (_plain(line.strip()) for line in lines if _begins_with_a_program(line))


def _of_help() -> Iterator[str]:
    assert main is not None
    for command in typer.main.get_command(app).commands.values():  # type: ignore[attr-defined]
        yield command.epilog.removeprefix("Example: ")


def _begins_with_a_program(text: str) -> bool:
    """Whether it is more than the name of one."""
    first, *more = text.split() or [""]
    return first in PROGRAMS and bool(more)


def _plain(line: str) -> str:
    """The command without what explains it."""
    return " ".join(COMMENT.sub("", line).split())
