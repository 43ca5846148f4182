"""Write `report.html`: a run on one self-contained page.

`data` reads the run's files. Each part of the page is one module (`headline`, `learning`, `work`,
`time_line`, `sections`, `health`); they draw with `plots`, `lanes` and `stacks`. `page` wraps the
result in a document. The report of a run that is still running, or that ended early, shows the
records so far and says so.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from asyncrl.monitoring.report.data import RunData, load_run
from asyncrl.monitoring.report.headline import headline
from asyncrl.monitoring.report.health import health
from asyncrl.monitoring.report.learning import learning
from asyncrl.monitoring.report.markup import element, page
from asyncrl.monitoring.report.sections import orders, samples, settings
from asyncrl.monitoring.report.time_line import time_line
from asyncrl.monitoring.report.work import work
from asyncrl.wire.transport.atomic_files import write_atomically

FILE_NAME = "report.html"


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path. An older report is replaced.

    Raises:
        ReportError: `run_dir` is not the directory of a run.
        OSError: `run_dir` cannot be written to.
    """
    text = render(load_run(run_dir), written=datetime.now(UTC))  # noqa: TID251 - for the reader
    path = run_dir / FILE_NAME
    write_atomically(path, text)
    return path


def render(data: RunData, written: datetime) -> str:
    """The HTML of the report. `written` is the time that its last line gives."""
    body = [
        headline(data),
        learning(data),
        time_line(data),
        work(data),
        samples(data),
        health(data),
        orders(data),
        settings(data),
        element("footer", f"Written {written:%d %B %Y, %H:%M} UTC by asyncrl."),
    ]
    return page(f"{data.name} · asyncrl", body)
