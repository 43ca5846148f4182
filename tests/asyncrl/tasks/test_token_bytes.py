"""The bytes of tokens, for the kinds of tokenizers in use; their joined text is what is decoded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.errors import ModelError
from asyncrl.tasks.token_bytes import stop_rule, token_bytes

MARKED = [f"<|reserved_{number}|>" for number in range(20)]
"""Special tokens without a role, as Llama 3 has 250."""
TEXTS = ["the answer is </answer> 42.", "naïve café 🙂 one two", "a b  c\n\nd </answer>"] * 5


def wrapped(tokenizer: Any) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def byte_level() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=["<eos>", *MARKED],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return wrapped(tokenizer)


def sentence_piece() -> Any:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=["<eos>", "<unk>", *tokens], show_progress=False
    )
    trained.train_from_iterator(TEXTS, trainer)
    vocabulary = trained.get_vocab()
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrapped(tokenizer)


def characters() -> Any:
    names = ["<eos>", *dict.fromkeys("".join(TEXTS))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return wrapped(tokenizer)


def words() -> Any:
    names = ["<eos>", *dict.fromkeys(" ".join(TEXTS).split())]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrapped(tokenizer)  # without a decoder, tokens are joined with spaces


@pytest.mark.parametrize("make", [byte_level, sentence_piece, characters, words])
def test_a_rule_ends_where_the_decoded_text_first_has_the_string(make: Any) -> None:
    tokenizer = make()
    pieces = token_bytes(tokenizer)
    assert len(pieces) == len(tokenizer)
    assert pieces[tokenizer.eos_token_id] == b""
    for text in TEXTS[:3]:
        ids = tokenizer(text)["input_ids"]
        assert b"".join(pieces[i] for i in ids).decode().removeprefix(" ") == tokenizer.decode(ids)
        for string in ("</answer>", "é", "\n\n", "🙂", "never"):
            rule = stop_rule(tokenizer, [string])
            assert rule is not None
            decoded = [tokenizer.decode(ids[:n]) for n in range(1, len(ids) + 1)]
            want = next((n for n, part in enumerate(decoded, 1) if string in part), None)
            assert rule.follow(rule.start, np.array(ids))[0] == want


def test_special_tokens_without_a_role_have_no_text() -> None:
    tokenizer = byte_level()
    ids = tokenizer.convert_tokens_to_ids(MARKED)
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert [token_bytes(tokenizer)[one] for one in ids] == [b""] * len(ids)


def test_a_tokenizer_that_joins_tokens_in_another_way_is_refused() -> None:
    pieces = {"[UNK]": 0, "one": 1, "##two": 2, "three": 3}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"sampling.stop needs a tokenizer that joins"):
        token_bytes(wrapped(tokenizer))


def test_without_strings_there_is_no_rule() -> None:
    assert stop_rule(None, []) is None
