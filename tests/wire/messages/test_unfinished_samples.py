from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from asyncrl.rollout.trajectory import KeptTokens, SampleId
from asyncrl.wire.messages.unfinished_samples import (
    UnfinishedRefused,
    UnfinishedSample,
    read_index,
    read_sample,
    write_unfinished,
)


def kept(length: int, topk: int = 3) -> KeptTokens:
    rng = np.random.default_rng(length)
    return KeptTokens(
        rng.integers(0, 50, length).astype(np.int32),
        -rng.random(length).astype(np.float32),
        rng.integers(0, 50, (length, topk)).astype(np.int32),
        np.full((length, topk), -np.inf, np.float32),
        rng.integers(0, 2**64, length, np.uint64),
        (np.arange(length) % 3 == 2) & (length > 5),
        contexts=(2, 5) if length > 5 else (),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "unfinished" / "step-000004" / "generator-0.bin"
    samples = [UnfinishedSample.of(SampleId(9, n), f"p{n}", kept(5 + n)) for n in range(3)]
    write_unfinished(path, 4, "s", samples)
    return path


def test_tokens_come_back_as_they_were(file: Path) -> None:
    index = read_index(file)
    assert (index.version, index.settings) == (4, "s")
    assert [place.sample for place in index.places] == [SampleId(9, n) for n in range(3)]
    for n, place in enumerate(index.places):
        found, expected = read_sample(file, place, prompt_id=f"p{n}"), kept(5 + n)
        for name in ("tokens", "logprobs", "topk_ids", "topk_logprobs", "noise_seeds", "observed"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert found.contexts == expected.contexts
    assert [path.name for path in file.parent.iterdir()] == [file.name], "a temporary is left"


def test_a_file_without_samples_is_whole(tmp_path: Path) -> None:
    write_unfinished(tmp_path / "g.bin", 1, "s", [])
    assert read_index(tmp_path / "g.bin").places == ()


def test_flipped_bits_and_truncations_are_refused(file: Path) -> None:
    whole = file.read_bytes()
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(UnfinishedRefused, match=str(file)):
            read_index(file)
        file.write_bytes(whole[:at])
        with pytest.raises(UnfinishedRefused, match=str(file)):
            read_index(file)
    file.unlink()
    with pytest.raises(UnfinishedRefused, match="cannot be read"):
        read_index(file)


def test_a_file_of_another_format_is_refused_as_a_whole(file: Path) -> None:
    """Version 1 had no seeds of the noise. Its records could not be read one by one."""
    content = file.read_bytes()[:-16].replace(b"asyncrl unfinished 2", b"asyncrl unfinished 1", 1)
    file.write_bytes(content + hashlib.blake2b(content, digest_size=16).digest())
    with pytest.raises(UnfinishedRefused, match="another version of asyncrl"):
        read_index(file)


def test_a_record_of_another_prompt_or_place_is_refused(file: Path) -> None:
    first, second, _ = read_index(file).places
    with pytest.raises(UnfinishedRefused, match="instead of"):
        read_sample(file, first, prompt_id="another")
    for place in (type(first)(first.sample, second.offset, second.size), type(first)(*(
        first.sample, first.offset + 1, first.size
    ))):  # fmt: skip
        with pytest.raises(UnfinishedRefused):
            read_sample(file, place, prompt_id="p0")
