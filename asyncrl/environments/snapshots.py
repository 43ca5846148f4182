"""The states that an environment can go back to, and whether they are still what they were.

A `snapshot` that returns the environment's own list, or a copy that shares parts with it, changes
with the next `step`. To go back to such a state is to go back nowhere: what follows would be the
answers of a game that was never played, and nothing would fail. So each state is compared, when it
is needed, with what it was. Import-light: worker processes load this file.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

from asyncrl.environments.protocol import BadAnswerError

_MOST_BYTES = 1 << 20
"""Of a state that is compared. A larger one would cost milliseconds a turn."""


class Snapshots:
    """The states before each turn of a session."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, bytes | None]] = []

    def __len__(self) -> int:
        """Turns that have begun."""
        return len(self._kept)

    def add(self, state: Any) -> None:
        """Keep the state before the next turn."""
        self._kept.append((state, _mark(state)))

    def take(self, turn: int) -> Any:
        """The state before this turn (from 0); it and later ones are forgotten.

        Raises:
            BadAnswerError: it has changed since.
        """
        state, mark = self._kept[turn]
        del self._kept[turn:]
        if mark is not None and _mark(state) != mark:
            raise BadAnswerError(
                "wrong_type",
                f"the state that `snapshot` returned before turn {turn} has changed since: it "
                "shares parts with the environment. Return a deep copy (copy.deepcopy)",
            )
        return state

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()


def _mark(state: Any) -> bytes | None:
    """Tells whether a state has changed; None if it cannot be pickled, or is large."""
    text = _Hashed()
    try:
        pickle.Pickler(text, protocol=5).dump(state)
    except Exception:  # noqa: BLE001 - of the user's objects
        return None
    return text.hash.digest()


class _Hashed:
    """A file that is hashed instead of kept."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self._left = _MOST_BYTES

    def write(self, data: Any) -> int:
        """Take in some bytes. Raises ValueError if there are too many."""
        size = memoryview(data).nbytes
        self._left -= size
        if self._left < 0:
            raise ValueError("it is too large to be compared")
        self.hash.update(data)
        return size
