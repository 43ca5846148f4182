"""What reward functions get of a sample of several turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from asyncrl.generator.conversation import Episode, runs_of
from asyncrl.rollout.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Exchange:
    """A sample's turns in words."""

    response: str
    """The policy's turns, one after the other."""
    turns: list[dict[str, Any]]
    """`role` ("assistant" or "environment"), `content` and `context`, the number of the context
    (from 0) that the text is in. An observation that begins a context is its whole prompt."""
    conversations: list[list[dict[str, Any]]]
    """Of each context its chat messages, from the first to the policy's last turn in it."""

    @property
    def columns(self) -> dict[str, Any]:
        """What is added to the example."""
        return {"turns": self.turns, "conversations": self.conversations}


def exchange_of(
    trajectory: Trajectory, episode: Episode, decode: Callable[[list[int]], str]
) -> Exchange:
    """A finished sample in words; `decode` leaves special tokens out.

    The first and every other text is the policy's. A conversation has the messages that the
    environment gave, and earlier turns as messages also where the chat template shortens them
    (`environment.history: template`).
    """
    runs = runs_of(trajectory.tokens, ~trajectory.trained)
    said = [decode(one.tolist()) for one in runs]
    starts = [0, *accumulate(len(one) for one in runs)]
    contexts = np.searchsorted(trajectory.contexts, starts[:-1], side="right").tolist()
    turns = [
        {"role": ("assistant", "environment")[place % 2], "content": text, "context": context}
        for place, (text, context) in enumerate(zip(said, contexts, strict=True))
    ]
    ours = range(0, len(runs), 2)
    last = [one for one in ours if one + 2 not in ours or contexts[one + 2] > contexts[one]]
    return Exchange("".join(said[::2]), turns, [_up_to(one // 2, episode, said) for one in last])


def _up_to(turn: int, episode: Episode, said: Sequence[str]) -> list[dict[str, Any]]:
    """The conversation that a turn (from 0) ends."""
    if turn < len(episode.turns):
        return [*episode.before(turn), episode.turns[turn].message]
    return [*episode.before(turn), {"role": "assistant", "content": said[2 * turn]}]
