"""Write `report.html`: a run on one page that needs nothing else, not even a network.

What the run left behind is read by `report_data`, drawn by `plots` and `lanes`, put into words by
`report_headline`, `report_sections`, `report_time` and `report_samples`, and framed by
`report_page`. A run that is still going on, or that ended early, gets a report as of now that
says so.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from monitoring.report.data import RunData, load_run
from monitoring.report.headline import headline
from monitoring.report.markup import element
from monitoring.report.page import page
from monitoring.report.sections import internals, learning, samples, settings, work
from monitoring.report.time_line import time_line

FILE_NAME = "report.html"


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html`, replacing an older one, and return its path.

    Raises:
        ReportError: `run_dir` is not the directory of a run.
        OSError: it cannot be written to.
    """
    text = render(load_run(run_dir), written=datetime.now(UTC))
    path = run_dir / FILE_NAME
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def render(data: RunData, written: datetime) -> str:
    """The page as text."""
    body = [
        headline(data),
        learning(data),
        work(data),
        time_line(data),
        samples(data),
        internals(data),
        settings(data),
        element("footer", f"Written {written:%d %B %Y, %H:%M} UTC by asyncrl."),
    ]
    return page(f"{data.name} · asyncrl", body)
