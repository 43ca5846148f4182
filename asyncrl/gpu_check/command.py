"""`asyncrl gpu-check`: chooses parts, runs them, says each verdict, writes what was found."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import UserError
from asyncrl.gpu_check.parts import PARTS, Context, Part, Verdict
from asyncrl.gpu_check.record import record_of, write_json, write_page
from asyncrl.gpu_check.runner import count_gpus, run_parts
from asyncrl.suggestions import nearest


def chosen(names: str | None) -> list[Part]:
    """The parts of `--only NAMES`, in their order; all without names.

    Raises:
        UserError: there is no part of one of these names.
    """
    if names is None:
        return list(PARTS)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [part.name for part in PARTS]
    for name in wanted:
        if name not in known:
            raise UserError(
                f"--only {name}: there is no part of this name.{nearest(name, known)} "
                "`asyncrl gpu-check --list` says what they do"
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
    """Run the parts; return whether none that ran has failed, nor the search for GPUs.

    Args:
        parts: in order.
        say: takes a line at a time.
        limit_seconds: for all parts together.
        small: whether to take the smallest sizes; None: without a GPU.
        json_file: where verdicts and numbers are written.
        page_file: where they are written as a page.
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
    """Write after each part: who rents a machine by the minute may be cut off at any of them."""
    if json_file is not None:
        write_json(json_file, record)
    if page_file is not None:
        write_page(page_file, record)


def _first_line(gpus: int, *, small: bool) -> str:
    found = f"{gpus} GPU(s)" if gpus else "torch sees no GPU"
    return f"{found}{': every part in its smallest size, no number is a measurement' * small}"
