"""What tests need of the machine: Prometheus, Chromium, a kernel that makes namespaces, Tritons.

`make test` installs the programs where it may. A test that lacks one fails there, and is skipped
elsewhere.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ALIKE = {"chromium": ("chromium", "google-chrome"), "promtool": ("promtool",)}
_PACKAGES = {"promtool": "prometheus"}


def path_of(program: str) -> str | None:
    """Where a program lies; None where it is not installed and cannot be.

    Fails the test where it could be installed: as root, with Debian's packages.
    """
    names = _ALIKE.get(program, (program,))
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None and _may_install():
        pytest.fail(f"{program} is not installed: make {_PACKAGES.get(program, program)}")
    return found


def needs(program: str) -> pytest.MarkDecorator:
    """A mark for tests that cannot run without a program."""
    names = _ALIKE.get(program, (program,))
    package = _PACKAGES.get(program, program)
    return pytest.mark.skipif(
        not any(map(shutil.which, names)) and not _may_install(),
        reason=f"{program} is not installed (Debian: apt-get install {package})",
    )


def triton_folder(version: str, config: pytest.Config) -> Path:
    """The folder of a Triton that GPUs get, for PYTHONPATH. Fails in `make test`, which makes it.

    Skips elsewhere if there is none.
    """
    folder = Path(f"{sys.prefix}-triton", version)
    if not (folder / "triton").is_dir():
        missing = f"Triton {version} is not in {folder}: make {folder}/.ready"
        if config.getoption("outcome") is None:
            pytest.skip(missing)
        pytest.fail(missing)
    return folder


def needs_namespaces() -> pytest.MarkDecorator:
    """A mark for tests of the sandbox: where the kernel makes namespaces, the sandbox must work."""
    return pytest.mark.skipif(
        not _makes_namespaces(), reason="this kernel or container lets this user unshare nothing"
    )


@functools.cache
def _makes_namespaces() -> bool:
    """Whether this user may make mount, process and network namespaces, seen by one plain call."""
    flags = 0x00020000 | 0x20000000 | 0x40000000 | (0x10000000 if os.geteuid() else 0)
    code = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({flags}) != 0)"
    command = [sys.executable, "-I", "-S", "-c", code]
    return subprocess.run(command, check=False, timeout=100).returncode == 0


def _may_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None
