"""Notices when somebody else's distribution provides one of our import packages.

The packages are named `engine`, `scheduler`, `cache`, ... as the project's folders are. Such names
are easily taken twice, and then the wrong module is imported without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import packages_distributions

from asyncrl.errors import UserError

OURS = ("asyncrl", "engine", "scheduler", "cache", "trainer", "monitoring")


def refuse_foreign_packages(providers: Mapping[str, Sequence[str]] | None = None) -> None:
    """Raise UserError when another distribution provides a package of ours.

    Args:
        providers: distributions by the import package that they provide; None asks the
            environment.
    """
    providers = packages_distributions() if providers is None else providers
    foreign = {
        name: sorted({other for other in providers.get(name, ()) if other != "asyncrl"})
        for name in OURS
    }
    clashes = "; ".join(f"{name!r} by {', '.join(by)}" for name, by in foreign.items() if by)
    if clashes:
        raise UserError(
            f"another distribution provides an import package of asyncrl: {clashes}. Install "
            "asyncrl into a virtual environment of its own (`make setup` does), or uninstall "
            "the other one"
        )
