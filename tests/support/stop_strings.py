"""Where a response ends by its stop strings, found by looking at its text."""

from __future__ import annotations

from collections.abc import Sequence


def end_by_looking(
    tokens: Sequence[int], pieces: Sequence[bytes], strings: Sequence[str]
) -> int | None:
    """After how many tokens the text has a stop string; None if it has none."""
    for count in range(1, len(tokens) + 1):
        text = b"".join(pieces[token] for token in tokens[:count]).decode("utf-8", "replace")
        if any(string in text for string in strings):
            return count
    return None
