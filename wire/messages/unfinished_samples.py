"""The file with one generator's unfinished run-ahead, which goes with a checkpoint.

    magic | record | record | ... | index | length of the index (8 bytes) | digest (16 bytes)

Records and index are MessagePack and are decoded like messages (`wire.transport.decoding`). The
digest is BLAKE2b of everything before it. A file is accepted or refused as a whole: if single
records could be refused, damage would remove long samples more often than short ones.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from asyncrl.rollout.trajectory import KeptTokens, SampleId
from asyncrl.wire.errors import WireError
from asyncrl.wire.messages.data import (
    decode_floats,
    decode_seeds,
    decode_tokens,
    encode_floats,
    encode_seeds,
    encode_tokens,
)
from asyncrl.wire.transport.atomic_files import replacing
from asyncrl.wire.transport.decoding import Count, FrameDecoder

_MAGIC = b"asyncrl unfinished 2\n"
"""The number rises with the format: 2 has the seeds of the noise."""
_ANY_MAGIC = b"asyncrl unfinished "
_LENGTH_BYTES = 8
_DIGEST_BYTES = 16
_TAIL_BYTES = _LENGTH_BYTES + _DIGEST_BYTES
_BLOCK_BYTES = 1 << 20
_MAX_INDEX_BYTES = 1 << 26
_MAX_RECORD_BYTES = 1 << 34


class UnfinishedRefused(WireError):  # noqa: N818 - says what happened, like FrameRefused
    """A file or record of unfinished samples cannot be used; the text says why."""


class Place(msgspec.Struct, frozen=True):
    """Location of a sample's record in its file, in bytes."""

    sample: SampleId
    offset: Count
    size: Count


class Index(msgspec.Struct, frozen=True):
    """Index of a file."""

    version: int
    """Policy version of the checkpoint that it goes with."""
    settings: str
    """Identifies the settings that the tokens were drawn with."""
    places: tuple[Place, ...]


class UnfinishedSample(msgspec.Struct, frozen=True):
    """The L tokens of one sample with their distributions, as in `KeptTokens`, to be verified."""

    sample: SampleId
    prompt_id: str
    tokens: bytes
    """`[L]` int32"""
    logprobs: bytes
    """`[L]` float32"""
    topk: Count
    topk_ids: bytes
    """`[L, K]` int32"""
    topk_logprobs: bytes
    """`[L, K]` float32"""
    noise_seeds: bytes
    """`[L]` uint64"""
    observed: bytes = b""
    """Each 0 or 1; empty: no token was observed."""
    contexts: tuple[Count, ...] = ()

    @classmethod
    def of(cls, sample: SampleId, prompt_id: str, kept: KeptTokens) -> UnfinishedSample:
        """Make the record of a sample with these tokens."""
        return cls(
            sample,
            prompt_id,
            encode_tokens(kept.tokens),
            encode_floats(kept.logprobs),
            int(kept.topk_ids.shape[1]),
            encode_tokens(kept.topk_ids),
            encode_floats(kept.topk_logprobs),
            encode_seeds(kept.noise_seeds),
            kept.observed.astype(np.uint8).tobytes() if kept.observed.any() else b"",
            kept.contexts,
        )

    def kept(self) -> KeptTokens:
        """Return its tokens, to be verified. Raises ValueError if the arrays differ in length."""
        tokens = decode_tokens(self.tokens)
        shape = (len(tokens), self.topk)
        observed = np.frombuffer(self.observed or bytes(len(tokens)), np.uint8) != 0
        kept = KeptTokens(
            tokens,
            decode_floats(self.logprobs),
            decode_tokens(self.topk_ids).reshape(shape),
            decode_floats(self.topk_logprobs).reshape(shape),
            decode_seeds(self.noise_seeds),
            observed,
            contexts=self.contexts,
        )
        sizes = {len(one) for one in (kept.logprobs, kept.noise_seeds, observed)}
        if not len(tokens) or sizes != {len(tokens)}:
            raise ValueError(
                f"{len(tokens)} tokens with {len(kept.logprobs)} log-probabilities, "
                f"{len(kept.noise_seeds)} noise seeds and {len(observed)} marks of observed tokens"
            )
        return kept


_INDEX: FrameDecoder[Index] = FrameDecoder(Index, max_bytes=_MAX_INDEX_BYTES)
_SAMPLE: FrameDecoder[UnfinishedSample] = FrameDecoder(
    UnfinishedSample, max_bytes=_MAX_RECORD_BYTES
)


def write_unfinished(
    path: Path, version: int, settings: str, samples: Sequence[UnfinishedSample]
) -> None:
    """Write the file, which takes its name when it is complete and on the disk. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    places: list[Place] = []
    with replacing(path) as file:

        def append(data: bytes) -> None:
            digest.update(data)
            file.write(data)

        append(_MAGIC)
        for sample in samples:
            record = msgspec.msgpack.encode(sample)
            places.append(Place(sample.sample, file.tell(), len(record)))
            append(record)
        index = msgspec.msgpack.encode(Index(version, settings, tuple(places)))
        append(index)
        append(len(index).to_bytes(_LENGTH_BYTES, "little"))
        file.write(digest.digest())


def read_index(path: Path) -> Index:
    """Check a whole file, and return its index. Raises UnfinishedRefused."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = size - _TAIL_BYTES
            magic = file.read(len(_MAGIC))
            if magic != _MAGIC and magic.startswith(_ANY_MAGIC):
                raise UnfinishedRefused(
                    f"{path} was written by another version of asyncrl, in another format"
                )
            if magic != _MAGIC or end < len(_MAGIC):
                raise UnfinishedRefused(f"{path} is not a file of unfinished samples")
            file.seek(0)
            digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
            left = size - _DIGEST_BYTES
            while left and (block := file.read(min(left, _BLOCK_BYTES))):
                digest.update(block)
                left -= len(block)
            if left or file.read(_DIGEST_BYTES) != digest.digest():
                raise UnfinishedRefused(f"{path} is damaged: its digest does not match")
            file.seek(end)
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > end - len(_MAGIC):
                raise UnfinishedRefused(f"{path} is damaged: its index is longer than the file")
            file.seek(end - length)
            return _INDEX.decode(file.read(length))
    except OSError as error:
        raise UnfinishedRefused(f"{path} cannot be read: {error.strerror}") from error
    except UnfinishedRefused:
        raise
    except WireError as error:
        raise UnfinishedRefused(f"{path} is damaged: {error}") from error


def read_sample(path: Path, place: Place, *, prompt_id: str) -> KeptTokens:
    """Read one sample's tokens from a file that `read_index` accepted. Raises UnfinishedRefused."""
    try:
        with path.open("rb") as file:
            file.seek(place.offset)
            found = _SAMPLE.decode(file.read(place.size))
        if (found.sample, found.prompt_id) != (place.sample, prompt_id):
            raise UnfinishedRefused(
                f"{path} has sample {found.sample} of prompt {found.prompt_id!r} instead of "
                f"{place.sample} of {prompt_id!r}"
            )
        return found.kept()
    except OSError as error:
        raise UnfinishedRefused(f"{path} cannot be read: {error.strerror}") from error
    except UnfinishedRefused:
        raise
    except (ValueError, WireError) as error:
        raise UnfinishedRefused(f"{path}: sample {place.sample}: {error}") from error
