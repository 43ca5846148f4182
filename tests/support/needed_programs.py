"""Programs of other packages that tests run for real: Prometheus and Chromium.

`make test` installs them where it may. A test that lacks one fails there, and is skipped elsewhere.
"""

from __future__ import annotations

import os
import shutil

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


def _may_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None
