"""Files of published weights as bytes: made, opened and checked. Imports no torch.

The trainer (`asyncrl.wire.weights.writer`) and nodes that receive weights from others
(`asyncrl.wire.weights.chain`) write them in the layout of `asyncrl.wire.weights.layout`.
"""

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.wire.errors import PublishError, WeightsReadError, WeightsSupersededError
from asyncrl.wire.weights.layout import WeightManifest

_CALL_BYTES = 1 << 28
"""One system call reads at most 2 GiB."""


def reserve(path: Path, nbytes: int, *, of: int) -> mmap.mmap:
    """Create one of `of` files anew, with its memory reserved. Raises PublishError."""
    try:
        # A killed run of this id may have left a file. O_EXCL refuses to follow a planted link.
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise PublishError(
            f"cannot create {path}: {error.strerror}; published weights need a folder in memory "
            f"that this user can write: {path.parent}"
        ) from error
    try:
        # Reserve now: running out of memory during a copy would be a SIGBUS.
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise PublishError(_no_room(path, of * nbytes, error)) from error
    finally:
        os.close(descriptor)


def mark(memory: mmap.mmap, version: int) -> None:
    """Set the version in the header; WRITING: the file holds none."""
    memory[:8] = version.to_bytes(8, "little", signed=True)


def marked(memory: mmap.mmap) -> int:
    """Return the version in the header."""
    return int.from_bytes(memory[:8], "little", signed=True)


@contextmanager
def held_version(manifest: WeightManifest) -> Iterator[int]:
    """Yield the descriptor of a file that holds a version before and after the block.

    Raises WeightsSupersededError if the file no longer holds this version, or was removed;
    WeightsReadError if the file is another user's, or the manifest does not describe it.
    """
    descriptor = open_published(manifest)
    try:
        check_version(descriptor, manifest)
        yield descriptor
        check_version(descriptor, manifest)
    except OSError as error:
        raise WeightsReadError(
            f"weights of version {manifest.policy_version} in {manifest.path} cannot be "
            f"read: {error}"
        ) from error
    finally:
        os.close(descriptor)


def open_published(manifest: WeightManifest) -> int:
    """Return a descriptor of a version's file, to be closed. Raises as `held_version`."""
    try:
        descriptor = os.open(manifest.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise WeightsSupersededError(
            f"weights of version {manifest.policy_version} were removed with their trainer, or "
            f"were never on this machine: there is no file {manifest.path}"
        ) from error
    except OSError as error:
        raise WeightsReadError(
            f"weights of version {manifest.policy_version} cannot be opened ({error}): "
            "is the trainer on this machine, under this user, with the same /dev/shm?"
        ) from error
    found = os.fstat(descriptor)
    if found.st_size != manifest.nbytes or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise WeightsReadError(
            f"{manifest.path} is not what the manifest of version {manifest.policy_version} "
            f"describes: {found.st_size} bytes of user {found.st_uid}, expected "
            f"{manifest.nbytes} bytes of user {os.geteuid()}"
        )
    return descriptor


def check_version(descriptor: int, manifest: WeightManifest) -> None:
    """Raise WeightsSupersededError unless the file's header names the manifest's version."""
    header = int.from_bytes(os.pread(descriptor, 8, 0), "little", signed=True)
    if header != manifest.policy_version:
        now = "newer weights are being written" if header < 0 else f"it holds version {header}"
        raise WeightsSupersededError(
            f"weights of version {manifest.policy_version} in {manifest.path} are superseded: {now}"
        )


def fill(target: memoryview, descriptor: int, offset: int) -> None:
    """Fill memory from a place in a file. Raises WeightsReadError if it is shorter."""
    done = 0
    while done < len(target):
        read = os.preadv(descriptor, [target[done : done + _CALL_BYTES]], offset + done)
        if not read:
            raise WeightsReadError(
                f"the weights file ends {len(target) - done} bytes before the end of its tensors"
            )
        done += read


def _no_room(path: Path, nbytes: int, error: OSError) -> str:
    if error.errno != errno.ENOSPC:
        return f"cannot reserve memory for {path}: {error}"
    stat = os.statvfs(path.parent)
    free = stat.f_bavail * stat.f_frsize
    return (
        f"{path.parent} has {free / 2**20:.0f} MiB free, but published weights need "
        f"{nbytes / 2**20:.0f} MiB there: make it larger (docker run --shm-size, or a tmpfs mount)"
    )
