"""English text that this machine has: docstrings, manual pages, packages' documentation.

Nothing can be downloaded, so the text of a language model with a real vocabulary comes from what is
installed. Paragraphs are the unit: one is taken if it is long enough and mostly letters and spaces
(prose, not code), and only once (boilerplate is repeated thousands of times). Sources are read in
a fixed order, so the same machine gives the same text.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_DOCSTRING = re.compile(r':\s*\n\s+[rR]?"""(.*?)"""', re.DOTALL)
_PACKAGES = ("numpy", "torch", "transformers", "pydantic", "msgspec", "rich", "sympy")
"""Their docstrings are read, after those of the standard library."""
_MANUAL_SECTIONS = ("7", "8", "5", "1", "3")
_DOCUMENTS = re.compile(r"^(README|NEWS|FAQ|copyright|.*\.(txt|md|rst))(\.gz)?$")
_LONGEST_FILE = 1 << 21
"""Bytes of a file that are read."""
_BREAKS = frozenset(("SH", "SS", "PP", "P", "LP", "TP", "IP", "HP", "sp", "RE", "RS", "Sh", "Pp"))
_FONTS = frozenset(("B", "I", "BR", "IR", "RB", "RI", "BI", "IB", "SM"))
_ROFF_ESCAPES = (
    (re.compile(r"\\f(\(..|\[\w*\]|.)"), ""),
    (re.compile(r"\\(\*?\((..)|\*?\[\w+\])"), "'"),
    (re.compile(r"\\s[-+]?\d"), ""),
    (re.compile(r"\\[&%:|^/,]"), ""),
    (re.compile(r"\\([-e ~'`.])"), r"\1"),
)


@dataclass(frozen=True)
class CorpusShape:
    """Which paragraphs are taken, and how many characters of each source."""

    docstrings: int = 9_000_000
    """Most characters of docstrings."""
    manuals: int = 7_000_000
    """Most characters of manual pages."""
    documents: int = 4_000_000
    """Most characters of files in /usr/share/doc."""
    shortest: int = 80
    """Characters of the shortest paragraph."""
    prose: float = 0.88
    """Smallest share of letters and spaces in a paragraph."""
    minimum: int = 6_000_000
    """With fewer characters in all there is no corpus."""


def read_corpus(shape: CorpusShape) -> list[str]:
    """Documents of paragraphs, one paragraph a line."""
    seen: set[bytes] = set()
    documents: list[str] = []
    sources: tuple[tuple[Callable[[], Iterator[Iterable[str]]], int], ...] = (
        (_docstrings, shape.docstrings),
        (_manuals, shape.manuals),
        (_documents, shape.documents),
    )
    for source, most in sources:
        taken = 0
        for paragraphs in source():
            if taken >= most:
                break
            chosen = [p for p in map(_one_line, paragraphs) if _is_new_prose(p, shape, seen)]
            if chosen:
                documents.append("\n".join(chosen))
                taken += len(documents[-1])
    total = sum(map(len, documents))
    if total < shape.minimum:
        raise RuntimeError(
            f"this machine has {total:,} characters of English text (docstrings of Python's "
            f"packages, /usr/share/man, /usr/share/doc) and {shape.minimum:,} are needed; install "
            "manual pages (Debian: apt-get install manpages manpages-dev)"
        )
    return documents


def _one_line(paragraph: str) -> str:
    return " ".join(paragraph.split())


def _is_new_prose(paragraph: str, shape: CorpusShape, seen: set[bytes]) -> bool:
    """Whether a paragraph is long enough, prose, and not there yet; remembers it."""
    if len(paragraph) < shape.shortest or not paragraph.isascii():
        return False
    letters = [c for c in paragraph if c.isalpha()]
    if len(letters) + paragraph.count(" ") < shape.prose * len(paragraph):
        return False
    # Without digits, case and punctuation: "version 1.2" repeats "version 1.1".
    mark = hashlib.blake2b("".join(letters).lower().encode(), digest_size=8).digest()
    if mark in seen:
        return False
    seen.add(mark)
    return True


def _docstrings() -> Iterator[list[str]]:
    """Paragraphs of the docstrings of each module, Python's language reference first."""
    from pydoc_data import topics

    for topic in sorted(topics.topics):
        yield re.split(r"\n\s*\n", topics.topics[topic])
    standard = Path(sysconfig.get_paths()["stdlib"])
    installed = Path(sysconfig.get_paths()["purelib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
    for folder in (standard, *(installed / name for name in _PACKAGES)):
        for path in sorted(folder.rglob("*.py")):
            if skipped.isdisjoint(path.relative_to(folder).parts):
                text = path.read_bytes()[:_LONGEST_FILE].decode("utf-8", "replace")
                yield [
                    paragraph
                    for docstring in _DOCSTRING.findall(text)
                    for paragraph in re.split(r"\n\s*\n", docstring)
                ]


def _manuals() -> Iterator[list[str]]:
    """Paragraphs of each English manual page; pages in the order of a digest of their names."""
    for section in _MANUAL_SECTIONS:
        pages = Path("/usr/share/man", f"man{section}").glob("*")
        for path in sorted(pages, key=lambda p: hashlib.blake2b(p.name.encode()).digest()):
            yield _roff_paragraphs(_read(path))


def _documents() -> Iterator[list[str]]:
    for path in sorted(Path("/usr/share/doc").rglob("*")):
        if _DOCUMENTS.match(path.name) and path.is_file():
            yield re.split(r"\n\s*\n", _read(path))


def _read(path: Path) -> str:
    """A text file, decompressed; empty if it cannot be read (a broken link, a damaged file)."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                return packed.read(_LONGEST_FILE).decode("utf-8", "replace")
        return path.read_bytes()[:_LONGEST_FILE].decode("utf-8", "replace")
    except (OSError, EOFError):
        return ""


def _roff_paragraphs(page: str) -> list[str]:
    """The running text of a manual page in roff (the `man` and the usual `mdoc` macros)."""
    paragraphs: list[list[str]] = [[]]
    for line in page.splitlines():
        if line.startswith((".", "'")):
            name, _, rest = line[1:].strip().partition(" ")
            if name in _BREAKS or not name:
                paragraphs.append([])
            elif name in _FONTS:
                paragraphs[-1].append(rest.replace('"', ""))
        else:
            paragraphs[-1].append(line)
    found = []
    for lines in paragraphs:
        text = "\n".join(lines)
        for pattern, replacement in _ROFF_ESCAPES:
            text = pattern.sub(replacement, text)
        found.append(text)
    return found


if __name__ == "__main__":
    corpus = read_corpus(CorpusShape())
    sys.stdout.write(f"{len(corpus):,} documents, {sum(map(len, corpus)):,} characters\n")
