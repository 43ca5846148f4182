"""What mkdocs does in addition, for pages that are read in the repository as well as on the site.

The pages at the repository's root belong to the site, the README as its first page. Their links,
and those to them, are relative to the repository; here they become relative to the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
AT_ROOT = {
    "README.md": "index.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Pages outside docs/, and what they are called on the site."""
_LINK = re.compile(r"(\]\()([^)#\s]+)")
_CODE = re.compile(r"(<code[^>]*>)([^<]*)(?=</code>)")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the repository's root, and the decisions to the navigation."""
    for name, place in AT_ROOT.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=for_site(text, name)))
    decisions = sorted(file.src_uri for file in files if re.match(r"decisions/\d", file.src_uri))
    section = next(entry["Decisions"] for entry in config["nav"] if "Decisions" in entry)
    section += [page for page in decisions if page not in section]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page of docs/ to where their targets are on the site."""
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"boost": 0.5}  # a setting's meaning comes before its history
    if page.file.generated_by:
        return markdown
    return for_site(markdown, f"docs/{page.file.src_uri}")


def on_page_content(html: str, **_: Any) -> str:
    """Let names in the cells of tables break after a dot or an underscore, and nowhere else."""
    cells = re.compile(r"(?<=<td>).*?(?=</td>)", re.DOTALL)
    return cells.sub(
        lambda cell: _CODE.sub(
            lambda code: code[1] + re.sub(r"(?<=[._=])(?=\w)", "<wbr>", code[2]), cell[0]
        ),
        html,
    )


def for_site(text: str, page: str) -> str:
    """A page's text with the links that the site needs.

    Args:
        text: Markdown, as it is in the repository.
        page: its path in the repository.
    """
    parts = _FENCE.split(text)
    parts[::2] = [_LINK.sub(lambda match: _moved(match, page), part) for part in parts[::2]]
    return "".join(parts)


def _moved(match: re.Match[str], page: str) -> str:
    target = match[2]
    if "://" in target:
        return match[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    here = posixpath.dirname(_place(page))
    return match[1] + posixpath.relpath(_place(path), here or ".")


def _place(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path in ("docs/decisions", "decisions"):
        return "decisions/README.md"
    return AT_ROOT.get(path, path.removeprefix("docs/"))
