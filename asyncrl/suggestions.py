"""The hint at the end of an error about an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean x?' or, if nothing is close, ' Known: a, b.'; empty if nothing is known.

    Example:
        >>> nearest("enginee", ["engine", "trainer"])
        " Did you mean 'engine'?"
        >>> nearest("x", ["engine", "trainer"])
        ' Known: engine, trainer.'
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names)}." if names else ""
