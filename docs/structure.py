"""Draw docs/structure.svg: the folders by floor, and what each is for.

    python docs/structure.py            writes the picture
    python docs/structure.py --check    exits with 1 when the picture on disk is stale

Floors come from the import contract in pyproject.toml, sentences from the packages' docstrings. A
test runs `--check`, so the picture agrees with the code.
"""

from __future__ import annotations

import ast
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

from asyncrl.monitoring.report.markup import Markup, element

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "structure.svg"

WIDTH, MARGIN, GAP, LINE, HEAD = 1240, 20, 12, 14, 24
CHARACTER = 6.1
"""Width of a character of the sentences' font, pixels."""


@dataclass
class Folder:
    """One entry of a floor, which is a folder or a module."""

    name: str
    sentence: str
    parts: list[str]
    """Folders in it."""
    files: int


def floors() -> list[list[str]]:
    """Names from the top floor down, as the import contract has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in settings["contracts"] if c["type"] == "layers")
    return [[name.strip() for name in layer.split("|")] for layer in layers]


def summary(source: Path) -> str:
    """First paragraph of a module's docstring."""
    text = ast.get_docstring(ast.parse(source.read_text())) or ""
    return " ".join(text.split("\n\n", 1)[0].split()).replace("`", "")


def read(name: str) -> Folder:
    """Read one folder or module of `asyncrl`."""
    path = ROOT / "asyncrl" / name
    if not path.is_dir():
        return Folder(f"{name}.py", summary(path.with_suffix(".py")), [], 1)
    inside = [one for one in path.rglob("*.py") if one.name != "__init__.py"]
    parts = sorted(one.parent.name for one in path.glob("*/__init__.py"))
    return Folder(f"{name}/", summary(path / "__init__.py"), parts, len(inside))


def drawn(folder: Folder, x: float, y: float, width: float, lines: list[str]) -> Markup:
    """One folder with its sentence, at a place."""
    texts = [
        element("text", line, x=x + 8, y=y + HEAD + LINE * (place + 1) - 4)
        for place, line in enumerate(lines)
    ]
    return element(
        "g",
        element(
            "rect", x=x, y=y, width=width, height=HEAD + 8 + LINE * len(lines), rx=5,
            fill="#f6f8fb", stroke="#8fa3bf",
        ),
        element("text", folder.name, x=x + 8, y=y + 17, class_="name"),
        element("text", f"{folder.files}", x=x + width - 8, y=y + 17, text_anchor="end"),
        *texts,
    )  # fmt: skip


def picture() -> str:
    """The SVG as text."""
    boxes: list[Markup] = []
    y = float(MARGIN + 26)
    for floor in floors():
        folders = [read(name) for name in floor]
        width = (WIDTH - 2 * MARGIN - GAP * (len(folders) - 1)) / len(folders)
        room = int((width - 16) / CHARACTER)
        texts = [
            textwrap.wrap(one.sentence, room)
            + textwrap.wrap(", ".join(f"{part}/" for part in one.parts), room)
            for one in folders
        ]
        for place, (folder, lines) in enumerate(zip(folders, texts, strict=True)):
            boxes.append(drawn(folder, MARGIN + place * (width + GAP), y, width, lines))
        y += HEAD + 8 + LINE * max(map(len, texts)) + GAP
    style = (
        "text{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:10px;fill:#44546a}"
        ".name{font-size:13px;font-weight:bold;fill:#1c3557}"
        ".note{font-family:sans-serif;font-size:12px}"
    )
    note = (
        "The folders of asyncrl/ by floor: each imports only from floors below its own. "
        "On the right, its number of modules."
    )
    height = y - GAP + MARGIN
    svg = element(
        "svg",
        element("style", style),
        element("rect", x=0, y=0, width=WIDTH, height=height, fill="#ffffff"),
        element("text", note, x=MARGIN, y=MARGIN + 8, class_="note"),
        *boxes,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height:.0f}",
        width=WIDTH,
        height=height,
    )
    return svg + "\n"


def main() -> int:
    """Write the picture, or check it."""
    if "--check" in sys.argv[1:]:
        stale = not PICTURE.exists() or PICTURE.read_text() != picture()
        if stale:
            print(f"{PICTURE} is stale: run `make docs`", file=sys.stderr)
        return int(stale)
    PICTURE.write_text(picture())
    return 0


if __name__ == "__main__":
    sys.exit(main())
