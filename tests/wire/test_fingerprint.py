"""Fingerprints: a reference in plain integers, and every change of a weight changes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.wire.weights import fingerprint as module
from asyncrl.wire.weights.fingerprint import (
    PROBES,
    MatrixSums,
    collect,
    fingerprint,
    probe_columns,
    probe_of,
    sums_of,
)
from asyncrl.wire.weights.layout import TensorDigest

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
    sums = MatrixSums(13, 11, tensor.device)
    for row, column in [(7, 5), (0, 5), (7, 0), (0, 0)]:
        block = tensor[row : 13 if row else 7, column : 11 if column else 5]
        sums.add(block, row, column)
    whole = sums_of(tensor).whole
    assert whole is not None
    assert torch.equal(sums.value, whole)
    monkeypatch.setattr(module, "_CPU_BLOCK", 12)  # one row at a time
    again = sums_of(tensor).whole
    assert again is not None
    assert torch.equal(sums.value, again)


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
    assert collect([("a", sums_of(a)), ("b", sums_of(b))]).whole == whole


def test_a_tensor_of_two_names_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> module.TensorSums:
        read.append(id(tensor))
        return sums_of(tensor, dtype)

    monkeypatch.setattr(module, "sums_of", counted)
    tied = torch.ones(4, 4)
    found = fingerprint([("embedding", tied), ("head", tied), ("other", tied.clone())])
    assert found.tensors["embedding"] == found.tensors["head"] == found.tensors["other"]
    assert len(read) == 2


def test_tensors_that_a_generator_makes_on_the_way_are_not_confused() -> None:
    values = [float(n) for n in range(20)]
    found = fingerprint((str(value), torch.full((3, 3), value)) for value in values)
    assert len({digest.value for digest in found.tensors.values()}) == len(values)


@pytest.mark.parametrize("columns", [1, PROBES, PROBES + 1, 100, 4096])
def test_a_probe_is_of_fixed_columns(columns: int) -> None:
    chosen = probe_columns(columns)
    assert list(chosen) == sorted(set(chosen))
    assert len(chosen) == min(columns, PROBES)
    assert 0 <= chosen[0] <= chosen[-1] < columns
    tensor = torch.randn(5, columns)
    digest = fingerprint([("t", tensor)]).tensors["t"]
    by_product = tensor @ torch.eye(columns)[:, chosen]  # exact: every other term is 0
    value = probe_of(by_product).numpy().astype("<i8").tobytes().hex()
    assert digest.agrees_with(TensorDigest("float32", "", value))
    tensor[3, chosen[-1]] *= 2
    assert not fingerprint([("t", tensor)]).tensors["t"].agrees_with(digest)
    assert not digest.agrees_with(TensorDigest("bfloat16", "", value))
