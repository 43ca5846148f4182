"""The manifest of a checkpoint: its contents, and how damage is found. Light: no torch.

```
{"format": 3, "policy_version": 12, "settings": {...}, "initial_weights": "3b1f...",
 "published": {"dtype": "bfloat16", "digest": "77ab..."},
 "files": {"state/weights-00000-00001.safetensors": {"bytes": 12345, "sha256": "9f86..."}, ...},
 "sha256": "of this object without this key"}
```

`manifest.json` is written last, so a folder without it is not a checkpoint. Verification reads
every listed file once, several at a time. The digests find damage; they are not signatures.
"""

import concurrent.futures
import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import msgspec

from asyncrl.mutability import rule_of
from asyncrl.rollout.truncation import Truncation
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import CheckpointError

FORMAT = 3
"""Incremented whenever older versions could not read what is written."""

MANIFEST = "manifest.json"

_OLD_FORMAT = "state.json"
"""Only format 1 had this file."""

_READ_UNASKED = (".json", ".safetensors", ".bin", ".pt", ".pth", ".py", ".jinja", ".model", ".txt")
"""Endings of files that transformers might read from a model's folder unasked."""

_HASHING_THREADS = 4

_KEYS = {
    "group_size": "scheduler.group_size",
    "seed": "run.seed",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
}
"""A checkpoint's settings outside the section `trainer`, by their names there."""


class FileDigest(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    bytes: int
    sha256: str
    """SHA-256 of its contents, in hexadecimal, as `sha256sum` prints it."""


class Published(msgspec.Struct, frozen=True):
    """The weights that engines received of this version."""

    dtype: str
    digest: str
    """`asyncrl.wire.weights.layout.Fingerprint.whole` of the weights."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of manifest.json."""

    format: int
    policy_version: int
    """Optimizer steps trained, which is also the data cursor."""
    settings: dict[str, Any]
    files: dict[str, FileDigest]
    """Digests by path relative to the checkpoint, with forward slashes."""
    initial_weights: str | msgspec.UnsetType = msgspec.UNSET
    """Digest of the weights that the run started from. Absent from older checkpoints."""
    published: Published | msgspec.UnsetType = msgspec.UNSET
    """Absent if this version was not published."""
    sha256: str = ""
    """Digest of this manifest's JSON with this field empty."""


class _AnyFormat(msgspec.Struct):
    format: int


def write_manifest(
    directory: Path,
    *,
    policy_version: int,
    settings: dict[str, Any],
    initial_weights: str = "",
    published: Published | None = None,
    known: Mapping[str, FileDigest] = MappingProxyType({}),
) -> None:
    """Complete a checkpoint: list every file with its size and digest. Raises OSError.

    `initial_weights` is empty if unknown; files in `known` are not read again.
    """
    digests = digests_of(directory, known)
    manifest = Manifest(
        format=FORMAT,
        policy_version=policy_version,
        settings=settings,
        files=digests,
        initial_weights=initial_weights or msgspec.UNSET,
        published=published or msgspec.UNSET,
    )
    manifest = msgspec.structs.replace(manifest, sha256=_own_digest(manifest))
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (directory / MANIFEST).write_bytes(text)


def read_manifest(directory: Path) -> Manifest:
    """Read and verify the manifest of a checkpoint, but not the files. Raises CheckpointError."""
    path = directory / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        if (directory / _OLD_FORMAT).exists():
            raise CheckpointError(_other_format(directory, 1)) from error
        raise CheckpointError(f"{directory} has no {MANIFEST}: it is incomplete") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        found = msgspec.json.decode(text, type=_AnyFormat).format
        if found != FORMAT:
            raise CheckpointError(_other_format(directory, found))
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({len(text)} bytes): {error}") from error
    if manifest.sha256 != _own_digest(manifest):
        raise CheckpointError(f"{path} is damaged: its contents do not match their digest")
    return manifest


def verify_files(directory: Path, manifest: Manifest, *, only: tuple[str, ...] = ("",)) -> None:
    """Compare size and digest of every listed file whose name has one of these prefixes.

    Raises CheckpointError for the first file that is missing, changed, or unlisted in `model/`.
    """
    for path in sorted((directory / "model").rglob("*")):
        name = path.relative_to(directory).as_posix()
        if name not in manifest.files and name.endswith(_READ_UNASKED):
            raise CheckpointError(f"{path} was added later: {MANIFEST} does not list it")
    chosen = {name: one for name, one in manifest.files.items() if name.startswith(only)}
    verify_listed(directory, chosen, MANIFEST)


def verify_listed(directory: Path, files: Mapping[str, FileDigest], record: str) -> None:
    """Compare size and digest of these files with those in `record`, as `verify_files` does."""
    for name, one in files.items():
        _check_size(directory, name, one, record)
    try:
        digests = _in_parallel(_sha256, [directory / name for name in files])
    except OSError as error:
        raise CheckpointError(f"{error.filename or directory} cannot be read: {error}") from error
    for digest, (name, one) in zip(digests, files.items(), strict=True):
        if digest != one.sha256:
            raise CheckpointError(
                f"{directory / name} is damaged: its contents do not match the digest in {record}"
            )


def digests_of(
    directory: Path, known: Mapping[str, FileDigest] = MappingProxyType({})
) -> dict[str, FileDigest]:
    """Digest every file below a folder, by relative path, except `known` ones. Raises OSError."""
    found = [path for path in directory.rglob("*") if path.is_file()]
    names = sorted(path.relative_to(directory).as_posix() for path in found)
    others = [name for name in names if name not in known]
    computed = _in_parallel(digest_of, [directory / name for name in others])
    digests = {**known, **dict(zip(others, computed, strict=True))}
    return {name: digests[name] for name in names}


def has_its_files(directory: Path) -> bool:
    """Return True if the manifest is sound and every file has its size. Reads no contents."""
    try:
        for name, one in read_manifest(directory).files.items():
            _check_size(directory, name, one, MANIFEST)
    except CheckpointError:
        return False
    return True


def settings_of(
    config: TrainerConfig, *, group_size: int, seed: int, temperature: float, truncation: Truncation
) -> dict[str, Any]:
    """The settings that a checkpoint records, as JSON types."""
    return {
        **config.model_dump(mode="json"),
        "group_size": group_size,
        "seed": seed,
        "temperature": temperature,
        "top_p": truncation.top_p,
        # null where it is off, so that earlier checkpoints, which lack it, can be resumed
        "top_k": truncation.top_k or None,
        "min_p": truncation.min_p or None,
    }


def check_settings(directory: Path, manifest: Manifest, settings: dict[str, Any]) -> None:
    """Raise CheckpointError, naming each setting that would make this a different run."""
    # Through JSON, so that tuples and lists compare as equal.
    now = _flat(msgspec.json.decode(msgspec.json.encode(settings), type=dict[str, Any]))
    # Settings that were added since: they had the value that is now the default.
    then = {**_flat(TrainerConfig().model_dump(mode="json")), **_flat(manifest.settings)}
    if now.get("dtype") == "auto":
        now["dtype"] = then["dtype"]  # the trainer's process, which knows its device, compares it
    changed = sorted(
        key
        for key in then.keys() | now.keys()
        if then.get(key) != now.get(key)
        and rule_of(_KEYS.get(key, f"trainer.{key}")).when == "never"
    )
    if changed:
        listed = ", ".join(f"{key}: {then.get(key)!r} -> {now.get(key)!r}" for key in changed)
        raise CheckpointError(
            f"{directory} was written under other settings ({listed}); resume with those, or "
            f"start a new run from its weights with --set model.path={directory}"
        )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Flatten the settings of a section to dotted names.

    >>> _flat({"dtype": "float32", "critic": {"gamma": 1.0}})
    {'dtype': 'float32', 'critic.gamma': 1.0}
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = value.items() if isinstance(value, dict) else None
        flat |= {name: value} if inner is None else {f"{name}.{key}": one for key, one in inner}
    return flat


def _check_size(directory: Path, name: str, expected: FileDigest, record: str) -> None:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise CheckpointError(f"{directory / record} lists {name!r}, a path outside its folder")
    path = directory / name
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if size < expected.bytes:
        raise CheckpointError(f"{path} is truncated: {size} of {expected.bytes} bytes")
    if size > expected.bytes:
        raise CheckpointError(f"{path} is damaged: {size} bytes instead of {expected.bytes}")


def _other_format(directory: Path, found: int) -> str:
    way = (
        f"start a new run from its weights with --set model.path={directory / 'model'}"
        if found < FORMAT
        else "install the newer version"
    )
    return (
        f"{directory} has checkpoint format {found}, but this version reads only format {FORMAT}; "
        f"resume with the version that wrote it, or {way}"
    )


def _own_digest(manifest: Manifest) -> str:
    text = msgspec.json.encode(msgspec.structs.replace(manifest, sha256=""))
    return hashlib.sha256(text).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(path: Path) -> FileDigest:
    """Size and digest of a file, which is read once. Raises OSError."""
    return FileDigest(path.stat().st_size, _sha256(path))


def _in_parallel(function: Any, paths: list[Path]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return list(pool.map(function, paths))
