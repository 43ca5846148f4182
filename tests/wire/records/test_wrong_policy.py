"""What is said of weights that an engine should not decode with."""

from __future__ import annotations

from asyncrl.wire.records.wrong_policy import (
    TokenizerDigest,
    compare_tokenizers,
    compare_weights,
    not_compared,
)
from asyncrl.wire.weights.layout import Fingerprint, TensorDigest


def digests(*values: str, dtype: str = "float32") -> Fingerprint:
    """Tensors a, b, c, ... with these digests; "?" is a probe, "-" leaves one out."""
    return Fingerprint(
        {
            name: TensorDigest(dtype, "" if value[0] == "?" else value, value[-1])
            for name, value in zip("abcdefgh", values, strict=False)
            if value != "-"
        },
        "",
    )


def said(found: Fingerprint, before: Fingerprint | None = None) -> str:
    wrong = compare_weights(
        "generator-3",
        7,
        expected=digests("1", "2", "3"),
        found=found,
        before=None if before is None else (6, before),
    )
    if wrong is None:
        return ""
    assert (wrong.cause, wrong.generator, wrong.policy_version) == ("weights", "generator-3", 7)
    assert wrong.text.startswith(
        "generator-3 decodes with other weights than the trainer has for version 7: "
    )
    return wrong.text.partition(": ")[2]


def test_equal_weights_are_not_mentioned() -> None:
    assert said(digests("1", "2", "3")) == ""
    assert said(digests("?1", "2", "?3")) == "", "a probe is all that some engines can give"
    assert said(digests("1", "-", "3")) == "", "named by not_compared"
    assert said(digests("9", "9", "9", dtype="float16")) == "", "named by not_compared"


def test_the_tensor_and_the_version_that_it_has_are_named() -> None:
    assert said(digests("1", "9", "3")) == "1 of 3 tensors differ (b)"
    old = digests("7", "8", "9")
    assert said(digests("1", "8", "3"), old) == (
        "1 of 3 tensors differ (b). They still have the numbers of version 6: they were not "
        "installed"
    )
    assert said(old, old).startswith("all 3 tensors differ. They still have the numbers of")
    assert said(digests("1", "4", "9"), old) == (
        "2 of 3 tensors differ (b, c). Of these, c still have the numbers of version 6"
    )
    assert said(digests("4", "5", "6"), old).endswith("not have the numbers of version 6 either")
    assert "differ (c)" in said(digests("1", "2", "?4"))


def test_what_nobody_can_compare_is_listed() -> None:
    expected = digests("1", "2", "3")
    assert not_compared(expected, expected) == []
    assert not_compared(expected, digests("1", "-", "3")) == ["b"]
    assert not_compared(expected, digests("1", "2", "3", "4")) == ["d"]
    assert not_compared(expected, digests("1", "2", "3", dtype="bfloat16")) == ["a", "b", "c"]


def test_another_tokenizer_is_named() -> None:
    ours = TokenizerDigest("v", "t")
    assert compare_tokenizers("generator-0", expected=ours, found=ours) is None
    for found, named in [
        (TokenizerDigest("w", "t"), "generator-0 has another tokenizer than the run's prompts"),
        (TokenizerDigest("v", "u"), "another chat template than"),
        (TokenizerDigest("w", "u"), "another tokenizer and another chat template than"),
    ]:
        wrong = compare_tokenizers("generator-0", expected=ours, found=found)
        assert wrong is not None
        assert (wrong.cause, wrong.generator) == ("tokenizer", "generator-0")
        assert named in wrong.text
