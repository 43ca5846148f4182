"""Draw docs/structure.svg: the packages by floor, their modules, and who imports whom.

    python docs/structure.py            writes the picture
    python docs/structure.py --check    exits with 1 when the picture on disk is stale

Floors come from the import contract in pyproject.toml, entries from the code's own docstrings,
arrows from its import statements. So the picture cannot disagree with the code for long: a test
runs `--check`.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.monitoring.report.markup import Markup, element

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "structure.svg"

WIDTH, MARGIN, GAP, LINE, HEAD = 1240, 20, 44, 15, 26
CHARACTER = 6.1
"""Width of a character of the entries' font, pixels."""


@dataclass
class Box:
    """One package: its entries, and where it is drawn."""

    name: str
    entries: list[tuple[str, str]]
    """(module or sub-package, summary)."""
    columns: int = 1
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    imports: Counter[str] = field(default_factory=Counter)
    """Import statements by package imported."""

    @property
    def height(self) -> float:
        """Pixels."""
        return HEAD + 10 + LINE * -(-len(self.entries) // self.columns)


def floors() -> list[list[str]]:
    """Package names from the top floor down, as the import contract has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in settings["contracts"] if c["type"] == "layers")
    below = [[name.strip() for name in layer.split("|")] for layer in layers[1:]]
    return [["asyncrl"], *below]


def summary(path: Path) -> str:
    """First line of a module's docstring."""
    source = path / "__init__.py" if path.is_dir() else path
    text = ast.get_docstring(ast.parse(source.read_text())) or ""
    return text.split("\n", 1)[0].rstrip(".").replace("`", "")


def package(name: str, known: set[str]) -> Box:
    """Read one package."""
    folder = ROOT / name
    inside = [
        path
        for path in sorted(folder.iterdir(), key=lambda path: (path.is_file(), path.name))
        if (path.is_dir() and not path.is_symlink() and (path / "__init__.py").exists())
        or (path.suffix == ".py" and not path.stem.startswith("__"))
    ]
    entries = [(path.stem + "/" * path.is_dir(), summary(path)) for path in inside]
    box = Box(name, entries)
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for module in modules:
                target = module.removeprefix("asyncrl.").split(".", 1)[0]  # asyncrl.TARGET.module
                if target in known and target != name:
                    box.imports[target] += 1
    return box


def laid_out(rows: list[list[str]]) -> tuple[list[Box], float]:
    """All boxes with their places, and the height of the picture."""
    known = {name for row in rows for name in row}
    boxes: list[Box] = []
    y = float(MARGIN + 30)
    for row in rows:
        made = [package(name, known) for name in row]
        width = (WIDTH - 2 * MARGIN - GAP * (len(row) - 1)) / len(row)
        for place, box in enumerate(made):
            box.x, box.y, box.width = MARGIN + place * (width + GAP), y, width
            box.columns = 2 if len(row) == 1 else 1
        boxes += made
        y += max(box.height for box in made) + GAP
    return boxes, y - GAP + MARGIN


def drawn_box(box: Box) -> Markup:
    """One package with its entries."""
    parts = [
        element(
            "rect", x=box.x, y=box.y, width=box.width, height=box.height, rx=5,
            fill="#f6f8fb", stroke="#8fa3bf",
        ),
        element("text", f"{box.name}/", x=box.x + 10, y=box.y + 18, class_="name"),
        element(
            "text", "imports " + ", ".join(sorted(box.imports)) if box.imports else "",
            x=box.x + box.width - 10, y=box.y + 18, text_anchor="end",
        ),
    ]  # fmt: skip
    per_column = -(-len(box.entries) // box.columns)
    room = box.width / box.columns - 20
    for place, (name, text) in enumerate(box.entries):
        column, line = divmod(place, per_column)
        x = box.x + 10 + column * box.width / box.columns
        y = box.y + HEAD + LINE * (line + 1) - 4
        left = int(room / CHARACTER) - 19
        short = text if len(text) <= left else text[: left - 1].rstrip() + "…"
        parts.append(element("text", name, x=x, y=y, class_="entry"))
        parts.append(element("text", short, x=x + 19 * CHARACTER, y=y, class_="text"))
    return element("g", *parts)


def arrow(source: Box, target: Box, place: int, count: int) -> Markup:
    """One line for all imports of one package by another."""
    x1 = source.x + source.width * (place + 1) / (len(source.imports) + 1)
    x2 = min(max(x1, target.x + 30), target.x + target.width - 30)
    y1, y2 = source.y + source.height, target.y - 4
    middle = (y1 + y2) / 2
    title = element("title", f"{source.name} imports {target.name} in {count} places")
    return element(
        "path",
        title,
        d=f"M{x1:.0f} {y1:.0f} C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}",
        fill="none",
        stroke="#5b7ba8",
        stroke_width=1.4,
        marker_end="url(#head)",
    )


def picture() -> str:
    """The SVG as text."""
    boxes, height = laid_out(floors())
    by_name = {box.name: box for box in boxes}
    top = boxes[0]
    style = (
        "text{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:10px;fill:#44546a}"
        ".name{font-size:14px;font-weight:bold;fill:#1c3557}.entry{fill:#1c3557}"
        ".note{font-family:sans-serif;font-size:12px}"
    )
    head = element(
        "marker",
        element("path", d="M0 0 L7 3.5 L0 7 z", fill="#5b7ba8"),
        id="head", markerWidth=7, markerHeight=7, refX=5, refY=3.5, orient="auto",
        markerUnits="userSpaceOnUse",
    )  # fmt: skip
    note = (
        "An arrow is an import; arrows only point down, and pass behind what is between. "
        f"{top.name}/ imports every package below it; those arrows are left out."
    )
    arrows = [
        arrow(box, by_name[target], place, box.imports[target])
        for box in boxes
        if box is not top
        for place, target in enumerate(sorted(box.imports, key=lambda name: by_name[name].x))
    ]
    svg = element(
        "svg",
        element("style", style),
        element("defs", head),
        element("rect", x=0, y=0, width=WIDTH, height=height, fill="#ffffff"),
        element("text", note, x=MARGIN, y=MARGIN + 8, class_="note"),
        *arrows,
        *(drawn_box(box) for box in boxes),
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
