"""A tokenizer, used on pieces of a conversation instead of whole texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.rollout.trajectory import IntArray
from asyncrl.tasks.model_tokenizer import special_ids


class TokenPieces:
    """Tokenises and reads texts that stand after other tokens.

    Args:
        tokenizer: an HF tokenizer.
        stop_tokens: ids that end a turn.
    """

    def __init__(self, tokenizer: Any, stop_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_tokens = frozenset(stop_tokens)
        self._special = special_ids(tokenizer) | self._stop_tokens
        self._anchor = _anchor(tokenizer)

    def beginning(self, text: str) -> list[int]:
        """The tokens of a text that nothing stands before, with those that the tokenizer adds."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def ends(self, turn_tokens: Sequence[int] | IntArray) -> bool:
        """Whether a turn has ended with a stop token."""
        return len(turn_tokens) > 0 and int(turn_tokens[-1]) in self._stop_tokens

    def end_token(self, ids: Sequence[int]) -> int | None:
        """The place of the first special token; None if there is none."""
        return next((place for place, token in enumerate(ids) if token in self._special), None)

    def name(self, token: int) -> str:
        """A token as the tokenizer's files write it."""
        return str(self._tokenizer.convert_ids_to_tokens(token))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that holds all special tokens itself."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def after(self, text: str) -> list[int]:
        """The tokens of a text that follows others: nothing is added at its beginning."""
        if not text or self._anchor is None:
            return self.encode(text)
        # Some tokenizers put a space before the first word of a text, but not after a token.
        ids = self.encode(self._anchor + text)
        return ids[1:]

    def text(self, turn_tokens: Sequence[int] | IntArray) -> str:
        """The text of a turn as it stands in the conversation, without its stop token."""
        ids = [int(token) for token in turn_tokens]
        if ids and ids[-1] in self._stop_tokens:
            ids.pop()
        if self._anchor is None:
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))
        # Some tokenizers leave out a space at the beginning of a text, but not after a token.
        after = [self._tokenizer.convert_tokens_to_ids(self._anchor), *ids]
        text = str(self._tokenizer.decode(after, skip_special_tokens=False))
        return text.removeprefix(self._anchor)


def _anchor(tokenizer: Any) -> str | None:
    """A special token that leaves the text behind it as it is; None if there is none."""
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        if token.special and not token.rstrip:
            return str(token.content)
    return None
