"""The text of each token, and a run's stop rule (`sampling.stop`).

Four kinds of decoders cover the tokenizers in use: byte-level BPE (GPT-2, Llama 3, Qwen),
SentencePiece with byte fallback (Llama 2, Mistral, Gemma), and tokens of plain text that are joined
with nothing or with spaces. Each is tried on sequences of tokens and must reproduce the decoded
text. Some leave out the space before the first token; the stop rule counts it.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.engine.sampling.stopping import StopRule
from asyncrl.errors import ModelError
from asyncrl.tasks.model_tokenizer import special_ids

_TRIALS = 64
_TRIAL_TOKENS = 6
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def stop_rule(tokenizer: Any, strings: Sequence[str]) -> StopRule | None:
    """Return the rule that ends a response at a stop string, or None. Raises ModelError."""
    return StopRule.of(strings, token_bytes(tokenizer)) if strings else None


def token_bytes(tokenizer: Any) -> list[bytes]:
    """Return `[V]` the bytes of each token's text, empty for special ones. Raises ModelError."""
    special = special_ids(tokenizer)
    added = {token: str(content) for token, content in tokenizer.added_tokens_decoder.items()}
    for piece in (_byte_level, _sentence_piece, _plain, _spaced):
        of_token = piece(tokenizer)
        out = []
        for token, text in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))):
            if token in special or text is None:
                out.append(b"")
            elif token in added:
                out.append(added[token].encode())
            else:
                out.append(of_token(token, text))
        if _agrees(tokenizer, out):
            return out
    raise ModelError(
        "sampling.stop needs a tokenizer that joins the texts of its tokens; "
        f"{type(tokenizer).__name__} does not. End responses by a token: leave sampling.stop empty"
    )


def _byte_level(_tokenizer: Any) -> Callable[[int, str], bytes]:
    """Decode tokens whose characters stand for one byte each, as in GPT-2."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    byte_of = {chr(byte): byte for byte in shown}
    byte_of |= {chr(256 + i): byte for i, byte in enumerate(hidden)}
    return lambda _token, text: bytes(byte_of.get(character, 0) for character in text)


def _sentence_piece(_tokenizer: Any) -> Callable[[int, str], bytes]:
    """Decode tokens in which a lower block stands for a space, and `<0x0A>` for a byte."""

    def of_token(_token: int, text: str) -> bytes:
        byte = _BYTE.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()

    return of_token


def _plain(tokenizer: Any) -> Callable[[int, str], bytes]:
    return lambda token, _text: _decode(tokenizer, [token]).encode("utf-8", "replace")


def _spaced(tokenizer: Any) -> Callable[[int, str], bytes]:
    return lambda token, _text: b" " + _decode(tokenizer, [token]).encode("utf-8", "replace")


def _agrees(tokenizer: Any, pieces: Sequence[bytes]) -> bool:
    """Return True if sequences of tokens decode to their pieces, one leading space aside."""
    choose = random.Random(0)  # noqa: S311 - no secrets
    usable = [token for token, piece in enumerate(pieces) if piece]
    checked = 0
    for _ in range(_TRIALS):
        tokens = [choose.choice(usable) for _ in range(_TRIAL_TOKENS)]
        try:
            text = b"".join(pieces[token] for token in tokens).decode()
        except UnicodeDecodeError:  # tokens of half a character; the others are enough
            tokens = [token for token in tokens if pieces[token].isascii()]
            text = b"".join(pieces[token] for token in tokens).decode()
        if _decode(tokenizer, tokens) not in (text, text.removeprefix(" ")):
            return False
        checked += bool(tokens)
    return checked > 0


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
