"""Paths and records of exported models. Light: no torch.

```
RUN/exports/step-000012/            of RUN/checkpoints/step-000012
RUN/exports/step-000012-bfloat16/   the same in another data type
RUN/exports/step-000012-adapter/    a PEFT directory, of a run with LoRA
```
"""

from pathlib import Path

import msgspec

from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.checkpoint.format.manifest import (
    MANIFEST,
    FileDigest,
    Manifest,
    digests_of,
    read_manifest,
    verify_listed,
)

RECORD = "asyncrl-export.json"


class ExportRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of asyncrl-export.json."""

    checkpoint: str
    """Absolute path at the time of the export."""
    manifest: str
    """Digest of the checkpoint's manifest, which covers its contents."""
    policy_version: int
    dtype: str
    """torch's name of the weights' type, without prefix."""
    files: dict[str, FileDigest]
    """Digests by path relative to the export."""


def is_checkpoint(directory: Path) -> bool:
    """Return True if this is a checkpoint, complete or not, and not an exported model."""
    return (directory / MANIFEST).exists() and not (directory / "config.json").exists()


def default_place(checkpoint: Path, dtype: str | None = None, *, adapter: bool = False) -> Path:
    """Default export folder of a checkpoint.

    >>> str(default_place(Path("runs/first/checkpoints/step-000012"), "bfloat16"))
    'runs/first/exports/step-000012-bfloat16'
    """
    folder = checkpoint.parent
    run = folder.parent if folder.name == "checkpoints" else folder
    kind = "-adapter" if adapter else ""
    return run / "exports" / (checkpoint.name + kind + (f"-{dtype}" if dtype else ""))


def write_record(exported: Path, checkpoint: Path, manifest: Manifest, *, dtype: str) -> None:
    """Complete an export. Raises OSError."""
    record = ExportRecord(
        checkpoint=str(checkpoint.resolve()),
        manifest=manifest.sha256,
        policy_version=manifest.policy_version,
        dtype=dtype,
        files=digests_of(exported),
    )
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    (exported / RECORD).write_bytes(text)


def is_export_of(place: Path, checkpoint: Path, dtype: str | None = None) -> bool:
    """Return True if `place` holds this checkpoint intact; reads its files. False if it is absent.

    Raises CheckpointError if something else is there, or it was changed.
    """
    if not place.exists():
        return False
    try:
        record = msgspec.json.decode((place / RECORD).read_bytes(), type=ExportRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{place} exists and is not an export of {checkpoint}; remove or rename it"
        ) from error
    other_dtype = dtype is not None and dtype != record.dtype
    if record.manifest != read_manifest(checkpoint).sha256 or other_dtype:
        raise CheckpointError(
            f"{place} was exported from another state of {checkpoint}; remove or rename it"
        )
    try:
        verify_listed(place, record.files, RECORD)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; remove or rename {place}") from error
    return True
