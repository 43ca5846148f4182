"""How the cache's kernels are compiled: numba, kept on disk, never stale.

Numba keeps compiled code beside the source file and checks only the age of that one file. The
kernels of `cache.store` are inlined into those of `cache.match`, so a change of the former would
leave the latter running over an old memory layout. Here the directory's name holds a digest of
all kernel sources instead. Where nothing can be written (a read-only image), code is compiled anew
in each process: seconds slower at the first call, otherwise the same. `NUMBA_CACHE_DIR` is obeyed.
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
_SOURCES = (
    "store.py",
    "insert.py",
    "estimate.py",
    "match.py",
    "branch.py",
    "integrity.py",
    "export.py",
    "acceptance/token_tree.py",
    "acceptance/kept.py",
)


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` on its first call; keep the machine code for the next process."""
    if _DIRECTORY is None:
        return cast("Callable[P, R]", numba.njit(function))
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_DIRECTORY)  # read while decorating, not later
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
    for name in _SOURCES:
        digest.update((package / name).read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
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


_DIRECTORY = code_directory(Path(__file__).parent, str(numba.config.CACHE_DIR))
