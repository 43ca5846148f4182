"""Compiles a package's kernels with numba, keeps the machine code on disk, and checks arguments.

Numba checks only the age of one source file, but kernels of one module are inlined into those of
another. So the name of the directory contains a digest of all sources with kernels of the package
and of those that it inlines, and of numba's version (SGLang's interpreter may have another one). If
nothing can be written, each process compiles the code again. `NUMBA_CACHE_DIR` is respected. Of
processes that start at once, one compiles a kernel; the others wait for its code.
"""

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numba.core.compiler_lock import global_compiler_lock as numbas_lock
from numpy.typing import ArrayLike

from asyncrl.rollout.trajectory import IntArray

INT32_MAX = 2**31 - 1

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)
_WAIT_SECONDS = 20.0
"""Longest wait for another process that compiles a kernel; then this one compiles it, too."""
_LOOK_SECONDS = 0.02
_held = set[Path]()
"""Files that this process has locked, in the thread that has numba's lock."""


class Compiler:
    """Compiles a package's kernels: `kernel = kernels_of("engine/torch")`, then `@kernel`."""

    def __init__(self, package: Path, *inlined: Path) -> None:
        """Choose the directory for `package`'s code, which inlines kernels of `inlined`."""
        self._directory = code_directory(package, str(numba.config.CACHE_DIR), inlined)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Compile `function` on its first call, and keep the machine code for later processes."""
        return self._compile(function)

    def of_sums(self, function: Callable[P, R]) -> Callable[P, R]:
        """Compile like `__call__`, for kernels of floating-point sums.

        A sum over the innermost loop is computed as a vector. Its order then depends on the
        processor and on the number of terms, never on the data; but a loop with a sum must not
        store into an array, or the order depends on where arrays lie. Python's lock is released.
        """
        return self._compile(function, nogil=True, fastmath={"reassoc", "contract", "nsz", "arcp"})

    def of_vectors(self, function: Callable[P, R]) -> Callable[P, R]:
        """Compile like `of_sums`, for whole loops of arithmetic; a division by 0 gives inf or nan.

        Numba otherwise raises an error at a division by 0, and a loop that may raise is not
        computed as a vector.
        """
        return self._compile(
            function,
            nogil=True,
            fastmath={"reassoc", "contract", "nsz", "arcp"},
            error_model="numpy",
        )

    def of_maxima(self, function: Callable[P, R]) -> Callable[P, R]:
        """Compile like `__call__`, for kernels of maxima over floating-point numbers.

        A maximum over the innermost loop is computed as a vector; with nan it may be anything.
        """
        return self._compile(function, nogil=True, fastmath={"nnan", "nsz"})

    def released(self, function: Callable[P, R]) -> Callable[P, R]:
        """Compile like `__call__`, releasing Python's lock."""
        return self._compile(function, nogil=True)

    def _compile(self, function: Callable[P, R], **options: Any) -> Callable[P, R]:
        if self._directory is None:
            return cast("Callable[P, R]", numba.njit(**options)(function))
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(self._directory)  # read while decorating, not later
        try:
            kernel: Any = numba.njit(cache=True, **options)(function)
        finally:
            numba.config.CACHE_DIR = before
        compile_or_load = kernel.compile
        lock = self._directory / f"{function.__module__}.{function.__qualname__}.lock"

        def compile_once(signature: Any) -> Any:
            with numbas_lock, _alone(lock):
                return compile_or_load(signature)

        kernel.compile = compile_once
        return cast("Callable[P, R]", kernel)


@functools.cache
def kernels_of(*packages: str) -> Compiler:
    """Return the compiler of a package's folder, followed by those whose kernels it inlines."""
    package, *inlined = [Path(__file__).parents[1] / one for one in packages]
    return Compiler(package, *inlined)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Lock a file against other processes; the lock also ends with this process."""
    try:
        file = -1 if lock in _held else os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        file = -1  # nothing can be written here any more, so nothing is kept either
    if file < 0:
        yield
        return
    try:
        last = time.monotonic() + _WAIT_SECONDS
        while not _locked(file):
            if time.monotonic() > last:
                _log.debug("%s has been locked for %.0f s", lock, _WAIT_SECONDS)
                break
            time.sleep(_LOOK_SECONDS)
        _held.add(lock)
        yield
    finally:
        _held.discard(lock)
        os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a fork does not inherit it
    except (BlockingIOError, PermissionError):  # which one depends on the system
        return False
    return True


def code_directory(
    package: Path, configured: str = "", inlined: Iterable[Path] = ()
) -> Path | None:
    """Return a writable directory for the code of these sources; None if there is none.

    `configured` is numba's setting (`NUMBA_CACHE_DIR`), "" if unset.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    for source in [one for place in (package, *inlined) for one in sorted(place.rglob("*.py"))]:
        text = source.read_bytes()
        if b"@kernel" in text:
            digest.update(text)
    name = f"kernels-{package.name}-{digest.hexdigest()[:16]}"
    places = (
        [lambda: Path(configured)]
        if configured
        else [lambda: package / "__pycache__", _own_temporary]
    )
    tried = []
    for place in places:
        base = place()
        tried.append(str(base))
        try:
            (base / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=base / name):
                return base / name
        except OSError as error:
            _log.debug("cannot keep compiled kernels in %s: %s", base, error)
    _log.warning(
        "no writable directory for compiled kernels (tried %s): every process compiles them "
        "again, which takes seconds; set NUMBA_CACHE_DIR to a writable directory",
        ", ".join(tried),
    )
    return None


def _own_temporary() -> Path:
    """Return a directory safe from other users' code; otherwise one that is not writable."""
    path = Path(tempfile.gettempdir()) / f"asyncrl-kernels-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError:
        return path
    trusted = status.st_uid == os.getuid() and not status.st_mode & 0o022 and not path.is_symlink()
    return path if trusted else Path(os.devnull)


def int32_values(name: str, values: ArrayLike, minimum: int = -(2**31)) -> IntArray:
    """Return `values` as a contiguous int32 vector; `name` is for error messages.

    Raises TypeError if they are not integers; ValueError if they are not one-dimensional, or one is
    outside [minimum, 2 ** 31 - 1].
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {array.shape}")
    if not len(array):
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, not {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < minimum or high > INT32_MAX:
        raise ValueError(
            f"{name} must lie between {minimum} and {INT32_MAX}, "
            f"not {low if low < minimum else high}"
        )
    return np.ascontiguousarray(array, np.int32)


def check_offsets(what: str, offsets: IntArray, total: int) -> None:
    """Raise ValueError, naming `what`, unless `offsets` `[B+1]` rise from 0 to `total`."""
    if len(offsets) and offsets[0] == 0 and offsets[-1] == total and (np.diff(offsets) >= 0).all():
        return
    brief = np.array2string(offsets, threshold=8)
    raise ValueError(f"{what}: offsets must rise from 0 to {total}, not {brief}")
