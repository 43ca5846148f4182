"""Detect other distributions that provide one of asyncrl's import packages.

The packages have common names (`engine`, `scheduler`, `cache`, ...). When another distribution uses
the same name, Python imports whichever comes first, without a warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions

from asyncrl.errors import UserError

OURS = ("asyncrl", "engine", "trainer", "scheduler", "cache", "monitoring", "wire", "rollout")
"""Import packages of this distribution, as in pyproject.toml."""
_PROVIDED = re.compile(rf"\n({'|'.join(OURS)})(?:(?:/[^,\n]*)?\.py,|(?=\s))")
"""One of them in a line of RECORD, a list of files, or of top_level.txt, a list of packages."""


def refuse_foreign_packages(providers: Mapping[str, Sequence[str]] | None = None) -> None:
    """Refuse to start when another distribution provides one of asyncrl's packages.

    Args:
        providers: for each import package, the distributions that provide it; None reads the
            environment.

    Raises:
        UserError: another distribution provides one; the message names it.
    """
    providers = _providers() if providers is None else providers
    foreign = {
        name: sorted({other for other in providers.get(name, ()) if other != "asyncrl"})
        for name in OURS
    }
    clashes = "; ".join(f"{name!r} by {', '.join(by)}" for name, by in foreign.items() if by)
    if clashes:
        raise UserError(
            f"another distribution provides an import package of asyncrl: {clashes}. Install "
            "asyncrl into its own virtual environment (`make setup` does this), or uninstall the "
            "other distribution"
        )


def _providers() -> dict[str, list[str]]:
    """For each of our packages, the distributions that list it.

    `importlib.metadata.packages_distributions` takes apart the paths of all files of all
    distributions, which takes every command a second where there are 200.
    """
    found: dict[str, list[str]] = {}
    for distribution in distributions():
        lists = [distribution.read_text(file) or "" for file in ("top_level.txt", "RECORD")]
        for name in sorted(set(_PROVIDED.findall("\n".join(["", *lists, ""])))):
            found.setdefault(name, []).append(distribution.metadata["Name"])
    return found
