"""`report.html`: a run on one self-contained page that needs no network and no script."""

from monitoring.report.write import write_report

__all__ = ["write_report"]
