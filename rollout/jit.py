"""Compile a package's kernels with numba and keep the machine code on disk.

Numba keeps compiled code next to the source file and checks only the age of that one file. Kernels
of one module are inlined into those of another, so a change to the former would leave the latter
with an old memory layout. Here the name of the directory contains a digest of all sources of the
package that have kernels, and of the packages whose kernels it inlines, and of numba's version:
SGLang's interpreter may have another one, and each would delete the other's code. Where nothing can
be written (a read-only image), each process compiles the code again, which makes the first call
seconds slower. `NUMBA_CACHE_DIR` is respected.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)


class Compiler:
    """Compiles the kernels of one package.

    kernel = Compiler(Path(__file__).parent)

    @kernel
    def add(...): ...
    """

    def __init__(self, package: Path, *inlined: Path) -> None:
        """Choose the directory for compiled code.

        Args:
            package: directory of the package.
            inlined: other directories whose kernels this package's kernels inline.
        """
        self._directory = code_directory(package, str(numba.config.CACHE_DIR), inlined)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Compile `function` on its first call, and keep the machine code for later processes."""
        return self._compile(function)

    def of_sums(self, function: Callable[P, R]) -> Callable[P, R]:
        """Like calling the compiler, for kernels of floating-point sums.

        A sum over the innermost loop is computed as a vector. Its order then depends on the
        processor and on the number of terms, never on the data. Other threads run meanwhile.

        A loop with a sum must not store into an array. The compiled code would first compare the
        addresses of all arrays, and sum in another order where two lie close to each other, so the
        result would depend on where memory was free.
        """
        return self._compile(function, nogil=True, fastmath={"reassoc", "contract", "nsz", "arcp"})

    def of_vectors(self, function: Callable[P, R]) -> Callable[P, R]:
        """Like `of_sums`, for whole loops of arithmetic; a division by 0 gives inf or nan.

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
        """Like calling the compiler, for kernels of maxima over floating-point numbers.

        A maximum over the innermost loop is computed as a vector; of nan it may be anything.
        """
        return self._compile(function, nogil=True, fastmath={"nnan", "nsz"})

    def released(self, function: Callable[P, R]) -> Callable[P, R]:
        """Like calling the compiler; other threads run meanwhile."""
        return self._compile(function, nogil=True)

    def _compile(self, function: Callable[P, R], **options: Any) -> Callable[P, R]:
        if self._directory is None:
            return cast("Callable[P, R]", numba.njit(**options)(function))
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(self._directory)  # read while decorating, not later
        try:
            return cast("Callable[P, R]", numba.njit(cache=True, **options)(function))
        finally:
            numba.config.CACHE_DIR = before


def code_directory(
    package: Path, configured: str = "", inlined: Iterable[Path] = ()
) -> Path | None:
    """A writable directory for the code of these sources; None if there is none.

    Args:
        package: directory of the kernels' sources.
        configured: numba's own setting (`NUMBA_CACHE_DIR`), "" if unset.
        inlined: other directories whose kernels are inlined into these.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    for source in [one for place in (package, *inlined) for one in sorted(place.rglob("*.py"))]:
        text = source.read_bytes()
        if b"@kernel" in text:
            digest.update(text)
    name = f"kernels-{package.name}-{digest.hexdigest()[:16]}"
    places = [lambda: Path(configured)] if configured else [_next_to(package), _own_temporary]
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


def _next_to(package: Path) -> Callable[[], Path]:
    return lambda: package / "__pycache__"


def _own_temporary() -> Path:
    """A directory that no other user can have put code into; otherwise one that is not writable."""
    path = Path(tempfile.gettempdir()) / f"asyncrl-kernels-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError:
        return path
    trusted = status.st_uid == os.getuid() and not status.st_mode & 0o022 and not path.is_symlink()
    return path if trusted else Path(os.devnull)
