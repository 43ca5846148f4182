"""TRL's own virtual environment, made on first use. TRL is no dependency of asyncrl.

The environment holds TRL and what it needs at pinned versions. Everything else (torch,
transformers, vLLM if it is installed) is this interpreter's, so both sides compute with the same
kernels: a `.pth` file puts this interpreter's packages behind the environment's own.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from asyncrl.tasks.model import default_cache_dir

PACKAGES = ("trl==1.16.0", "accelerate==1.15.0")
"""Of these versions, with what they need and this interpreter lacks."""
INSTALL_SECONDS = 600.0
"""Longest time for the installation."""


class TrlMissingError(Exception):
    """TRL cannot be installed here. The message says why and what to do."""


def ensure_trl(cache_dir: Path | None = None, packages: Sequence[str] = PACKAGES) -> Path:
    """The Python of an environment with TRL. It is made if it is missing (under a minute)."""
    shared = sysconfig.get_paths()["purelib"]
    content = "\n".join((*packages, shared, sys.version))
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    place = (cache_dir or default_cache_dir()) / f"trl-{digest}"
    python = place / "bin" / "python"
    if (place / "complete").is_file():
        return python
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        _run([sys.executable, "-m", "venv", "--without-pip", str(place)])
        own = _run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        (Path(own.strip()) / "zz-shared.pth").write_text(shared + "\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        _run([*pip, "install", "--quiet", "--no-input", *packages])
        _run([str(python), "-c", "import importlib.metadata as m; m.version('trl')"])
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(place, ignore_errors=True)
        raise TrlMissingError(
            f"TRL cannot be installed into {place}: {_reason(error)}. Give pip an index that has "
            f"{', '.join(packages)} (PIP_INDEX_URL), or leave TRL out with --contestants"
        ) from error
    (place / "complete").touch()
    return python


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=INSTALL_SECONDS
    )
    return done.stdout


def _reason(error: Exception) -> str:
    """The last line in which pip names an error, or the error itself."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or "").splitlines() if line.strip()]
        named = [line for line in lines if line.startswith("ERROR")] or lines
        if named:
            return str(named[-1]).removeprefix("ERROR: ")
    return str(error)
