"""An environment that answers while no file `hold` is there, so that a fault falls into its wait.

It notes what happens to it in the file `notes`, one JSON object a line. Its answer is a digest of
the sample's row and seed and of all turns so far: given to another turn or sample, it is wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TURNS = 3


def answer_to(prompt: str, seed: int, turns: Sequence[Sequence[int]]) -> str:
    """Eight digits and the spaces between them."""
    text = json.dumps([prompt, seed, [list(turn) for turn in turns]])
    return " ".join(
        str(byte % 10) for byte in hashlib.blake2b(text.encode(), digest_size=8).digest()
    )


class Held:
    """See the module."""

    replay = "deterministic"

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.prompt, self.seed = "", 0
        self.turns: list[list[int]] = []

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self.prompt, self.seed = row["prompt"], seed
        self.note("opened")

    def step(self, action: Any) -> tuple[str, bool, float]:
        self.turns.append(list(action.tokens))
        self.note("asked")
        if (self.folder / "hold").exists():
            self.note("held")
        while (self.folder / "hold").exists():
            time.sleep(0.01)
        self.note("answered")
        done = len(self.turns) == TURNS
        return answer_to(self.prompt, self.seed, self.turns), done, 0.1 * len(self.turns[-1])

    def close(self) -> None:
        self.note("closed")

    def note(self, what: str) -> None:
        record = {
            "what": what,
            "pid": os.getpid(),
            "session": id(self),
            "prompt": self.prompt,
            "seed": self.seed,
            "turns": self.turns,
        }
        line = (json.dumps(record) + "\n").encode()
        notes = os.open(self.folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(notes, line)
        os.close(notes)


class World:
    """The test's side.

    Args:
        folder: of the environments.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def notes(self, what: str = "") -> list[dict[str, Any]]:
        """What was noted, in order: of this kind, or all."""
        file = self.folder / "notes"
        lines = file.read_text().splitlines() if file.exists() else []
        return [one for one in map(json.loads, lines) if what in ("", one["what"])]

    def hold(self) -> None:
        """From now on no environment answers."""
        (self.folder / "hold").touch()

    def release(self) -> None:
        """Let them answer."""
        (self.folder / "hold").unlink()
