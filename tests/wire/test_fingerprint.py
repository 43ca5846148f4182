"""Fingerprints: a reference in plain integers, and every change of a weight changes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.weights import fingerprint as module
from wire.weights.fingerprint import TensorHash, collect, fingerprint, hash_of

MASK = (1 << 64) - 1
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _splitmix(index: int) -> int:
    x = (index + 1) * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def _reference(bits: list[list[int]]) -> str:
    """The two sums of the module's docstring, in Python's integers."""
    by_row = sum(_splitmix(r) * sum(row) for r, row in enumerate(bits)) & MASK
    columns = zip(*bits, strict=True)
    by_column = sum(_splitmix((1 << 40) + c) * sum(one) for c, one in enumerate(columns)) & MASK
    return (by_row.to_bytes(8, "little") + by_column.to_bytes(8, "little")).hex()


def _value(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> str:
    return fingerprint([("t", tensor)], dtype).tensors["t"].value


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, np.int32), (torch.int64, np.int64)])
def test_the_digest_is_the_formula(dtype: torch.dtype, bits: type) -> None:
    torch.manual_seed(1)
    tensor = (torch.randn(5, 7) * 100).to(dtype)
    assert _value(tensor) == _reference(tensor.numpy().view(bits).tolist())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(FLOATS),
    st.integers(0, 2**32 - 1),
)
def test_any_changed_element_changes_both_sums(
    rows: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    tensor = torch.randn(rows, columns).to(dtype)
    before = _value(tensor)
    r, c = seed % rows, seed // 16 % columns
    bits = tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize])
    bits[r, c] ^= 1  # the last bit of the mantissa
    after = _value(tensor)
    assert before[:16] != after[:16]
    assert before[16:] != after[16:]


def test_exchanged_rows_columns_and_elements_are_seen() -> None:
    torch.manual_seed(2)
    tensor = torch.randn(6, 6)
    changed = [
        tensor[[1, 0, 2, 3, 4, 5]],
        tensor[:, [0, 1, 2, 3, 5, 4]],
        tensor.t().contiguous(),
        tensor.roll(1, 0),
    ]
    values = {_value(one) for one in [tensor, *changed]}
    assert len(values) == 1 + len(changed)


def test_blocks_add_up_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    tensor = torch.randn(13, 11)
    hashed = TensorHash(13, 11, tensor.device)
    for row, column in [(7, 5), (0, 5), (7, 0), (0, 0)]:
        block = tensor[row : 13 if row else 7, column : 11 if column else 5]
        hashed.add(block, row, column)
    assert torch.equal(hashed.value, hash_of(tensor).value)
    monkeypatch.setattr(module, "_CPU_BLOCK", 12)  # one row at a time
    assert torch.equal(hashed.value, hash_of(tensor).value)


def test_numbers_are_converted_as_an_engine_holds_them() -> None:
    torch.manual_seed(4)
    tensor = torch.randn(8, 8)
    as_bfloat16 = fingerprint([("t", tensor)], torch.bfloat16).tensors["t"]
    assert as_bfloat16 == fingerprint([("t", tensor.bfloat16())]).tensors["t"]
    assert as_bfloat16.dtype == "bfloat16"
    # Below bfloat16's precision, engines that hold bfloat16 decode with the same weights.
    assert _value(tensor * (1 + 2.0**-20)) != _value(tensor)
    assert _value(torch.ones(3) * (1 + 2.0**-20), torch.bfloat16) == _value(
        torch.ones(3), torch.bfloat16
    )
    counts = torch.arange(3)
    assert fingerprint([("n", counts)], torch.bfloat16).tensors["n"].dtype == "int64"


def test_negative_zero_is_zero() -> None:
    for dtype in FLOATS:
        zeros = torch.tensor([0.0, -0.0, 1.0, -1.0], dtype=dtype)
        assert _value(zeros) == _value(zeros.abs() * torch.tensor([1, 1, 1, -1], dtype=dtype))
        assert _value(zeros) != _value(zeros.abs())


@pytest.mark.parametrize("shape", [(), (0, 4), (3,), (2, 3, 4), (1, 5)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=torch.bfloat16)
    assert _value(tensor) == _value(tensor.clone())
    if tensor.numel():
        assert _value(tensor) != _value(tensor * 2)


def test_views_have_the_digest_of_their_contents() -> None:
    tensor = torch.randn(6, 4)
    assert _value(tensor.t()) == _value(tensor.t().contiguous())
    assert _value(tensor[::2]) == _value(tensor[::2].contiguous())


def test_the_whole_digest_is_of_names_and_numbers_in_any_order() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    whole = fingerprint([("a", a), ("b", b)]).whole
    assert fingerprint([("b", b), ("a", a)]).whole == whole
    assert fingerprint([("a", b), ("b", a)]).whole != whole
    assert collect([("a", hash_of(a), "float32"), ("b", hash_of(b), "float32")]).whole == whole
