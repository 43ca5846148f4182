"""`report.html`: a run on one page that needs nothing else, not even a network."""

from monitoring.report.write import write_report

__all__ = ["write_report"]
