"""`report.html`: one self-contained page, no network and no script."""

from asyncrl.monitoring.report.write import write_report

__all__ = ["write_report"]
