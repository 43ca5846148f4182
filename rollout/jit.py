"""How a package compiles its kernels: numba, kept on disk, never stale.

Numba keeps compiled code in a folder of the source file and checks only the age of that one file.
Kernels of one module are inlined into those of another, so a change of the former would leave the
latter running over an old memory layout. Here the folder's name holds a digest of every source of
the package that has kernels. Where nothing can be written (a read-only image), each process
compiles the code again: the first call takes seconds longer. `NUMBA_CACHE_DIR` is obeyed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

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

    def __init__(self, package: Path) -> None:
        """Choose where compiled code is kept.

        Args:
            package: folder of the package; its kernels inline kernels of this package only.
        """
        self._directory = code_directory(package, str(numba.config.CACHE_DIR))

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Compile `function` on its first call; keep the machine code for the next process."""
        if self._directory is None:
            return cast("Callable[P, R]", numba.njit(function))
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(self._directory)  # read while decorating, not later
        try:
            return cast("Callable[P, R]", numba.njit(cache=True)(function))
        finally:
            numba.config.CACHE_DIR = before


def code_directory(package: Path, configured: str = "") -> Path | None:
    """The first directory that can be written, for these sources; None where there is none.

    Args:
        package: folder that holds the kernels' sources.
        configured: numba's own setting (`NUMBA_CACHE_DIR`), "" when unset.
    """
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        text = source.read_bytes()
        if b"@kernel" in text:
            digest.update(text)
    name = f"kernels-{package.name}-{digest.hexdigest()[:16]}"
    places = [lambda: Path(configured)] if configured else [_beside(package), _own_temporary]
    tried = []
    for place in places:
        base = place()
        tried.append(str(base))
        try:
            (base / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=base / name):
                return base / name
        except OSError as error:
            _log.debug("compiled kernels cannot be kept in %s: %s", base, error)
    _log.warning(
        "no writable directory for compiled kernels (tried %s): they are compiled in every "
        "process, which takes seconds; set NUMBA_CACHE_DIR to a writable directory",
        ", ".join(tried),
    )
    return None


def _beside(package: Path) -> Callable[[], Path]:
    return lambda: package / "__pycache__"


def _own_temporary() -> Path:
    """A directory that no other user can have put code into, or one that cannot be written."""
    path = Path(tempfile.gettempdir()) / f"asyncrl-kernels-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError:
        return path
    trusted = status.st_uid == os.getuid() and not status.st_mode & 0o022 and not path.is_symlink()
    return path if trusted else Path(os.devnull)
