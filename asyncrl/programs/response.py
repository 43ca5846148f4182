"""Which part of a response is its program. Import-light."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_OPENING = re.compile(r"([ \t]*)[^`]*(`{3,})[ \t]*([^\s`]*)[^`]*\Z")
_PYTHON = frozenset({"py", "py3", "python", "python2", "python3"})


@dataclass(slots=True)
class _Block:
    indent: int
    fence: str
    tag: str
    lines: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        if not self.tag:
            return 1
        return 2 if self.tag.lower().strip("{.}") in _PYTHON else 0


def program_of(response: str) -> str:
    r"""The last block between ``` that is marked as Python, else the last one that has no mark.

    If there is none of both, the last block; without blocks the response itself. A block ends with
    a line that is ``` and nothing else, or with the response.

    >>> program_of("```python\nprint(1)\n```\nOutput:\n```\n1\n```")
    'print(1)\n'
    """
    blocks = _blocks(response)
    if not blocks:
        return response
    best = max(block.rank for block in blocks)
    return "".join(next(one for one in reversed(blocks) if one.rank == best).lines)


def _blocks(response: str) -> list[_Block]:
    blocks: list[_Block] = []
    inside: _Block | None = None
    for line in response.replace("\r\n", "\n").splitlines(keepends=True):
        stripped = line.strip()
        if inside is None:
            opening = _OPENING.match(line)
            if opening is not None and line.endswith("\n"):
                inside = _Block(len(opening[1]), opening[2], opening[3])
                blocks.append(inside)
        elif stripped.startswith(inside.fence) and not stripped.strip("`"):
            inside = None
        else:
            blank = len(line) - len(line.lstrip(" \t"))
            inside.lines.append(line[min(inside.indent, blank) :])
    return blocks
