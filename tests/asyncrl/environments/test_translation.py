"""What cannot fit is refused before it is tokenised, which would hold the generator up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from local_environments import NumberRenderer, in_words

from asyncrl.environments.protocol import BadAnswerError
from asyncrl.environments.translation import Translation, read_plainly


class Watched(NumberRenderer):
    """Remembers whether it was asked."""

    asked = False

    def _ids(self, said: Any) -> Any:
        self.asked = True
        return super()._ids(said)


def translation_of(renderer: NumberRenderer) -> Translation:
    return Translation(renderer, in_words, 100, max_observation_tokens=4, max_prompt_tokens=8)


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        ("7 " * 2000, "4000 characters, which environment.max_observation_tokens (4) cannot hold"),
        ([{"role": "tool", "content": "7 " * 2000}], "4004 characters"),
        ([7] * 5, "5 tokens, more than environment.max_observation_tokens (4)"),
    ],
)
def test_a_long_observation_is_refused_unread(observation: Any, message: str) -> None:
    renderer = Watched()
    with pytest.raises(BadAnswerError) as caught:
        translation_of(renderer).observed([], observation, [1], [])  # type: ignore[arg-type]
    assert caught.value.reason == "too_long"
    assert message in str(caught.value)
    assert not renderer.asked
    assert translation_of(renderer).observed([], "7 8", [1], []).tokens.tolist() == [7, 8]  # type: ignore[arg-type]


def test_a_long_prompt_is_refused_unread() -> None:
    renderer = Watched()
    with pytest.raises(BadAnswerError, match=r"engine.max_model_len \(8\) cannot hold"):
        translation_of(renderer).prompt([{"role": "user", "content": "7 " * 2000}], [])
    assert not renderer.asked


def test_a_turns_message_is_without_the_string_that_ended_it() -> None:
    """As other servers give it; the tokens and `action.text` have it."""
    called = {"role": "assistant", "content": "7 8 9", "tool_calls": [{}]}
    for read in (read_plainly, lambda *_: (called, [{}])):
        translation = Translation(
            NumberRenderer(), in_words, 100, max_observation_tokens=4, read=read, stop=["8 9", "8"]
        )
        action = translation.action(np.array([7, 8, 9], np.int32), [], 0)
        assert (action.text, action.tokens) == ("7 8 9", [7, 8, 9])
        assert action.message["content"] == "7 "
        assert len(action.tool_calls) == ("tool_calls" in action.message)
