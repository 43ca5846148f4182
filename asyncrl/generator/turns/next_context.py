"""What follows a turn: more of its conversation, or another one, which is a context of its own.

    q │ turn 1 │ o │ turn 2                      the environment begins another conversation
    r │ turn 3                                   and returns to the first one:
    q │ turn 1 │ o │ turn 2 │ o' │ turn 4

A conversation that begins like an earlier one continues it: its tokens up to the last turn in
common are those of that time, generated turns included. They are observed now, since each of them
is trained on in the context in which it was drawn. With `environment.history: template`, and where
nothing is in common, all of it is rendered by the chat template.

A context so begun is a function of turns before it and of the environment. So it stands if these
are accepted (`asyncrl.rollout.contexts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncrl.environments.chat_messages import mean_the_same
from asyncrl.environments.protocol import Message, Observation, StepResult
from asyncrl.environments.translation import Observed, Tools, Translation, is_ids
from asyncrl.generator.turns.conversation import Episode, Turn


def answered(turn: Turn, result: StepResult, episode: Episode, translation: Translation) -> Turn:
    """A turn with the environment's answer to it, unless the sample ends with it.

    Args:
        turn: the policy's, not in the episode yet.
        result: what the environment said.
        episode: up to this turn.
        translation: into tokens.

    Raises:
        BadAnswerError: the answer cannot be shown to the policy.
    """
    said = result.observation
    if result.done or said is None:
        return turn
    place = len(episode.turns)
    if not result.new_conversation:
        tools = episode.tools_before(place)
        observed = translation.observed(episode.before(place), said, turn.action, tools)
        return _with(turn, observed)
    own = episode.traits.tools if result.tools is None else result.tools
    begun = _continued(said, own, [*episode.turns, turn], episode, translation)
    return replace(_with(turn, begun or translation.begun(said, own)), tools=own)


def _with(turn: Turn, observed: Observed) -> Turn:
    tokens, messages, begins = observed
    return replace(turn, observed=tokens, answer=messages, begins_context=begins)


def _continued(
    said: Observation,
    tools: Tools,
    turns: Sequence[Turn],
    episode: Episode,
    translation: Translation,
) -> Observed | None:
    """A conversation as the continuation of the turn that it has in common; None if it has none."""
    if is_ids(said) or not translation.keeps_history:
        return None
    messages = translation.conversation(said, {})  # type: ignore[arg-type]  # no ids
    translation.check_prompt(messages)
    common = _last_in_common(messages, tools, turns, episode)
    if common is None:
        return None
    place, count = common
    action = turns[place].action
    new = translation.between(episode.before(place), messages[count:], action, tools)
    if place == len(episode.turns):  # the present conversation grows
        return Observed(new, messages)
    tokens = np.concatenate([episode.seen_before(place), action, new])
    return Observed(tokens, messages, begins_context=True)


def _last_in_common(
    messages: Sequence[Message], tools: Tools, turns: Sequence[Turn], episode: Episode
) -> tuple[int, int] | None:
    """The last turn that a conversation has in common with an earlier one, and the messages to it.

    Of several the one with most messages, and of these the newest.
    """
    found: tuple[int, int] | None = None
    own = episode.traits.tools
    count = _in_common(messages, 0, episode.conversation)
    for place, turn in enumerate(turns):
        count = _in_common(messages, count, [turn.message])
        least, most = (0 if found is None else found[1]), len(messages) - 1
        if count is not None and least <= count <= most and own == tools:
            found = place, count
        if turn.tools is not None:
            own, count = turn.tools, 0
        count = _in_common(messages, count, turn.answer)
    return found


def _in_common(
    messages: Sequence[Message], count: int | None, more: Sequence[Message]
) -> int | None:
    """How many messages are in common if the next ones are; None if one was another."""
    if count is None or len(messages) < count + len(more):
        return None
    pairs = zip(messages[count:], more, strict=False)
    return count + len(more) if all(mean_the_same(*pair) for pair in pairs) else None
